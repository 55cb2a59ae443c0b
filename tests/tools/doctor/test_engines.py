"""What an engine says of itself over HTTP, and what the doctor makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from kvindex import Worker
from kvindex.testing import FakeEngine, HttpEngine, HttpOptions
from kvindex.testing.http_engine import Routes
from kvindex.testing.http_server import Response
from kvindex.tools.doctor import Diagnosis, Limits, Target
from kvindex.tools.doctor.engine import EngineHttp, EngineMetrics
from tests.live import link_to, worker_of
from tests.tools.doctor.doctored import (
    BRIEFLY,
    HEARING,
    LIVE,
    NEVER_LIVE,
    PATIENT,
    finds,
    ids,
    look_at,
    port_of,
    the,
    two_ranks,
    unused,
)

pytestmark = pytest.mark.e2e


def test_an_engine_that_does_not_answer_could_not_be_looked_at() -> None:
    report = finds(["engine-unreachable"], "http://127.0.0.1:1")
    assert report.exit_code == 2


@pytest.mark.parametrize("dialect", ["vllm-0.33.0", "sglang-0.5.22"])
def test_an_engine_that_wants_its_key_could_not_be_looked_at(dialect: str) -> None:
    with FakeEngine(dialect=dialect) as engine:
        with HttpEngine(engine, options=HttpOptions(api_key="k")) as server:
            report = finds(["engine-denied"], server.url)
            assert report.exit_code == 2
            assert ids(look_at(server.url, token="wrong", passive=True)) == ["engine-denied"]
            assert ids(look_at(server.url, token="k", limits=PATIENT)) == ["all-well"]


@pytest.mark.parametrize(("dialect", "flag"), [("vllm-0.33.0", "enable_"), ("sglang-0.5.22", "")])
def test_events_that_are_off_are_found_with_the_flag_to_set(dialect: str, flag: str) -> None:
    with FakeEngine(publish=False, dialect=dialect) as engine, HttpEngine(engine) as server:
        report = finds(["events-off"], server.url)
        remedy = the(report, "events-off").remedy
        assert f"--kv-events-config '{{\"{flag or 'publisher'}" in remedy
        assert report.exit_code == 1


def test_an_engine_that_does_not_report_where_it_publishes() -> None:
    with FakeEngine() as engine:
        with HttpEngine(engine, options=HttpOptions(sources=None)) as server:
            report = finds(["sources-unknown"], server.url)
            assert report.exit_code == 2
            target = Target(url=server.url, worker=worker_of(engine))
            assert ids(look_at(target, limits=PATIENT)) == ["all-well"]


SGLANG = {"dialect": "sglang-0.5.22"}
STATED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "a publisher that is not zmq": ({}, {"announce": {"publisher": "nats"}}, ["publisher-not-zmq"]),
    "no prompt fills two blocks": ({"block_size": 1500}, {}, ["block-exceeds-prompts"]),
    "few prompts fill a block": ({"block_size": 528}, {}, ["block-large"]),
    "a cache of less than two requests": ({"num_blocks": 200}, {}, ["cache-small"]),
    "the same of SGLang": ({"num_blocks": 200, **SGLANG}, {}, ["cache-small"]),
    "only decodes": (SGLANG, {"role": "decode"}, ["decode-only"]),
    "bigrams": ({"dialect": "sglang-0.5.20-eagle"}, {}, ["speculates-bigrams"]),
    "prefix caching is off": ({}, {"prefix_caching": False}, ["prefix-caching-off"]),
    "it is off in SGLang": (SGLANG, {"prefix_caching": False}, ["prefix-caching-off"]),
    "no replay endpoint": ({"replay": False}, {}, ["replay-missing"]),
    "hits in a cache without events": ({}, {"external_hits": 320}, ["offload-unseen"]),
}
VERSIONS = [
    ("sglang-0.4.8", "0.5.0rc1", True),
    ("sglang-0.4.8", "0.5.4.post2", True),
    ("sglang-0.4.8", "0.5.6", True),
    ("sglang-0.4.8", "0.5.7", False),
    ("vllm-0.9.1", "0.10.1.1", True),
    ("vllm-0.17.0", "0.19.2", True),
    ("vllm-0.33.0", "dev", False),
]
STATED |= {
    f"version {version} of {dialect}": (
        {"dialect": dialect},
        {"version": version},
        ["version-known-bug"] * bug,
    )
    for dialect, version, bug in VERSIONS
}


@pytest.mark.parametrize("case", STATED)
def test_what_an_engine_states_is_judged_without_a_prompt(case: str) -> None:
    engine, options, expected = STATED[case]
    with FakeEngine(**engine) as fake, HttpEngine(fake, options=HttpOptions(**options)) as server:
        assert ids(look_at(server.url, passive=True)) == expected


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_healthy_side_of_a_pair_is_all_well(role: str) -> None:
    with FakeEngine() as engine:
        with HttpEngine(engine, options=HttpOptions(role=role)) as server:
            finds(["all-well"], server.url, limits=PATIENT)


def test_an_sglang_that_decodes_and_caches_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Routes._server_info

    def cached(engine: Routes) -> Response:
        told = {"disaggregation_decode_enable_radix_cache": True}
        return Response.of_json({**json.loads(plain(engine).body), **told})

    monkeypatch.setattr(Routes, "_server_info", cached)
    with FakeEngine(dialect="sglang-0.5.22") as engine:
        with HttpEngine(engine, options=HttpOptions(role="decode")) as server:
            finds([], server.url, passive=True)


def test_an_odd_entry_among_an_engines_models_breaks_no_examination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = Routes._models
    monkeypatch.setattr(Routes, "_models", lambda engine: ["odd", *listed(engine)])
    with FakeEngine() as engine, HttpEngine(engine) as server:
        assert ids(look_at(server.url, passive=True)) == []


EXTERNAL = "vllm:external_prefix_cache_hits_total 412.0"
NIXL = 'vllm:nixl_xfer_time_seconds_count{engine="0"} 9.0'
BY_SOURCE = 'vllm:prompt_tokens_cached_by_source_total{{source="{}"}} 412.0'.format


@pytest.mark.parametrize(
    ("metrics", "found"),
    [
        ([EXTERNAL], True),
        ([EXTERNAL, NIXL], False),
        ([EXTERNAL, BY_SOURCE("device"), BY_SOURCE("p2p")], False),
        ([EXTERNAL, BY_SOURCE("external_unspecified"), NIXL], False),
        ([EXTERNAL, BY_SOURCE("external_unspecified")], True),
        ([EXTERNAL, BY_SOURCE("host"), NIXL], True),
        ([EXTERNAL, BY_SOURCE("disk")], True),
    ],
)
def test_what_a_prefill_engine_sent_is_no_cache_without_events(
    metrics: list[str], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineHttp, "metrics", lambda _: EngineMetrics("\n".join(metrics)))
    with FakeEngine() as engine, HttpEngine(engine) as server:
        report = finds(["offload-unseen"] * found, server.url, passive=True)
        assert all(finding.evidence["external"] == 412 for finding in report.findings)


def test_ranks_behind_one_port_are_pointed_out() -> None:
    with FakeEngine(dp_rank=0) as zero, FakeEngine(dp_rank=1) as one:
        with HttpEngine([zero, one]) as server:
            report = finds(["dp-behind-one-port", "all-well"], server.url, limits=PATIENT)
            assert report.exit_code == 0
            assert report.targets[0].ranks == {0: zero.endpoint, 1: one.endpoint}


def test_block_sizes_that_differ_are_pointed_out() -> None:
    with FakeEngine(dialect="sglang-0.5.22", block_size=32) as engine:
        engine.serve(range(100))
        with HttpEngine(engine, options=HttpOptions(announce={"block_size": 8})) as server:
            report = look_at(server.url, passive=True, limits=LIVE)
            assert the(report, "block-size-differs").evidence == {"stated": 8, "received": "32"}


def test_a_block_size_that_the_router_assumes_wrongly_is_an_error() -> None:
    with FakeEngine(block_size=32) as engine:
        engine.serve(range(100))
        worker = worker_of(engine)
        assert ids(look_at(worker, block_size=32, limits=LIVE)) == []
        report = look_at(worker, block_size=16, limits=LIVE)
        assert the(report, "block-size-assumed").evidence == {"assumed": 16, "received": "32"}


def test_a_topic_that_names_another_model_is_pointed_out() -> None:
    with FakeEngine(topic="kv@10.0.0.1:8000@other") as engine:
        with HttpEngine(engine, model="mine") as server:
            report = finds(["topic-names-another"], server.url, limits=PATIENT)
            assert the(report, "topic-names-another").evidence["named"] == "other"


def test_many_targets_are_examined_at_once_and_named_apart() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server:
        worker = Worker("a", engine.endpoint, replay=engine.replay_endpoint)
        report = look_at(server.url, worker, worker, "http://127.0.0.1:1", limits=HEARING)
        names = [target.name for target in report.targets]
        assert names == [server.url[7:], "a", "a#2", "127.0.0.1:1"]
        assert sorted(ids(report)) == ["all-well", "engine-unreachable"]
        assert report.exit_code == 2


# What is given beside what the engine says ------------------------------------------------------


def given(server: HttpEngine, worker: Worker, limits: Limits = HEARING) -> Diagnosis:
    """The report of an engine whose URL and endpoints are both given."""
    return look_at(Target(url=server.url, worker=worker), limits=limits)


def test_a_wrong_event_port_is_named_beside_the_engines() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server, unused() as endpoint:
        worker = Worker("a", endpoint, replay=engine.replay_endpoint)
        report = given(server, worker, replace(NEVER_LIVE, handshake=BRIEFLY))
        assert ids(report) == ["endpoints-differ"]
        what = the(report, "endpoints-differ").what
        assert f"publishes at port {port_of(engine.endpoint)}" in what
        assert f"you gave {port_of(endpoint)}" in what


def test_a_replay_endpoint_that_the_engine_has_and_was_not_given_is_named() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server:
        report = given(server, Worker("a", engine.endpoint), PATIENT)
        assert ids(report) == ["replay-not-given"]
        finding = the(report, "replay-not-given")
        assert f"port {port_of(str(engine.replay_endpoint))}" in finding.what
        assert "in the engine" not in finding.remedy


def test_a_rank_that_the_engine_does_not_have_is_an_error_though_somebody_publishes_there() -> None:
    with FakeEngine() as engine, FakeEngine("b") as neighbour, HttpEngine(engine) as server:
        neighbour.serve(range(100))
        endpoints = {0: engine.endpoint, 1: neighbour.endpoint}
        replays = {0: str(engine.replay_endpoint), 1: str(neighbour.replay_endpoint)}
        report = given(server, Worker("a", endpoints, replay=replays), PATIENT)
        assert ids(report) == ["ranks-differ"]
        assert the(report, "ranks-differ").evidence == {"stated": [0], "given": [0, 1]}
        assert report.exit_code == 1


def test_ranks_where_nobody_listens_and_none_should_are_not_examined_one_by_one() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server:
        with unused() as nobody, unused() as no_replay:
            worker = Worker(
                "a",
                {0: engine.endpoint, 1: nobody},
                replay={0: str(engine.replay_endpoint), 1: no_replay},
            )
            assert ids(given(server, worker, PATIENT)) == ["ranks-differ"]


@pytest.mark.parametrize("dialect", ["vllm-0.33.0", "sglang-0.5.23"])
def test_one_rank_of_two_that_is_given_gets_the_test_prompt_every_time(dialect: str) -> None:
    with two_ranks(dialect) as ranks, HttpEngine(ranks) as server:
        for _ in range(2):  # ranks take turns: unpinned, one prompt goes to each
            report = given(server, worker_of(ranks[0]), PATIENT)
            assert ids(report) == ["ranks-differ"]
            assert the(report, "ranks-differ").evidence == {"stated": [0, 1], "given": [0]}
            test = report.targets[0].test
            assert test is not None
            assert test["outcome"] == "all-well"


def test_another_engines_endpoints_are_named_as_such() -> None:
    with FakeEngine() as engine, FakeEngine("b") as other, HttpEngine(engine) as server:
        report = given(server, worker_of(other))
        assert ids(report) == ["endpoints-differ"]
        stated = {"port": port_of(engine.endpoint), "replay": port_of(str(engine.replay_endpoint))}
        other_ports = {
            "port": port_of(other.endpoint),
            "replay": port_of(str(other.replay_endpoint)),
        }
        assert the(report, "endpoints-differ").evidence == {"stated": stated, "given": other_ports}


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_another_engines_replay_endpoint_is_recognized_by_its_batches(
    busy: bool, named: bool
) -> None:
    with FakeEngine() as engine, FakeEngine("b") as other, HttpEngine(engine) as server:
        for number in range(30):
            (other if busy else engine).serve([number] * 40)
        worker = Worker("a", engine.endpoint, replay=other.replay_endpoint)
        if named:
            assert ids(given(server, worker)) == ["endpoints-differ"]
        else:
            options = HttpOptions(sources=None)
            with HttpEngine(engine, options=options) as silent:
                assert ids(given(silent, worker)) == ["replay-of-another"]


def test_ports_that_a_proxy_maps_are_no_fault() -> None:
    with FakeEngine() as engine, HttpEngine(engine) as server, link_to(engine) as link:
        report = given(server, worker_of(engine, link), PATIENT)
        assert ids(report) == ["all-well"]
        assert report.exit_code == 0


def test_the_only_rank_of_a_server_may_have_any_number() -> None:
    # With a load balancer outside, each rank has a server of its own, which names that rank alone.
    with FakeEngine(dp_rank=3) as engine, HttpEngine(engine) as server:
        worker = Worker("a", engine.endpoint, replay=engine.replay_endpoint)
        assert ids(given(server, worker, PATIENT)) == ["all-well"]


def test_ports_are_not_looked_at_while_events_are_off() -> None:
    with FakeEngine(publish=False) as engine, HttpEngine(engine) as server:
        with unused() as endpoint, unused() as replay:
            assert ids(given(server, Worker("a", endpoint, replay=replay))) == ["events-off"]
