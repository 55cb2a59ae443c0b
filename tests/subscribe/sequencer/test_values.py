"""The values around a sequencer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvindex.subscribe.sequencer import ReplayPolicy, SequencerConfig, State
from kvindex.wire.errors import ConfigurationError

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
