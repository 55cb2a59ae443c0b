"""Statistics of a relay and of a replica on NATS, as `PoolCollector` reads them."""

from __future__ import annotations

from typing import Any

RELAY: dict[str, Any] = {
    "relay": {
        "pool": "llama",
        "state": "writing",
        "epoch": "relay1-1",
        "position": 7,
        "head": 7,
        "appends": 6,
        "appended_bytes": 1000,
        "appended_again": 2,
        "forgotten": 2,
        "fenced": 1,
        "refused": 1,
        "failures": 3,
        "epochs": 2,
        "queue": {"waiting_bytes": 10, "overflows": 1, "blocked_seconds": 0.5},
        "snapshots": 4,
        "snapshot_failures": {"NatsError": 2},
        "last_snapshot": {"position": 5, "bytes": 900, "age": 1.5},
    }
}
REPLICA: dict[str, Any] = {
    "replica": {
        "following": True,
        "epoch": "relay1-1",
        "number": 7,
        "lag_messages": 3,
        "lag_seconds": 0.02,
        "rejoins": {"new_epoch": 2},
        "snapshots_refused": {"checksum": 1},
    }
}
