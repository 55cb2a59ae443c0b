"""Runs of live batches: when one may begin, how far it goes, what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex.subscribe.sequencer import State
from tests.subscribe.sequencer.sequencer_script import Script, batch, without_replay

pytestmark = pytest.mark.unit


def take_run(script: Script, first_seq: int, count: int, *, ts: list[float] | None = None) -> int:
    """Give a run to the sequencer; return how many of its batches were taken."""
    batches = [batch(first_seq + position) for position in range(count)]
    return script.sequencer.live_run(
        first_seq, ts or [b.ts for b in batches], [b.fingerprint for b in batches], script.now
    )


def test_a_run_that_begins_elsewhere_or_is_empty_changes_nothing() -> None:
    script = Script().joined(0)
    for first_seq, count in [(0, 2), (2, 2), (2**64 - 1, 2), (1, 0)]:
        assert take_run(script, first_seq, count) == 0
    assert script.applied.next_seq == 1
    assert script.count["live"] == 0


def test_numbers_end_before_the_one_that_marks_a_replays_end() -> None:
    last = 2**64 - 2
    script = without_replay()
    script.live(last - 1)
    assert take_run(script, last, 3) == 1
    assert take_run(script, last + 1, 1) == 0
    assert script.applied.seq == last


def test_a_run_proves_life_and_puts_the_probe_off() -> None:
    script = Script(stale_after=30.0, has_replay=False)
    script.connect()
    script.live(0)
    script.pass_time(31.0)
    assert script.is_in(State.STALE)
    assert take_run(script, 1, 2) == 2
    assert script.is_in(State.LIVE)
    assert script.sequencer.deadline == script.now + 30.0

    script = Script(probe_interval=5.0).joined(0, live=[1])
    script.pass_time(5.0)
    script.reply(1, end=True)  # the first probe showed whose replay it is
    script.pass_time(4.0)
    take_run(script, 2, 2)
    assert script.sequencer.deadline == script.now + 5.0


def test_a_run_does_not_put_off_the_probe_that_shows_whose_replay_it_is() -> None:
    script = Script(probe_interval=5.0).joined(0)
    due = script.now + 5.0
    script.pass_time(4.0)
    take_run(script, 1, 2)
    assert script.sequencer.deadline == due


# When `live` must see each batch: what has been called before, with which arguments.
PROBE = 5.0
SITUATIONS: dict[str, list[tuple[Any, ...]]] = {
    "before connecting": [],
    "before the first batch": [("joined",)],
    "while joining": [("connect",)],
    "in a gap": [("joined", 0), ("live", 3)],
    "while a probe is under way": [("joined", 0), ("pass_time", PROBE)],
    "after a damaged batch": [("joined", 0), ("damaged", None)],
    "while disconnected": [("joined", 0), ("disconnect",)],
    "while identity is unproven": [("joined", 0), ("reconnect",)],
    "proven and nothing delivered since": [("joined", 0), ("reconnect",), ("reply", 0), ("end",)],
    "after closing": [("joined", 0), ("close",)],
}


def led_to(situation: str) -> Script:
    script = Script(probe_interval=PROBE)
    for name, *arguments in SITUATIONS[situation]:
        getattr(script, name)(*arguments)
    return script


@pytest.mark.parametrize("situation", [*SITUATIONS, "in a gap without replay"])
def test_no_run_begins(situation: str) -> None:
    script = led_to(situation) if situation in SITUATIONS else without_replay(0, 3)
    next_seq = script.applied.next_seq
    assert script.sequencer.run_start is None
    assert take_run(script, 1 if next_seq is None else next_seq, 2) == 0
    assert script.applied.next_seq == next_seq


def test_runs_begin_again_once_a_gap_is_filled() -> None:
    script = led_to("in a gap")
    assert script.actions.asked[-1] == 0
    script.reply(0, 1, 2, end=True)
    assert script.sequencer.run_start == 4
