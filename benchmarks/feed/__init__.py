"""The publisher process of the ingest measurements."""

from benchmarks.feed.spec import FeedSpec, sentinel_tokens

__all__ = ["FeedSpec", "sentinel_tokens"]
