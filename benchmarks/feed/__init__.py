"""The publisher process of the ingest measurements."""

from benchmarks.feed.spec import (
    MARKS_PER_SECOND,
    FeedSpec,
    marker,
    marker_tokens,
    sentinel_tokens,
)

__all__ = ["MARKS_PER_SECOND", "FeedSpec", "marker", "marker_tokens", "sentinel_tokens"]
