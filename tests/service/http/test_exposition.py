"""`GET /metrics` of a whole server, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvindex.service.app import app_routes
from kvindex.service.exposition import Exposition
from kvindex.service.http.guards import Guard
from kvindex.service.http.site import Site
from kvindex.service.metrics import PoolCollector
from kvindex.service.service import Service
from kvindex.testing import FakeEngine
from tests.docs.pages import DOCS
from tests.live import caught_up, client_of
from tests.service.http.in_process import Asker, body_of
from tests.service.http.pool_statistics import RELAY, REPLICA
from tests.service.http.test_metrics import Samples

pytestmark = pytest.mark.service

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "kvindex.json"
NAMES = re.compile(r"`((?:kvindex|dynamo_kvindexer)_\w+)[`{]")
PROMPT = list(range(64))


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
        engine.serve(PROMPT)
        caught_up(client, engine)
        ask.post("/query", {"token_ids": [*PROMPT, 1], "model_name": "m"})
        ask.post("/query", {"token_ids": PROMPT, "model_name": "other"})
        ask.send("GET", "/nothing", headers={"host": "evil.example"})
        outcome = {"model_name": "m", "asked": 65, "attainable": 64, "chosen": 64, "delivered": 48}
        assert ask.post("/outcomes", outcome) == (200, {"status": "ok"})
        assert ask.post("/outcomes", {**outcome, "model_name": "x"})[0] == 404
        assert ask.post("/outcomes", {**outcome, "delivered": 66})[0] == 422
        return str(ask.send("GET", "/metrics").text)


@pytest.fixture(scope="module")
def samples(exposed: str) -> Samples:
    named: Samples = {}
    for family in text_string_to_metric_families(exposed):
        for sample in family.samples:
            named.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return named


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
