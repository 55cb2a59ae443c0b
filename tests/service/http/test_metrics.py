"""What Prometheus reads of ranks, routers, pools and a whole server, and what dashboards ask."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvindex import Rank
from kvindex.routing import Router
from kvindex.service.app import app_routes
from kvindex.service.exposition import Exposition
from kvindex.service.http.guards import Guard
from kvindex.service.http.site import Site
from kvindex.service.metrics import FunnelCollector, PoolCollector, RankCollector, SeriesLabels
from kvindex.service.service import Service
from kvindex.testing import FakeEngine
from tests.docs.pages import DOCS
from tests.live import caught_up, client_of, link_to, worker_of
from tests.service.http.scenes import Asker, body_of

pytestmark = pytest.mark.service

PROMPT = list(range(100))
SERIES = {"model": "llama", "routing_group": "default", "worker": "fake-0", "dp_rank": "0"}

Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples_in(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples


def scraped(*collectors: Any) -> Samples:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return samples_in(generate_latest(registry).decode())


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


DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "kvindex.json"
NAMES = re.compile(r"`((?:kvindex|dynamo_kvindexer)_\w+)[`{]")


# A whole server


@pytest.fixture(scope="module")
def exposed() -> str:
    """What a server with one engine exposes, after some requests."""
    with FakeEngine("1", cpu_blocks=10) as engine, client_of() as client:
        service = Service(client)
        guard = Guard()

        def statistics() -> dict[str, Any]:
            streams = {"open_now": 2, "cut_off": 1}
            return {
                "refused": guard.counters,
                "streams": streams,
                "state": {"saved": 3, "failed": 1, "saved_at": 12.5, "error": None},
                "discovery": {"sources": {"file x": {"failures": 2}}},
            }

        metrics = Exposition(service, statistics, dynamo_names=True).write
        app = app_routes(service, metrics=metrics)
        ask = Asker(Site(app, guard, service.traffic.request))
        ask.post("/register", body_of(engine))
        engine.serve(PROMPT[:64])
        caught_up(client, engine)
        ask.post("/query", {"token_ids": [*PROMPT[:64], 1], "model_name": "m"})
        ask.post("/query", {"token_ids": PROMPT[:64], "model_name": "other"})
        ask.send("GET", "/nothing", headers={"host": "evil.example"})
        outcome = {"model_name": "m", "asked": 65, "attainable": 64, "chosen": 64, "delivered": 48}
        assert ask.post("/outcomes", outcome) == (200, {"status": "ok"})
        assert ask.post("/outcomes", {**outcome, "model_name": "x"})[0] == 404
        assert ask.post("/outcomes", {**outcome, "delivered": 66})[0] == 422
        return str(ask.send("GET", "/metrics").text)


@pytest.fixture(scope="module")
def samples(exposed: str) -> Samples:
    return samples_in(exposed)


def test_queries_requests_and_refusals_are_counted(samples: Samples) -> None:
    group = {"model": "m", "routing_group": "default"}
    assert samples["kvindex_query_tokens_total"] == [(group, 65)]
    assert samples["kvindex_query_best_match_tokens_total"] == [(group, 64)]
    requests = {
        (labels["route"], labels["code"]): count
        for labels, count in samples["kvindex_http_requests_total"]
    }
    assert requests["/query", "200"] == requests["/query", "404"] == 1
    assert requests["(other)", "421"] == 1
    assert ({"reason": "host"}, 1) in samples["kvindex_http_refused_total"]
    saves = samples["kvindex_state_saves_total"]
    assert saves == [({"outcome": "saved"}, 3), ({"outcome": "failed"}, 1)]
    assert samples["kvindex_state_saved_timestamp_seconds"] == [({}, 12.5)]
    assert samples["kvindex_discovery_failures_total"] == [({"source": "file x"}, 2)]
    assert samples["kvindex_http_streams_cut_off_total"] == [({}, 1)]
    assert samples["kvindex_routed_delivered_tokens_total"] == [({"model": "m"}, 48)]


def test_ranks_carry_the_model_that_they_were_registered_for(samples: Samples) -> None:
    [(labels, complete)] = samples["kvindex_rank_complete"]
    assert labels == {"model": "m", "routing_group": "default", "worker": "1", "dp_rank": "0"}
    assert complete == 1


def test_dynamos_names_stand_beside_ours_by_wish(samples: Samples) -> None:
    query = {"endpoint": "/query"}
    assert ({"status": "active"}, 1) in samples["dynamo_kvindexer_listeners"]
    assert ({**query, "method": "POST"}, 2) in samples["dynamo_kvindexer_requests_total"]
    assert ({**query, "status_class": "4xx"}, 1) in samples["dynamo_kvindexer_errors_total"]
    assert samples["dynamo_kvindexer_request_duration_seconds_count"] == [(query, 1)]


def expressions() -> Iterator[tuple[str, str]]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        metric, _, label = variable["definition"][len("label_values(") : -1].rpartition(", ")
        yield variable["name"], f"sum by ({label}) ({metric})"


def test_the_reference_lists_the_series_that_there_are_and_no_others(exposed: str) -> None:
    page = (DOCS / "reference" / "metrics.md").read_text()
    listed = {name.removesuffix("_total") for name in NAMES.findall(page)}
    pools = [SimpleNamespace(statistics=lambda each=each: each) for each in (RELAY, REPLICA)]
    families = {family.name for family in text_string_to_metric_families(exposed)}
    families |= {family.name for pool in pools for family in PoolCollector(pool).collect()}
    assert listed == {name for name in families if name.startswith(("kvindex_", "dynamo_"))}


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_the_dashboard_asks_for_series_and_labels_that_there_are(
    samples: Samples, name: str, expression: str
) -> None:
    promql = pytest.importorskip("promql_parser")
    plain = expression.replace("$__rate_interval", "5m")
    selectors, labels = asked_for(promql.parse(plain), promql)
    assert selectors
    for metric, wanted in selectors:
        assert metric in samples or metric in QUIET, metric
        have = set(samples[metric][0][0]) if metric in samples else QUIET[metric]
        external = {"job", "instance"}
        assert wanted | (labels - {"le"}) <= have | external, metric
        if "le" in labels:
            assert "le" in have


# Series that this server has no reason for, and their labels.
RANK = {"model", "routing_group", "worker", "dp_rank"}
QUIET = {"kvindex_ignored_blocks_total": RANK | {"reason"}}


def asked_for(node: Any, promql: Any) -> tuple[list[tuple[str, set[str]]], set[str]]:
    """Metrics of an expression with the labels that select them; the labels it groups by."""
    if isinstance(node, promql.VectorSelector):
        return [(node.name, {matcher.name for matcher in node.matchers.matchers})], set()
    if isinstance(node, promql.MatrixSelector):
        return asked_for(node.vector_selector, promql)
    below = []
    if isinstance(node, promql.BinaryExpr):
        below = [node.lhs, node.rhs]
    elif isinstance(node, promql.Call):
        below = node.args
    elif isinstance(node, (promql.AggregateExpr, promql.ParenExpr)):
        below = [node.expr]
    selectors: list[tuple[str, set[str]]] = []
    labels: set[str] = set()
    for each in below:
        named, grouped = asked_for(each, promql)
        selectors += named
        labels |= grouped
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        labels |= set(node.modifier.labels)
    return selectors, labels


# Pools

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


def scraped_of(statistics: dict[str, Any]) -> Samples:
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
