"""What Prometheus reads of streams, the index and routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvindex import Rank
from kvindex.routing import Router
from kvindex.service.metrics import FunnelCollector, RankCollector, SeriesLabels
from kvindex.testing import FakeEngine
from tests.live import caught_up, client_of, link_to, worker_of

pytestmark = pytest.mark.service

PROMPT = list(range(100))
SERIES = {"model": "llama", "routing_group": "default", "worker": "fake-0", "dp_rank": "0"}

Samples = dict[str, list[tuple[dict[str, str], float]]]


def scraped(*collectors: Any) -> Samples:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    samples: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples


def labels_of(worker: str) -> SeriesLabels:
    return SeriesLabels("llama")


def test_a_rank_has_series_of_its_stream_and_its_blocks() -> None:
    with FakeEngine(cpu_blocks=100) as engine, client_of(worker_of(engine)) as client:
        engine.serve(PROMPT)
        caught_up(client, engine)
        samples = scraped(RankCollector(client, labels_of=labels_of))
    assert samples["kvindex_batches_total"] == [(SERIES, 1)]
    assert samples["kvindex_blocks_stored_total"] == [(SERIES, 12)]
    assert samples["kvindex_rank_complete"] == [(SERIES, 1)]
    assert sorted((labels["medium"], n) for labels, n in samples["kvindex_rank_blocks"]) == [
        ("CPU", 6),
        ("GPU", 6),
    ]
    states = {labels["state"]: n for labels, n in samples["kvindex_rank_state"]}
    assert states.pop("live") == 1
    assert set(states.values()) == {0}
    assert samples["kvindex_index_unique_blocks"] == [({}, 6)]


def test_whatever_a_stream_counts_has_a_series() -> None:
    with FakeEngine() as engine, link_to(engine) as link, client_of(worker_of(engine, link)) as c:
        caught_up(c, engine)
        link.drop_next()
        engine.serve(PROMPT)
        engine.serve(PROMPT[::-1])
        caught_up(c, engine)
        # Of one moment: the thread may ask for one more replay at any time.
        statistics = c.statistics()
        moment = SimpleNamespace(statistics=lambda: statistics)
        samples = scraped(RankCollector(moment, labels_of=labels_of))
    rank = statistics["ranks"]["fake-0/0"]
    assert samples["kvindex_gaps_total"] == [(SERIES, 1)]
    outcomes = {labels["outcome"]: n for labels, n in samples["kvindex_replays_total"]}
    assert outcomes["asked"] == rank["replays_asked"] > 0
    assert outcomes["filled"] == rank["replays_filled"] > 0
    kinds = {labels["kind"]: n for labels, n in samples["kvindex_stream_events_total"]}
    assert kinds["replayed"] == rank["counters"]["replayed"] > 0


def test_the_series_of_a_rank_go_when_it_goes() -> None:
    with FakeEngine() as engine, client_of(worker_of(engine)) as client:
        caught_up(client, engine)
        collector = RankCollector(client)
        assert "kvindex_batches_total" in scraped(collector)
        client.remove("fake-0")
        assert "kvindex_batches_total" not in scraped(collector)


def test_sums_and_single_workers_keep_a_scrape_small() -> None:
    with FakeEngine("a/b") as first, FakeEngine("c") as other:
        with client_of(worker_of(first), worker_of(other)) as client:
            caught_up(client, first, other)
            sums = scraped(RankCollector(client, per_rank=False))
            of_one = scraped(RankCollector(client, workers={"a/b"}))
    assert "kvindex_rank_state" not in sums
    assert ({"state": "live"}, 2) in sums["kvindex_ranks"]
    assert [labels["worker"] for labels, _ in of_one["kvindex_rank_lag_batches"]] == ["a/b"]
    assert ({"state": "live"}, 1) in of_one["kvindex_ranks"]


def test_the_stages_of_a_funnel_have_one_denominator() -> None:
    with FakeEngine() as engine, client_of(worker_of(engine)) as client:
        engine.serve(PROMPT)
        caught_up(client, engine)
        router = Router(client, model="llama")
        router.reserve(PROMPT).finish(cached_tokens=80)
        router.reserve(PROMPT).finish()
        samples = scraped(FunnelCollector([router]))
    model = {"model": "llama"}
    assert samples["kvindex_routed_asked_tokens_total"] == [(model, 200)]
    assert samples["kvindex_routed_attainable_tokens_total"] == [(model, 192)]
    assert samples["kvindex_routed_chosen_tokens_total"] == [(model, 192)]
    assert samples["kvindex_routed_reported_asked_tokens_total"] == [(model, 100)]
    assert samples["kvindex_routed_reported_attainable_tokens_total"] == [(model, 96)]
    assert samples["kvindex_routed_delivered_tokens_total"] == [(model, 80)]
    assert ({**model, "end": "finished"}, 2) in samples["kvindex_routed_requests_total"]
    assert samples["kvindex_routed_open_requests"] == [
        ({**model, "worker": "fake-0", "dp_rank": "0"}, 0)
    ]
    assert Rank("fake-0") in client.index.ranks
