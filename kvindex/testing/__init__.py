"""Test tools: a fake engine with a real cache, a link with faults, and a clock moved by hand.

They are part of the product: whoever writes a router tests it with them, without a GPU.
"""

from kvindex.testing.answers import CacheKey, Lookup, ResidentPrefix, Served
from kvindex.testing.cache import PagedCache, Running
from kvindex.testing.clock import ManualClock
from kvindex.testing.engine import FakeEngine
from kvindex.testing.faults import Faults, LaneFaults
from kvindex.testing.link import FaultyLink
from kvindex.testing.options import CacheOptions, Group
from kvindex.testing.workload import Request, Workload

__all__ = [
    "CacheKey",
    "CacheOptions",
    "FakeEngine",
    "Faults",
    "FaultyLink",
    "Group",
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
