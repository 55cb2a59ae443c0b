"""Discovers engines, asks them where they publish, and follows them as they start and stop."""

from kvindex.subscribe.discovery.discovery import Discovery, DiscoveryOptions
from kvindex.subscribe.discovery.engine import EngineReport, ask_engine
from kvindex.subscribe.discovery.engines import Engines, EngineSource, split_engines
from kvindex.subscribe.discovery.files import FileSource, read_targets
from kvindex.subscribe.discovery.kubernetes import KubernetesSource
from kvindex.subscribe.discovery.names import DnsSource
from kvindex.subscribe.discovery.targets import Engine, Source, Target
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
