"""Where engines are: asked of the engines themselves, and followed as they come, go and move."""

from kvindex.discovery.discovery import Discovery
from kvindex.discovery.engine import EngineReport, ask_engine
from kvindex.discovery.engines import EngineSource
from kvindex.discovery.files import FileSource, read_targets
from kvindex.discovery.given import Engines, split_engines
from kvindex.discovery.kubernetes import KubernetesSource
from kvindex.discovery.names import DnsSource
from kvindex.discovery.options import DiscoveryOptions
from kvindex.discovery.targets import Found, Source, Target
from kvindex.errors import DiscoveryError

__all__ = [
    "Discovery",
    "DiscoveryError",
    "DiscoveryOptions",
    "DnsSource",
    "EngineReport",
    "EngineSource",
    "Engines",
    "FileSource",
    "Found",
    "KubernetesSource",
    "Source",
    "Target",
    "ask_engine",
    "read_targets",
    "split_engines",
]
