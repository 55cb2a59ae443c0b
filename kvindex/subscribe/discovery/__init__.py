"""Discovers engines, asks them where they publish, and follows them as they start and stop.

Read first: `tracker.py`, which decides, then `discovery.py`, which has the threads.
"""

from kvindex.subscribe.discovery.ask import EngineReport, ask_engine
from kvindex.subscribe.discovery.discovery import Discovery, DiscoveryOptions
from kvindex.subscribe.discovery.kubernetes import KubernetesSource
from kvindex.subscribe.discovery.sources import (
    DnsSource,
    Engines,
    EngineSource,
    FileSource,
    Source,
    Target,
    read_targets,
    split_engines,
)
from kvindex.subscribe.discovery.tracker import Engine
from kvindex.wire.errors import DiscoveryError

__all__ = [
    "Discovery",
    "DiscoveryError",
    "DiscoveryOptions",
    "DnsSource",
    "Engine",
    "EngineReport",
    "EngineSource",
    "Engines",
    "FileSource",
    "KubernetesSource",
    "Source",
    "Target",
    "ask_engine",
    "read_targets",
    "split_engines",
]
