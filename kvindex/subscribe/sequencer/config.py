"""Settings of a sequencer, as frozen values that reject impossible settings."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from kvindex.wire.errors import ConfigurationError

__all__ = ["ReplayPolicy", "SequencerConfig"]


def _require_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number of seconds, not {value!r}")


def _require_count(name: str, value: int) -> None:
    if value < 1:
        raise ConfigurationError(f"{name} must be at least 1, not {value!r}")


class ReplayPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long a subscriber waits for replay, and how often it asks.

    Attributes:
        timeout: seconds without a reply after which a request has failed.
        attempts: requests without progress after which the subscriber gives up.
        backoff: seconds before the second try; doubles with each further one.
        max_backoff: longest wait between tries, in seconds.

    Raises:
        ConfigurationError: a duration that is not positive and finite, fewer than one attempt,
            or `max_backoff` below `backoff`.

    Examples:
        >>> ReplayPolicy(attempts=5).timeout
        2.0
    """

    timeout: float = 2.0
    attempts: int = 3
    backoff: float = 0.1
    max_backoff: float = 5.0

    def __post_init__(self) -> None:
        _require_seconds("ReplayPolicy.timeout", self.timeout)
        _require_count("ReplayPolicy.attempts", self.attempts)
        _require_seconds("ReplayPolicy.backoff", self.backoff)
        _require_seconds("ReplayPolicy.max_backoff", self.max_backoff)
        if self.max_backoff < self.backoff:
            raise ConfigurationError(
                f"ReplayPolicy.max_backoff {self.max_backoff!r} is below backoff {self.backoff!r}"
            )


class SequencerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one rank's sequencer.

    Attributes:
        has_replay: whether the publisher has a replay endpoint.
        on_loss: "reset" drops the rank's blocks at a loss, "keep" keeps them, flagged.
        replay_policy: patience with replay; its timeout is also how long a gap waits where
            there is no replay.
        probe_interval: seconds without a new batch after which the tail is checked by replay.
        stale_after: seconds without a proof of life after which the rank is stale.
        max_held: most batches held out of order.
        max_held_bytes: most bytes held out of order.
        recent: how many applied batches are remembered, to tell duplicates from another publisher.

    Raises:
        ConfigurationError: a value that cannot work.
    """

    has_replay: bool
    on_loss: Literal["reset", "keep"] = "reset"
    replay_policy: ReplayPolicy = ReplayPolicy()
    probe_interval: float = 5.0
    stale_after: float = 30.0
    max_held: int = 10_000
    max_held_bytes: int = 64 * 1024 * 1024
    recent: int = 256

    def __post_init__(self) -> None:
        if self.on_loss not in ("reset", "keep"):
            raise ConfigurationError(f"on_loss must be 'reset' or 'keep', not {self.on_loss!r}")
        _require_seconds("probe_interval", self.probe_interval)
        _require_seconds("stale_after", self.stale_after)
        _require_count("max_held", self.max_held)
        _require_count("max_held_bytes", self.max_held_bytes)
        _require_count("recent", self.recent)
