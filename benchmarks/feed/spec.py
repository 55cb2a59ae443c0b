"""What a feed is to publish."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.workload import SENTINEL, Fleet, Segment, Source

MARKS_PER_SECOND: Final = 50
_FIRST_MARKER: Final = 1 << 50  # ids of segments that no request has


@dataclass(frozen=True)
class FeedSpec:
    """What is to be published.

    Attributes:
        source: the workload.
        ranks: number of publishers.
        blocks: how many blocks all of them store, as fast as the subscriber reads.
        event_blocks: most blocks of an event.
        batch_events: most events of a batch.
        paced_blocks: how many more they store after that, at `rate`.
        paced_parts: in how many parts, each of which is asked for.
        rate: blocks per second.
        fill_rate: likewise of what comes before, if there is a paced part; 0: as fast as it goes.
        batch_rate: batches per second, of all ranks in turn; if given, what is paced are single
            batches that were framed beforehand, with `markers` among them.
        worker_ranks: ranks of a worker, which name their dp_rank within it; 0: one worker has all.
    """

    source: Source
    ranks: int
    blocks: int
    event_blocks: int
    batch_events: int
    paced_blocks: int = 0
    paced_parts: int = 1
    rate: float = 0.0
    fill_rate: float = 0.0
    batch_rate: float = 0.0
    worker_ranks: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FeedSpec:
        """Return the specification of which these are the values."""
        return cls(**{**values, "source": Source(**values["source"])})


def sentinel_tokens() -> list[int]:
    """Return the prompt that every rank holds at the end."""
    return _tokens(SENTINEL)


def marker(number: int) -> tuple[Segment, ...]:
    """Return a prompt of one block that is stored once, so that its arrival can be noticed."""
    return (Segment(_FIRST_MARKER + number, 1),)


def marker_tokens(number: int) -> list[int]:
    """Return a marker's tokens."""
    return _tokens(marker(number))


def _tokens(prompt: tuple[Segment, ...]) -> list[int]:
    tokens: list[int] = Fleet(1, seed=0).prompt(prompt).tokens.tolist()
    return tokens
