"""The table "When an engine crashes" of docs/guarantees.md, step by step."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from kvindex import Client, Rank, RankStatus, State, connect
from kvindex.testing import FakeEngine
from tests.docs.pages import DOCS
from tests.live import link_to, until, worker_of

pytestmark = pytest.mark.e2e

PROMPT = list(range(100))
OTHER = Rank("other")


def best_of(client: Client) -> Rank | None:
    best = client.match(PROMPT).best
    return None if best is None else best.rank


def test_a_crashed_engine_goes_through_the_states_of_the_table() -> None:
    with (
        FakeEngine("vllm-0") as engine,
        FakeEngine("other") as other,
        link_to(engine) as link,
        connect([worker_of(engine, link), worker_of(other)]) as client,
    ):
        engine.serve(PROMPT)
        other.serve(PROMPT[:50])
        client.wait_live(timeout=120.0)
        until(client.statuses, lambda now: now[engine.rank].seq == now[OTHER].seq == 0)
        assert best_of(client) == engine.rank
        seen: SimpleQueue[RankStatus] = SimpleQueue()
        client.on_change(seen.put)

        link.cut()
        until(client.statuses, lambda now: now[engine.rank].state == "connecting")
        down = client.status(engine.rank)
        assert (down.complete, down.counters["disconnects"]) == (True, 1)
        assert client.match(PROMPT)[engine.rank].tokens == 96  # the old blocks stay, marked
        assert best_of(client) == OTHER

        engine.restart()
        engine.serve(PROMPT)
        link.heal()
        until(client.statuses, lambda now: now[engine.rank].restarts == 1)
        client.wait_live(timeout=120.0, complete=True)
        back = client.status(engine.rank)
        assert (back.epoch, back.seq, back.replays_filled) == (1, 0, down.replays_filled + 1)
        assert best_of(client) == engine.rank
        passed = [seen.get() for _ in range(seen.qsize())]

    steps = [
        (status.state, status.complete, status.epoch)
        for status in passed
        if status.rank == engine.rank
    ]
    table = [
        (State.CONNECTING, True, 0),
        (State.SYNCING, True, 0),
        (State.SYNCING, False, 1),
        (State.SYNCING, True, 1),  # its first batch has come
        (State.LIVE, True, 1),
    ]
    first_seen = [steps.index(step) for step in table if step in steps]  # a step may be too short
    assert first_seen == sorted(first_seen)
    assert {table[0], table[-1]} <= set(steps) <= set(table)
    page = (DOCS / "guarantees.md").read_text()
    for state, complete, _ in table:
        assert f"| `{state}` | {complete} |" in page
