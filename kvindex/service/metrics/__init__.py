"""Prometheus metrics of streams, the index and routers; needs the extra `server`.

    from prometheus_client import REGISTRY
    REGISTRY.register(kvindex.service.metrics.RankCollector(client))

Nothing is counted twice: the collectors read `statistics()` when Prometheus asks, so a rank's
series go when it goes.
"""

from kvindex.service.metrics.funnel import FunnelCollector
from kvindex.service.metrics.pools import PoolCollector
from kvindex.service.metrics.ranks import RankCollector, SeriesLabels

__all__ = ["FunnelCollector", "PoolCollector", "RankCollector", "SeriesLabels"]
