"""Where engines are: asked of the engines themselves, and followed as they come, go and move."""

from kvindex.discovery.engine import EngineReport, ask_engine
from kvindex.errors import DiscoveryError

__all__ = ["DiscoveryError", "EngineReport", "ask_engine"]
