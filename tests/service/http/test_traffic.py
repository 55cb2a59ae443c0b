"""What processes were asked, added up for metrics."""

from __future__ import annotations

import pytest

from kvindex.service.catalog import Partition
from kvindex.service.exposition import RequestCollector
from kvindex.service.metrics import FunnelCollector
from kvindex.service.traffic import AllTraffic, Rows, Traffic
from tests.service.http.test_metrics import scraped

pytestmark = pytest.mark.service

A, B = Partition("a"), Partition("a", "blue")


def test_processes_are_added_up_by_name_wherever_each_has_its_rows() -> None:
    first, other = Traffic(), Traffic()
    first.request("POST", "/query", 200)
    first.query(A, 100, 60, 70_000)
    other.query(B, 10, 0, 10_000_000_000)
    other.query(A, 50, 50, 1_000)
    other.request("POST", "/query", 200)
    totals = AllTraffic(lambda: [first, other])
    samples = scraped(RequestCollector(totals))
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


def test_a_process_that_is_started_again_goes_on_counting_where_the_dead_one_ended() -> None:
    memory = memoryview(bytearray(Traffic.SIZE))
    before = Traffic(memory)
    before.query(A, 1, 1, 1)
    before.request("GET", "/workers", 200)
    after = Traffic(memory)
    after.query(B, 2, 0, 1)
    after.query(A, 4, 4, 1)
    after.request("GET", "/workers", 200)
    totals = AllTraffic(lambda: [after])
    assert {partition: of.tokens for partition, of in totals.sums().items()} == {A: 5, B: 2}
    assert totals.requests() == {("GET", "/workers", 200): 2}


def test_names_without_room_count_as_others() -> None:
    rows = Rows(memoryview(bytearray(Rows.size(3, 1))), 3, 1)
    for name in ("a", "b", "c", "x" * 300, "a"):
        rows.row(name)[0] += 1
    assert rows.rows() == {"a": [2], "b": [1], "(other)": [2]}


@pytest.mark.parametrize("model", ["", "a\0b", "ü" * 100, "x" * 1000, "\ud800", "a b"])
def test_no_name_of_a_model_breaks_the_metrics(model: str) -> None:
    traffic = Traffic()
    traffic.query(Partition(model), 5, 5, 5)
    assert [of.tokens for of in AllTraffic(lambda: [traffic]).sums().values()] == [5]


def test_what_routers_report_has_the_stages_of_a_funnel() -> None:
    traffic = Traffic()
    traffic.outcome(A, 100, 96, 80, 64)
    traffic.outcome(B, 10, 0, 0)  # another group of the same model
    samples = scraped(FunnelCollector(AllTraffic(lambda: [traffic]).outcomes))
    model = {"model": "a"}
    assert samples["kvindex_routed_requests_total"] == [({**model, "end": "finished"}, 2)]
    assert samples["kvindex_routed_asked_tokens_total"] == [(model, 110)]
    assert samples["kvindex_routed_attainable_tokens_total"] == [(model, 96)]
    assert samples["kvindex_routed_reported_asked_tokens_total"] == [(model, 100)]
    assert samples["kvindex_routed_delivered_tokens_total"] == [(model, 64)]
