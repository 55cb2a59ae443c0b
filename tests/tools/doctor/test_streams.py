"""What an engine's streams carry, and the test prompt that tells engine, stream and index apart."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvindex import BACKEND, BlockStored, EventBatch, Worker, ZmqEventPublisher
from kvindex.testing import (
    CacheOptions,
    FakeEngine,
    Faults,
    FaultyLink,
    Group,
    HttpEngine,
    HttpOptions,
    LaneFaults,
)
from kvindex.tools.doctor import Diagnosis, Limits, Target
from kvindex.wire import (
    END_SEQ,
    encode_batch,
    live_frames,
    parse_replay_request,
    replay_end,
    replay_frames,
)
from kvindex.wire.errors import EncodeError
from kvindex.wire.web import Web
from tests.index.index_events import prompt
from tests.index.test_proofs import sparse
from tests.live import meanwhile as repeating
from tests.live import worker_of
from tests.tools.doctor.doctored import (
    HEARING,
    LIVE,
    PATIENT,
    bound,
    finds,
    ids,
    look_at,
    port_of,
    stranger,
    the,
    two_ranks,
)

pytestmark = pytest.mark.e2e

PROBED = msgspec.structs.replace(PATIENT, listen=1.0)  # replay brings what is not received


def meanwhile(do: Callable[[int], object]) -> AbstractContextManager[None]:
    """Do something over and over in another thread, with 0, 1, 2, ..."""
    numbers = itertools.count()
    return repeating(lambda: do(next(numbers)), pause=0.005)


def stored(block_hash: int | bytes, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=parent,
        token_ids=[1, 2, 3, 4],
        block_size=4,
    )


# The eight outcomes ------------------------------------------------------------------------------


def outcome_of(
    engine: FakeEngine,
    *,
    via: FaultyLink | None = None,
    limits: Limits = HEARING,
    **options: Any,
) -> Any:
    """The report of an active test of this engine, its worker perhaps behind a faulty link."""
    with engine, HttpEngine(engine, options=HttpOptions(**options)) as server:
        worker = worker_of(engine, via) if via is not None else None
        return look_at(Target(url=server.url, worker=worker), limits=limits)


@pytest.mark.parametrize("dialect", ["vllm-0.33.0", "vllm-0.9.1", "sglang-0.5.23"])
@pytest.mark.parametrize("reports", [True, False])
def test_a_prompt_that_is_stored_predicted_and_hit_is_well(dialect: str, reports: bool) -> None:
    engine = FakeEngine(dialect=dialect)
    report = outcome_of(engine, limits=PATIENT, cached_tokens=reports, version="9")
    assert ids(report) == ["cached-tokens-unreported"] * (not reports) + ["all-well"]
    assert report.exit_code == 0
    test = report.targets[0].test
    assert test == {
        "outcome": "all-well",
        "sent": 65,
        "stored": 64,
        "predicted": 64,
        "cached": 64,
        "block_size": 16,
    }


@pytest.mark.parametrize(
    ("options", "limits", "expected", "evidence"),
    [
        ({"reads_cache": False}, PATIENT, ["engine-never-hits"], {"predicted": 64}),
        ({"salt": "gateway"}, HEARING, ["index-misses"], {}),
        ({"salt": "gateway", "reads_cache": False}, HEARING, ["index-and-engine-miss"], {}),
        ({"silent": True}, LIVE, ["caches-unpublished"], {}),
        ({"prefix_caching": False, "metrics": False}, LIVE, ["nothing-cached"], {}),
        ({"drops_blocks": 1}, PATIENT, ["all-well", "hit-one-block-less"], {}),
        ({"drops_blocks": 2}, PATIENT, ["hit-differs"], {}),
        ({"prepends": True}, LIVE, ["token-count-differs"], {"counted": 66, "sent": 65}),
    ],
)
def test_stream_index_and_engine_that_disagree_are_found(
    options: dict[str, Any], limits: Limits, expected: list[str], evidence: dict[str, int]
) -> None:
    report = outcome_of(FakeEngine(), limits=limits, **options)
    assert ids(report) == expected
    assert report.findings[-1].evidence.items() >= evidence.items()


@pytest.mark.parametrize(
    ("reads_cache", "finding_id"), [(True, "live-stream-mute"), (False, "live-stream-mute-no-hit")]
)
def test_lost_live_messages_are_found_despite_replay(reads_cache: bool, finding_id: str) -> None:
    with FakeEngine() as engine:
        faults = Faults(live=LaneFaults(drop=1.0))
        with FaultyLink(engine.endpoint, engine.replay_endpoint, faults=faults) as link:
            stated = {"endpoint": link.endpoint, "replay_endpoint": link.replay_endpoint}
            report = outcome_of(
                engine, via=link, limits=PROBED, reads_cache=reads_cache, announce=stated
            )
            assert ids(report) == [finding_id]


@pytest.mark.parametrize("dialect", ["vllm-0.33.0", "sglang-0.5.23"])
@pytest.mark.parametrize("keeps", [True, False])
def test_an_engine_that_ignores_the_asked_rank_is_found(dialect: str, keeps: bool) -> None:
    with two_ranks(dialect) as ranks:
        with HttpEngine(ranks, options=HttpOptions(keeps_rank=keeps)) as server:
            report = look_at(server.url, limits=PATIENT)
    finding_id = "all-well" if keeps else "rank-not-kept"
    assert sorted(ids(report)) == sorted([finding_id, "dp-behind-one-port"])


def test_a_model_that_is_not_served_is_reported() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server:
        report = finds(["completion-failed"], server.url, model="nope", limits=PATIENT)
        assert "nope" in the(report, "completion-failed").what


def test_a_passive_examination_sends_no_prompt() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server:
        assert ids(look_at(server.url, passive=True)) == []
        assert server.requests == 0


def test_two_engines_with_their_own_hash_seeds_are_pointed_out() -> None:
    with FakeEngine(seed=1) as engine, FakeEngine(seed=2) as other:
        with HttpEngine(engine) as first, HttpEngine(other) as second:
            report = look_at(first.url, second.url, limits=PATIENT)
            assert ids(report) == ["hash-seeds-differ", "all-well", "all-well"]
            assert report.exit_code == 0


# What is received ------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [False, True])  # which goes on and on, and is not waited for
def test_a_topic_filter_that_lets_nothing_through_names_what_was_received(replay: bool) -> None:
    limits = msgspec.structs.replace(HEARING, live=0.3)
    with FakeEngine(topic="kv@pod@m", replay=replay) as engine:
        with meanwhile(lambda number: engine.serve([number, *range(20)])):
            report = look_at(worker_of(engine, topic="kv-events"), limits=limits)
    assert ids(report)[: 2 - replay] == ["topic-filtered", "replay-not-named"][: 2 - replay]
    assert the(report, "topic-filtered").evidence["topics"] == ["kv@pod@m"]
    assert report.seconds < limits.replay


def test_an_engine_that_serves_and_publishes_nothing_is_found() -> None:
    with FakeEngine() as engine:
        with HttpEngine(engine, options=HttpOptions(silent=True)) as server:
            web = Web(server.url)
            body = msgspec.json.encode({"prompt": list(range(1, 40)), "max_tokens": 1})
            with meanwhile(lambda _: web.post("/v1/completions", body, 10.0)):
                finds(["silent-while-serving"], server.url, passive=True, limits=HEARING)


def test_numbers_without_messages_are_found() -> None:
    # As vLLM up to 0.10.1 with sha256 hashes: what cannot be encoded uses up its number.
    with ZmqEventPublisher(0, "tcp://*:0", None, dialect="vllm-0.9.1") as publisher:

        def publish(number: int) -> None:
            wide = bytes(32) if number % 2 else number
            event = stored(wide)
            with contextlib.suppress(EncodeError):
                publisher.publish(EventBatch(0.0, [event], 0))

        with meanwhile(publish):
            report = look_at(Worker("a", publisher.endpoint), limits=HEARING)
    assert "numbers-jump" in ids(report)


def test_a_cache_that_evicts_what_comes_again_is_found() -> None:
    with FakeEngine(num_blocks=8, block_size=4) as engine:
        prompts = [[number] * 25 for number in range(1, 4)]
        with meanwhile(lambda number: engine.serve(prompts[number % 3])):
            finds(["evicted-before-reuse"], worker_of(engine), limits=HEARING)


@contextmanager
def publishing_raw(payload: bytes) -> Iterator[str]:
    """The endpoint of a publisher without replay that sends this payload again and again."""
    with bound(zmq.PUB) as (sock, endpoint):
        with meanwhile(lambda number: sock.send_multipart(live_frames(b"", number, payload))):
            yield endpoint


def test_messages_that_cannot_be_decoded_are_found() -> None:
    with publishing_raw(b"not msgpack") as endpoint:
        report = look_at(Worker("a", endpoint), limits=HEARING)
    assert "undecodable" in ids(report)


@contextmanager
def balanced(*endpoints: str) -> Iterator[str]:
    """An address that gives each connection to the next of these endpoints."""
    targets = itertools.cycle(endpoints)
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def forward(near: socket.socket) -> None:
        far = socket.create_connection(("127.0.0.1", port_of(next(targets))))
        sockets.extend((near, far))
        for pair in ((near, far), (far, near)):
            threads.append(threading.Thread(target=pump, args=pair))
            threads[-1].start()

    with stranger(forward) as endpoint:
        yield endpoint
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for connection in sockets:
            connection.close()


def test_an_address_that_balances_over_engines_is_found() -> None:
    with FakeEngine(seed=1) as engine, FakeEngine(seed=2) as other:
        with balanced(engine.endpoint, other.endpoint) as endpoint, HttpEngine(engine) as server:
            target = Target(
                url=server.url, worker=Worker("a", endpoint, replay=engine.replay_endpoint)
            )
            # Both connections that compare may get the same engine, if the client's comes between.
            looks = (ids(look_at(target, limits=HEARING)) for _ in range(20))
            assert any("several-publishers" in finding_ids for finding_ids in looks)


def test_an_address_at_which_a_relay_sends_two_ranks_is_found() -> None:
    with bound(zmq.PUB) as (relay, endpoint):

        def send(number: int) -> None:
            payload = encode_batch(EventBatch(1_000.0 + number, []))
            for first in (0, 100_000):  # two ranks that count for themselves
                relay.send_multipart(live_frames(b"", first + number, payload))

        with meanwhile(send):
            report = look_at(Worker("a", endpoint), limits=HEARING)
    assert "several-publishers" in ids(report)


@contextmanager
def endless_replay() -> Iterator[Worker]:
    """A publisher that says nothing, and whose replay goes on and on: a batch, a little later one.

    It stands for a history that takes longer than the doctor has time for.
    """
    with bound(zmq.PUB) as (_, live), bound(zmq.ROUTER) as (replay, endpoint):
        done = threading.Event()

        def answer() -> None:
            asked: tuple[bytes, int] | None = None
            while not done.is_set():
                if replay.poll(5):
                    asked = parse_replay_request(replay.recv_multipart())
                if asked is None:
                    continue
                identity, seq = asked
                if seq == END_SEQ:  # the doctor asks whether anybody answers
                    replay.send_multipart(replay_end(identity, with_topic=False))
                    asked = None
                    continue
                payload = encode_batch(EventBatch(0.0, [stored(seq + 1)], 0))
                frames = replay_frames(identity, b"", seq, payload, with_topic=False)
                replay.send_multipart(frames)
                asked = identity, seq + 1

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield Worker("a", live, replay=endpoint)
        finally:
            done.set()
            thread.join()


def test_a_replay_that_still_runs_when_the_time_is_over_is_no_fault() -> None:
    limits = msgspec.structs.replace(LIVE, replay=0.1)
    with endless_replay() as worker:
        report = look_at(worker, limits=limits)
    assert (ids(report), report.exit_code) == (["replay-running"], 0)
    seen = the(report, "replay-running").evidence
    assert 0 < seen["done"] <= seen["known"]


def test_an_index_that_lags_behind_its_replay_misses_nothing_yet() -> None:
    limits = msgspec.structs.replace(HEARING, replay=0.1)
    with endless_replay() as worker, FakeEngine(block_size=4, num_blocks=2_000) as engine:
        stated = {"endpoint": worker.endpoint, "replay_endpoint": worker.replay}
        with HttpEngine(engine, options=HttpOptions(announce=stated)) as server:
            report = look_at(server.url, limits=limits)
    assert (ids(report), report.exit_code) == (["replay-running"], 0)


# What the index makes of it --------------------------------------------------------------------


def test_a_history_that_reaches_back_too_little_is_found() -> None:
    with FakeEngine(buffer_steps=2) as engine:
        for number in range(10):
            engine.serve([number] * 40)
        assert ids(look_at(worker_of(engine), limits=LIVE)) == ["stream-incomplete"]


def report_on(*events: BlockStored) -> Diagnosis:
    """The report of a publisher of one batch."""
    with ZmqEventPublisher(0, "tcp://*:0", "tcp://*:0") as publisher:
        publisher.publish(EventBatch(0.0, list(events), 0))
        worker = Worker("a", publisher.endpoint, replay=publisher.replay_endpoint)
        return look_at(worker, limits=LIVE)


def test_blocks_without_a_place_are_found() -> None:
    report = report_on(stored(1, parent=77))
    assert ids(report) == ["blocks-left-out"]
    assert the(report, "blocks-left-out").evidence["reasons"] == "1 orphans"


@pytest.mark.parametrize(("tag", "named"), [("TierBlocksCleared", True), ("BlockInactive", False)])
def test_events_of_unknown_kinds_are_named_unless_they_are_harmless(tag: str, named: bool) -> None:
    payload = msgspec.msgpack.encode([0.0, [stored(1), {"type": tag}], 0])
    with publishing_raw(payload) as endpoint:
        report = look_at(Worker("a", endpoint), limits=HEARING)
    assert ("events-unknown" in ids(report)) == named
    assert not named or the(report, "events-unknown").evidence["tags"].endswith(f" {tag}")


@pytest.mark.parametrize("hybrid", [True, False])
def test_blocks_of_windows_without_a_place_are_no_loss(hybrid: bool) -> None:
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    whole = msgspec.structs.replace(stored(1), **full)
    window = BlockStored(
        block_hashes=[5],
        parent_block_hash=77,
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        block_size=4,
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=8,
    )
    report = report_on(whole, window) if hybrid else report_on(window)
    assert ids(report) == ([] if hybrid else ["windows-only"])


def test_blocks_of_windows_whose_place_their_hashes_prove_are_no_finding() -> None:
    assert ids(report_on(sparse(prompt(6), 4, 5))) == []


def test_a_setting_that_events_leave_out_is_asked_for() -> None:
    hybrid = CacheOptions(groups=(Group(), Group.window(64)))
    with FakeEngine(dialect="vllm-0.20.0", options=hybrid) as engine:
        engine.serve(range(100))
        assert ids(look_at(worker_of(engine), limits=LIVE)) == ["setting-untold"]


@pytest.mark.skipif(BACKEND != "native", reason="needs the native index")
def test_prompts_that_part_at_one_place_are_counted() -> None:
    with FakeEngine(block_size=4, num_blocks=2_000) as engine:
        for number in range(30):
            engine.serve([*range(100, 108), number, *range(200, 240)])
        report = look_at(worker_of(engine), limits=LIVE)
        assert the(report, "prompts-diverge").evidence == {"prompts": 30, "all": 30, "tokens": 8}
        assert report.exit_code == 0
