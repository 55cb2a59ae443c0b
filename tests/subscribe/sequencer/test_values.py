"""The values around a sequencer: settings, the held buffer."""

from __future__ import annotations

from typing import Any

import pytest

from kvindex.subscribe.sequencer import ReplayPolicy, SequencerConfig, State
from kvindex.subscribe.sequencer.batches import Held, HeldBatch
from kvindex.wire.errors import ConfigurationError
from tests.subscribe.sequencer.sequencer_script import batch

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0.0}, "ReplayPolicy.timeout"),
        ({"timeout": float("inf")}, "ReplayPolicy.timeout"),
        ({"attempts": 0}, "ReplayPolicy.attempts"),
        ({"backoff": -1.0}, "ReplayPolicy.backoff"),
        ({"backoff": 6.0}, "ReplayPolicy.max_backoff"),
    ],
)
def test_replay_refuses_what_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ReplayPolicy(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_loss": "ignore"}, "on_loss"),
        ({"probe_interval": 0.0}, "probe_interval"),
        ({"stale_after": float("nan")}, "stale_after"),
        ({"max_held": 0}, "max_held"),
        ({"max_held_bytes": 0}, "max_held_bytes"),
        ({"recent": 0}, "recent"),
    ],
)
def test_config_refuses_what_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        SequencerConfig(has_replay=True, **options)


def test_states_read_as_their_names() -> None:
    assert [str(state) for state in State][:3] == ["connecting", "syncing", "live"]
    assert State("live") is State.LIVE


def entry(seq: int, size: int = 10, *, confirmed: bool = False) -> HeldBatch:
    return HeldBatch(batch(seq, size=size), asked=1, confirmed=confirmed, arrived_at=0.0)


def test_held_is_sorted_and_bounded() -> None:
    held = Held(max_batches=2, max_bytes=100)
    assert (held.first, held.highest) == (None, -1)
    assert held.add(entry(5))
    assert held.add(entry(3))
    assert not held.add(entry(4))
    assert (held.first, held.highest, len(held), held.size) == (3, 5, 2, 20)
    assert held.discard_below(5) == 1
    assert held.pop(5) is not None
    assert held.pop(5) is None
    assert held.size == 0


def test_held_counts_a_replaced_batch_once() -> None:
    held = Held(max_batches=1, max_bytes=100)
    assert held.add(entry(5, size=40))
    assert held.add(entry(5, size=60))
    assert (len(held), held.size) == (1, 60)


def test_one_batch_is_always_held_however_large() -> None:
    held = Held(max_batches=5, max_bytes=10)
    assert held.add(entry(1, size=1000))
    assert not held.add(entry(2, size=1))


def test_only_a_later_replay_testifies_against_a_held_batch() -> None:
    held = Held(max_batches=5, max_bytes=100)
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
    held = Held(max_batches=2, max_bytes=100)
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
    held = Held(max_batches=2, max_bytes=100)
    for seq in (5, 6, 7):
        held.note_damaged(seq, 0.0)
    assert held.highest == 6
    held.forget_damaged(5)
    assert (held.hole_end, held.highest) == (6, 6)
