"""Test tools: a fake engine with a real cache (over HTTP too), a faulty link, a manual clock.

They are part of the product: authors of routers test with them, without a GPU.

Read first: `engine.py` and `cache.py`, then `link.py`.
May import: `kvindex.wire`, `kvindex.publish`, `kvindex.subscribe`, `kvindex.index` and the root.
"""

from kvindex.testing.blocks import (
    CacheKey,
    CacheOptions,
    Group,
    Lookup,
    ResidentPrefix,
    Served,
)
from kvindex.testing.cache import PagedCache, Running
from kvindex.testing.clock import ManualClock
from kvindex.testing.engine import FakeEngine
from kvindex.testing.faults import Faults, LaneFaults
from kvindex.testing.http_engine import HttpEngine, HttpOptions
from kvindex.testing.http_server import HttpFaults
from kvindex.testing.link import FaultyLink
from kvindex.testing.workload import Request, Workload

__all__ = [
    "CacheKey",
    "CacheOptions",
    "FakeEngine",
    "Faults",
    "FaultyLink",
    "Group",
    "HttpEngine",
    "HttpFaults",
    "HttpOptions",
    "LaneFaults",
    "Lookup",
    "ManualClock",
    "PagedCache",
    "Request",
    "ResidentPrefix",
    "Running",
    "Served",
    "Workload",
]
