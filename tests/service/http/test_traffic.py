"""What a server was asked, for metrics."""

from __future__ import annotations

import pytest

from kvindex.service.catalog import Partition
from kvindex.service.exposition import RequestCollector
from kvindex.service.metrics import FunnelCollector
from kvindex.service.traffic import MOST_PARTITIONS, Traffic
from tests.service.http.test_metrics import scraped

pytestmark = pytest.mark.service

A, B = Partition("a"), Partition("a", "blue")


def test_requests_and_queries_are_added_up_by_route_and_partition() -> None:
    traffic = Traffic()
    traffic.request("POST", "/query", 200)
    traffic.query(A, 100, 60, 70_000)
    traffic.query(B, 10, 0, 10_000_000_000)
    traffic.query(A, 50, 50, 1_000)
    traffic.request("POST", "/query", 200)
    samples = scraped(RequestCollector(traffic))
    assert samples["kvindex_http_requests_total"] == [({"route": "/query", "code": "200"}, 2)]
    tokens = {labels["routing_group"]: n for labels, n in samples["kvindex_query_tokens_total"]}
    best = {
        labels["routing_group"]: n for labels, n in samples["kvindex_query_best_match_tokens_total"]
    }
    assert tokens == {"default": 150, "blue": 10}
    assert best == {"default": 110, "blue": 0}
    counts = {
        (labels["routing_group"], labels["le"]): n
        for labels, n in samples["kvindex_query_duration_seconds_bucket"]
    }
    assert counts["default", "5e-05"] == 1
    assert counts["default", "0.0001"] == counts["default", "+Inf"] == 2
    assert (counts["blue", "0.0512"], counts["blue", "+Inf"]) == (0, 1)


def test_partitions_without_room_count_as_others() -> None:
    traffic = Traffic()
    for number in range(MOST_PARTITIONS + 3):
        traffic.query(Partition(f"m{number}"), 5, 0, 1)
    traffic.query(Partition("m0"), 1, 0, 1)
    sums = traffic.sums()
    assert len(sums) == MOST_PARTITIONS + 1
    assert sums[Partition("m0")].tokens == 6
    assert sums[Partition("(other)")].tokens == 15


@pytest.mark.parametrize("model", ["", "a\0b", "ü" * 100, "x" * 1000, "\ud800", "a b"])
def test_no_name_of_a_model_breaks_the_metrics(model: str) -> None:
    traffic = Traffic()
    traffic.query(Partition(model), 5, 5, 5)
    assert [of.tokens for of in traffic.sums().values()] == [5]


def test_what_routers_report_has_the_stages_of_a_funnel() -> None:
    traffic = Traffic()
    traffic.outcome(A, 100, 96, 80, 64)
    traffic.outcome(B, 10, 0, 0)  # another group of the same model
    samples = scraped(FunnelCollector(traffic.outcomes))
    model = {"model": "a"}
    assert samples["kvindex_routed_requests_total"] == [({**model, "end": "finished"}, 2)]
    assert samples["kvindex_routed_asked_tokens_total"] == [(model, 110)]
    assert samples["kvindex_routed_attainable_tokens_total"] == [(model, 96)]
    assert samples["kvindex_routed_reported_asked_tokens_total"] == [(model, 100)]
    assert samples["kvindex_routed_delivered_tokens_total"] == [(model, 64)]
