"""What a server was asked, in sums and over time."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvindex.service.catalog import Partition
from kvindex.service.exposition import RequestCollector
from kvindex.service.metrics import FunnelCollector
from kvindex.service.traffic import MOST_PARTITIONS, WINDOWS, Traffic, Trends
from tests.service.http.test_metrics import scraped

pytestmark = pytest.mark.service

A, B = Partition("a"), Partition("b", "blue")
OTHER_GROUP = Partition("a", "blue")


def test_requests_and_queries_are_added_up_by_route_and_partition() -> None:
    traffic = Traffic()
    traffic.request("POST", "/query", 200)
    traffic.query(A, 100, 60, 70_000)
    traffic.query(OTHER_GROUP, 10, 0, 10_000_000_000)
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
    assert [sums.tokens for sums in traffic.sums().values()] == [5]


def test_what_routers_report_has_the_stages_of_a_funnel() -> None:
    traffic = Traffic()
    traffic.outcome(A, 100, 96, 80, 64)
    traffic.outcome(OTHER_GROUP, 10, 0, 0)  # another group of the same model
    samples = scraped(FunnelCollector(traffic.outcomes))
    model = {"model": "a"}
    assert samples["kvindex_routed_requests_total"] == [({**model, "end": "finished"}, 2)]
    assert samples["kvindex_routed_asked_tokens_total"] == [(model, 110)]
    assert samples["kvindex_routed_attainable_tokens_total"] == [(model, 96)]
    assert samples["kvindex_routed_reported_asked_tokens_total"] == [(model, 100)]
    assert samples["kvindex_routed_delivered_tokens_total"] == [(model, 64)]


# Over time, by a clock that the test turns

START = 1_800_000.0  # divides by every step


class Asked:
    """A server that is asked, and a clock."""

    def __init__(self) -> None:
        self.now = START
        self.traffic = Traffic()
        self.traffic.query(A, 1_000_000, 0, 1)  # before the ring began
        self.trends = Trends(self.traffic.asked, clock=lambda: self.now)

    def after(self, seconds: float = 5.0, *, live: int = 2, ranks: int = 2) -> None:
        self.now += seconds
        self.trends.sample(live, ranks)

    def points(self, seconds: int = 300, partition: Partition | None = None) -> dict[str, Any]:
        points: dict[str, Any] = self.trends.points(seconds, partition)["points"]
        return points


def test_what_was_asked_is_added_up_in_slots_of_time() -> None:
    server = Asked()
    server.traffic.query(A, 100, 60, 7_000)
    server.traffic.query(A, 50, 50, 1_000)
    server.traffic.outcome(A, 40, 30, 20, 10)
    server.traffic.outcome(A, 40, 30, 20)
    server.after(live=1)
    server.after()
    points = server.points()
    assert points["at"] == [START + 5, START + 10]
    assert points["seconds"] == [5, 5]
    assert (points["live"], points["ranks"]) == ([1, 2], [2, 2])
    rises = {name: column[0] for name, column in points.items() if name not in ("at", "seconds")}
    assert rises == {
        "live": 1,
        "ranks": 2,
        "queries": 2,
        "tokens": 150,
        "best_match": 110,
        "nanoseconds": 8_000,
        "requests": 2,
        "asked": 80,
        "attainable": 60,
        "chosen": 40,
        "reported": 40,
        "delivered": 10,
    }
    assert points["queries"][1] == points["asked"][1] == 0


def test_a_partition_has_sums_of_its_own_and_one_that_nobody_asked_has_none() -> None:
    server = Asked()
    server.traffic.query(A, 10, 0, 1)
    server.traffic.query(B, 20, 5, 1)
    server.after()
    assert server.points(300)["tokens"] == [30]
    assert server.points(300, B)["tokens"] == [20]
    assert server.points(300, Partition("none"))["tokens"] == [0]
    assert server.trends.points(300)["partitions"] == [
        {"model": "a", "routing_group": "default"},
        {"model": "b", "routing_group": "blue"},
    ]


@pytest.mark.parametrize(("seconds", "step"), WINDOWS.items())
def test_each_window_has_at_most_120_points_and_loses_nothing(seconds: int, step: int) -> None:
    server = Asked()
    for _ in range(seconds // 5):
        server.traffic.query(A, 1, 1, 1)
        server.after()
    points = server.points(seconds)
    assert len(points["at"]) <= 121  # the first and the last are parts of one
    assert all(b - a == step for a, b in zip(points["at"], points["at"][1:], strict=False))
    assert sum(points["queries"]) == seconds // 5
    assert sum(points["seconds"]) == seconds


def test_time_that_nobody_looked_at_has_no_points_and_is_not_taken_for_quiet() -> None:
    server = Asked()
    server.after()
    server.traffic.query(A, 1, 1, 1)
    server.after(120.0)  # the machine slept
    points = server.points()
    assert points["at"] == [START + 5, START + 125]
    assert points["seconds"] == [5, 120]  # so that a rate is right


def test_a_clock_that_is_set_back_breaks_nothing() -> None:
    server = Asked()
    server.after()
    server.traffic.query(A, 1, 1, 1)
    server.after(-3600.0)
    server.now += 3600
    assert server.points()["queries"] == [1]
    assert min(server.points()["seconds"]) >= 0


def test_a_day_and_any_number_of_partitions_take_bounded_memory() -> None:
    server = Asked()
    everything = list(server.trends._rings)
    for number in range(40):
        server.traffic.query(Partition(f"m{number}"), 1, 1, 1)
    for _ in range(3 * 86_400 // 60):
        server.after(60.0)
    slots = [slot for _, ring in everything for slot in ring]
    assert len(slots) == 726 + 484
    server.after()
    server.traffic.query(Partition("m39"), 1, 1, 1)
    server.after()
    assert server.points()["queries"][-1] == 1  # counted with all, though not by itself
    assert len(server.trends.points(300)["partitions"]) == 16
    assert sum(map(sys.getsizeof, slots)) < 200_000
