"""Replay endpoints that are dead, silent, or no longer reach back."""

from __future__ import annotations

import pytest

from kvindex import Rank, State
from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults
from tests.live import (
    QUICK,
    assert_true,
    caught_up,
    client_of,
    followed,
    link_to,
    wait_counter,
    wait_status,
    worker_of,
)
from tests.subscribe.peers import RANK, prompt, publish_until

pytestmark = pytest.mark.faults


def test_replay_endpoint_dead_while_live_goes_on_live_ingest_of_every_rank_never_stops(
    engine: FakeEngine, other: FakeEngine, link: FaultyLink
) -> None:
    with client_of(worker_of(engine, link), worker_of(other), replay_policy=QUICK) as client:
        engine.serve(prompt(0))
        caught_up(client, engine, other)
        link.silence_replay()
        link.drop_next(1)
        engine.serve(prompt(1))  # lost for good
        engine.serve(prompt(2))
        wait_status(client, RANK, state=State.REPAIRING)
        other.serve(prompt(3))  # another rank's stream goes on while this one repairs
        caught_up(client, other)
        assert client.match(prompt(3))[Rank("other", 0)].tokens == 64
        wait_status(client, RANK, losses=1, state=State.LIVE)
        engine.serve(prompt(4))
        wait_status(client, RANK, seq=3)
        # What was held before the loss is dropped: a removal may be lost.
        assert [client.match(prompt(n))[RANK].tokens for n in (0, 2, 4)] == [0, 64, 64]
        status = client.status(RANK)
        assert not status.complete
        assert status.replays_failed >= 3


def test_loss_with_policy_keep_leaves_the_old_answers_flagged(
    engine: FakeEngine, link: FaultyLink
) -> None:
    with client_of(worker_of(engine, link), on_loss="keep", replay_policy=QUICK) as client:
        engine.serve(prompt(0))
        caught_up(client, engine)
        link.silence_replay()
        link.drop_next(1)
        engine.serve(prompt(1))
        engine.serve(prompt(2))
        wait_status(client, RANK, losses=1, state=State.LIVE)
        match = client.match(prompt(0))
        assert match[RANK].tokens == 64
        assert match[RANK].complete is False
        assert client.match(prompt(1))[RANK].tokens == 0


def test_gap_without_a_replay_endpoint_is_a_loss_and_live_goes_on() -> None:
    with FakeEngine("engine", replay=False) as engine, FaultyLink(engine.endpoint) as link:
        with client_of(worker_of(engine, link), replay_policy=QUICK) as client:
            last = publish_until(
                client, lambda n: engine.serve(prompt(n)), lambda s: s.seq is not None
            )
            link.drop_next(1)
            engine.serve(prompt(2001))
            engine.serve(prompt(2002))
            wait_status(client, RANK, losses=1, state=State.LIVE)
            assert client.match(prompt(2002))[RANK].tokens == 64
            assert client.match(prompt(last))[RANK].tokens == 0


def test_replay_buffer_wrapped_before_we_join_gives_a_partial_but_true_index() -> None:
    with FakeEngine("engine", buffer_steps=4) as engine:
        for number in range(10):
            engine.serve(prompt(number))
        with client_of(worker_of(engine)) as earlier:  # it has seen all: the buffer has wrapped
            caught_up(earlier, engine)
        with followed(engine) as client:
            status = client.status(RANK)
            assert (status.complete, status.losses) == (False, 0)
            assert [client.match(prompt(n))[RANK].tokens for n in range(10)] == [0] * 6 + [64] * 4
            engine.serve(prompt(10))  # and it goes on
            caught_up(client, engine)
            assert client.match(prompt(10))[RANK].tokens == 64


def test_replay_buffer_wrapped_past_a_gap_is_a_loss_not_an_endless_retry() -> None:
    with FakeEngine("engine", buffer_steps=3) as engine, link_to(engine) as link:
        with client_of(worker_of(engine, link), probe_interval=60.0) as client:
            engine.serve(prompt(0))
            caught_up(client, engine)
            link.drop_next(8)
            for number in range(1, 10):
                engine.serve(prompt(number))
            wait_status(client, RANK, losses=1)
            caught_up(client, engine)
            held = [client.match(prompt(n))[RANK].tokens for n in range(10)]
            assert held == [0] * 7 + [64] * 3


def test_last_batch_lost_and_then_silence_is_found_by_a_probe(
    engine: FakeEngine, link: FaultyLink
) -> None:
    with client_of(worker_of(engine, link)) as client:
        engine.serve(prompt(0))
        caught_up(client, engine)
        link.drop_next(1)
        engine.serve(prompt(1))  # and not another word
        caught_up(client, engine)
        assert_true(client, engine, prompts=[prompt(0), prompt(1)])
        assert client.status(RANK).counters["tail_repaired"] == 1
        assert client.status(RANK).complete


def test_replies_lost_inside_a_replay_are_asked_for_again() -> None:
    faults = Faults(replay=LaneFaults(drop=0.05))
    with FakeEngine("engine", num_blocks=4096) as engine:
        for number in range(200):
            engine.serve(prompt(number))
        with link_to(engine, faults=faults, seed=3) as link:
            with client_of(worker_of(engine, link)) as client:
                wait_counter(client, RANK, "replays_asked", 2)
                link.quiesce()
                caught_up(client, engine)
                assert_true(client, engine)
                assert client.status(RANK).complete
                assert client.status(RANK).losses == 0


def test_silent_replay_at_joining_gives_live_batches_after_the_tries_are_used_up(
    engine: FakeEngine, link: FaultyLink
) -> None:
    engine.serve(prompt(0))
    link.silence_replay()
    with client_of(worker_of(engine, link), replay_policy=QUICK) as client:
        wait_status(client, RANK, connected=True)
        engine.serve(prompt(1))
        wait_status(client, RANK, state=State.LIVE)
        engine.serve(prompt(2))
        wait_status(client, RANK, seq=2)
        assert not client.status(RANK).complete
        assert [client.match(prompt(n))[RANK].tokens for n in (0, 2)] == [0, 64]
