"""What Prometheus reads of a pool on NATS."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvindex.service.metrics import PoolCollector
from tests.service.http.pool_statistics import RELAY, REPLICA
from tests.service.http.test_metrics import scraped

pytestmark = pytest.mark.service


def scraped_of(statistics: dict[str, Any]) -> dict[str, list[tuple[dict[str, str], float]]]:
    return scraped(PoolCollector(SimpleNamespace(statistics=lambda: statistics)))


def test_a_relay_has_series_of_what_it_writes() -> None:
    samples = scraped_of(RELAY)
    assert samples["kvindex_relay_writing"] == [({}, 1)]
    assert samples["kvindex_relay_head"] == [({"epoch": "relay1-1"}, 7)]
    assert samples["kvindex_relay_appended_again_total"] == [({}, 2)]
    assert samples["kvindex_relay_fenced_total"] == [({}, 1)]
    assert samples["kvindex_relay_snapshot_failures_total"] == [({"reason": "NatsError"}, 2)]
    assert samples["kvindex_relay_snapshot_age_seconds"] == [({}, 1.5)]


def test_a_replica_has_series_of_how_far_it_is() -> None:
    samples = scraped_of(REPLICA)
    assert samples["kvindex_replica_log_number"] == [({"epoch": "relay1-1"}, 7)]
    assert samples["kvindex_replica_lag_messages"] == [({}, 3)]
    assert samples["kvindex_replica_rejoins_total"] == [({"reason": "new_epoch"}, 2)]


def test_others_and_those_that_have_not_joined_have_none_of_these() -> None:
    assert scraped_of({"ranks": {}}) == {}
    assert scraped_of({"replica": {"following": True}}) == {}
    lost = {**REPLICA["replica"], "number": None, "epoch": None, "following": False}
    samples = scraped_of({"replica": lost})
    assert samples["kvindex_replica_following"] == [({}, 0)]
    assert "kvindex_replica_log_number" not in samples
