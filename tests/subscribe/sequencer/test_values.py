"""The values around a sequencer: settings, the held buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvindex.subscribe.sequencer import ReplayPolicy, SequencerConfig, State
from kvindex.subscribe.sequencer.batches import HeldBatch, ReorderBuffer
from kvindex.wire.errors import ConfigurationError
from tests.subscribe.sequencer.sequencer_script import batch

pytestmark = pytest.mark.unit

REPLAY = ReplayPolicy
CONFIG = partial(SequencerConfig, has_replay=True)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (REPLAY, {"timeout": 0.0}, "ReplayPolicy.timeout"),
        (REPLAY, {"timeout": float("inf")}, "ReplayPolicy.timeout"),
        (REPLAY, {"attempts": 0}, "ReplayPolicy.attempts"),
        (REPLAY, {"backoff": -1.0}, "ReplayPolicy.backoff"),
        (REPLAY, {"backoff": 6.0}, "ReplayPolicy.max_backoff"),
        (CONFIG, {"on_loss": "ignore"}, "on_loss"),
        (CONFIG, {"probe_interval": 0.0}, "probe_interval"),
        (CONFIG, {"stale_after": float("nan")}, "stale_after"),
        (CONFIG, {"max_held": 0}, "max_held"),
        (CONFIG, {"max_held_bytes": 0}, "max_held_bytes"),
        (CONFIG, {"recent": 0}, "recent"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    make: Callable[..., object], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(**options)


def test_states_read_as_their_names() -> None:
    assert [str(state) for state in State][:3] == ["connecting", "syncing", "live"]
    assert State("live") is State.LIVE


def entry(seq: int, size: int = 10, *, confirmed: bool = False) -> HeldBatch:
    return HeldBatch(batch(seq, size=size), asked=1, confirmed=confirmed, arrived_at=0.0)


def test_held_is_sorted_and_bounded() -> None:
    held = ReorderBuffer(max_batches=2, max_bytes=100)
    assert (held.first, held.highest) == (None, -1)
    assert [held.add(entry(seq, size)) for seq, size in [(5, 40), (5, 60), (3, 10), (4, 10)]] == [
        True,
        True,  # in place of the one before
        True,
        False,
    ]
    assert (held.first, held.highest, len(held), held.size) == (3, 5, 2, 70)
    assert held.discard_below(5) == 1
    assert held.pop(5) is not None
    assert held.pop(5) is None
    assert held.size == 0
    assert held.add(entry(1, size=1000)), "one is always held, however large"
    assert not held.add(entry(2, size=1))


def test_only_a_later_replay_testifies_against_a_held_batch() -> None:
    held = ReorderBuffer(max_batches=5, max_bytes=100)
    held.add(entry(1))
    held.add(entry(2, confirmed=True))
    held.testify(1)
    held.testify(2)
    first, second = held.get(1), held.get(2)
    assert first is not None
    assert second is not None
    assert (first.missed, second.missed) == (1, 0)
    assert held.start_of_run(3) == 1
    assert held.start_of_run(7) == 7


def test_what_came_damaged_ends_a_hole_until_its_batch_comes() -> None:
    held = ReorderBuffer(max_batches=2, max_bytes=100)
    held.note_damaged(4, 1.0)
    held.add(entry(6))
    held.note_damaged(6, 2.0)  # held: there is nothing to repair
    assert (held.first, held.hole_end, held.highest, held.waiting_since) == (6, 4, 6, 0.0)
    assert held.is_damaged(4)
    assert not held.is_damaged(6)
    held.add(entry(4))
    assert (held.hole_end, held.is_damaged(4), len(held)) == (4, False, 2)
    held.dropped = 9
    assert held.highest == 9
    assert held.clear() == 2
    assert (bool(held), held.highest, held.waiting_since) == (False, -1, None)


def test_damaged_batches_are_remembered_within_a_bound() -> None:
    held = ReorderBuffer(max_batches=2, max_bytes=100)
    for seq in (5, 6, 7):
        held.note_damaged(seq, 0.0)
    assert held.highest == 6
    held.forget_damaged(5)
    assert (held.hole_end, held.highest) == (6, 6)
