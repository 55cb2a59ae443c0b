"""A pool on NATS, as its relay and its replicas see it, as Prometheus series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import Metric

from kvindex.service.metrics.families import ReadCollector, Statistics, counter, gauge

_APPENDS: Final = {
    "appends": "Bodies that were appended to the log",
    "appended_bytes": "Their bytes",
    "appended_again": "Bodies that were appended again after trouble",
    "forgotten": "Bodies that NATS acknowledged and lost",
    "fenced": "How often another relay took over",
    "foreign": "Epochs given up since another client wrote in their subject",
    "failures": "Steps of the relay that NATS did not answer, or refused",
    "moves": "Changes to another server, since JetStream did not answer for 10 s",
    "epochs": "Epochs that the relay began",
    "snapshots": "Snapshots that were stored",
    "snapshots_lost": "Snapshots that were not in the bucket any more as they were stored",
}


class PoolCollector(ReadCollector):
    """Collects the counters of a relay, or of a replica that follows a pool on NATS.

    Args:
        source: a `kvindex.replicas.nats.Relay`, or a replica; any other source has no such series.

    Thread safety: any thread may collect.
    """

    def __init__(self, source: Statistics) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield the present values."""
        return pool_series(self._source.statistics())


def pool_series(statistics: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the series of what statistics have of a pool."""
    if "relay" in statistics:
        yield from _relay_series(statistics["relay"])
    if "lag_messages" in statistics.get("replica", ()):
        yield from _replica_series(statistics["replica"])


def _relay_series(relay: Mapping[str, Any]) -> Iterator[Metric]:
    writes = relay["state"] == "writing"
    yield gauge("kvindex_relay_writing", "Whether this relay writes the pool's log", writes)
    text = "Number of the last message in the log that is known"
    yield gauge("kvindex_relay_head", text, [((relay["epoch"],), relay["head"])], "epoch")
    for name, text in _APPENDS.items():
        yield counter(f"kvindex_relay_{name}", text, relay.get(name, 0))
    queue = relay["queue"]
    yield gauge("kvindex_relay_queue_bytes", "Bytes that wait for NATS", queue["waiting_bytes"])
    text = "Epochs that ended since NATS accepted too little"
    yield counter("kvindex_relay_queue_overflows", text, queue["overflows"])
    text = "Seconds for which the subscriber waited for NATS"
    yield counter("kvindex_relay_blocked_seconds", text, queue["blocked_seconds"])
    failures = [((reason,), count) for reason, count in relay.get("snapshot_failures", {}).items()]
    text = "Snapshots that could not be stored"
    yield counter("kvindex_relay_snapshot_failures", text, failures, "reason")
    newest = relay.get("last_snapshot")
    if newest is not None:
        yield gauge("kvindex_relay_snapshot_age_seconds", "Of the newest", newest["age"])
        yield gauge("kvindex_relay_snapshot_bytes", "Of the newest", newest["bytes"])


def _replica_series(replica: Mapping[str, Any]) -> Iterator[Metric]:
    following = bool(replica["following"])
    yield gauge("kvindex_replica_following", "Whether this replica follows the log", following)
    if replica["number"] is not None:
        rows = [((replica["epoch"],), replica["number"])]
        yield gauge("kvindex_replica_log_number", "Of the last message applied", rows, "epoch")
        text = "Messages in the log that were not received yet"
        yield gauge("kvindex_replica_lag_messages", text, replica["lag_messages"])
        text = "How old the last message is"
        yield gauge("kvindex_replica_lag_seconds", text, replica["lag_seconds"])
    rejoins = [((reason,), count) for reason, count in replica["rejoins"].items()]
    text = "How often it fetched a snapshot again"
    yield counter("kvindex_replica_rejoins", text, rejoins, "reason")
    refused = [((reason,), count) for reason, count in replica["snapshots_refused"].items()]
    yield counter("kvindex_replica_snapshots_refused", "Snapshots of no use", refused, "reason")
