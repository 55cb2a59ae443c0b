"""What a feed is to publish."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.workload import SENTINEL, Fleet, Source


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

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FeedSpec:
        """Return the specification of which these are the values."""
        return cls(**{**values, "source": Source(**values["source"])})


def sentinel_tokens() -> list[int]:
    """Return the prompt that every rank holds at the end."""
    tokens: list[int] = Fleet(1, seed=0).prompt(SENTINEL).tokens.tolist()
    return tokens
