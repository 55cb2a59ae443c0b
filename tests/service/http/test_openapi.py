"""What /openapi.json says is what the server does, whatever is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    positive_data_acceptance,
    unsupported_method,
)

from kvindex.service.openapi import description
from kvindex.service.server import Server
from kvindex.service.settings import ServeSettings
from kvindex.wire.errors import EndpointRefusedError
from tests.service.http.scenes import Asker, listening_on

pytestmark = pytest.mark.service

QUICK = settings(
    max_examples=10,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def dial(endpoint: str) -> str:
    """Let nothing be dialled but what nobody can reach."""
    if endpoint.endswith(("1", "3", "5", "7", "9")):
        raise EndpointRefusedError(f"{endpoint} is not allowed", reason="network")
    return "tcp://127.0.0.1:9"


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    with Server(ServeSettings(port=0)) as server:
        server.service.registry._dial = dial
        with listening_on(server.routes) as served:
            yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")


# A 501 or 503 is no fault here; what is well-formed may still be refused.
UNCHECKED = [not_a_server_error, positive_data_acceptance, unsupported_method]

OPERATIONS = [
    *(("POST", path) for path in ("/query", "/register", "/unregister", "/outcomes")),
    ("POST", "/api/explain"),
    *(("GET", path) for path in ("/workers", "/services", "/health", "/ready", "/dump")),
    *(("GET", path) for path in ("/", "/metrics", "/snapshot")),
    *(("GET", f"/api/{name}") for name in ("fleet", "timeline", "traffic", "prefixes")),
]
NOT_RUN = {("GET", "/openapi.json"), ("GET", "/events")}  # the latter never ends: see test_page


def test_every_route_is_tried_or_said_not_to_be(api: Any) -> None:
    described = {
        (result.ok().method.upper(), result.ok().path) for result in api.get_all_operations()
    }
    assert described - NOT_RUN == set(OPERATIONS)


def test_every_route_of_a_running_server_is_described_but_for_files_of_the_page() -> None:
    with Server(ServeSettings(port=0)) as running:
        routes = {r.path for r in running.routes if not r.path.startswith("/static/")}
        assert routes == set(description(running.routes)["paths"])
        assert {"/", "/events", "/snapshot", "/metrics", "/api/explain"} <= routes


def test_the_codes_of_the_guard_are_described_where_they_occur() -> None:
    with Server(ServeSettings(port=0), tokens=["a-token-of-16-characters"]) as running:
        ask = Asker(running.site)
        for path, item in description(running.routes)["paths"].items():
            for method, operation in item.items():
                codes = operation["responses"].keys()
                for host, refused in (("localhost", 401), ("evil.example", 421)):
                    response = ask.send(method.upper(), path, headers={"host": host})
                    assert (response.status == refused) == (str(refused) in codes)
                assert {"400", "408", "413", "431", "503"} <= codes
                assert (operation.get("security") == [{}]) == ("401" not in codes)


WITHOUT_INPUT = {"/", "/services", "/health", "/snapshot", "/api/fleet", "/api/timeline"}
RUNS = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
RUNS += [(*each, GenerationMode.NEGATIVE) for each in OPERATIONS if each[1] not in WITHOUT_INPUT]


@pytest.mark.parametrize(("method", "path", "mode"), RUNS)
def test_every_answer_is_as_described(
    api: Any, method: str, path: str, mode: GenerationMode
) -> None:
    cases = api[path][method].as_strategy(generation_mode=mode)

    @QUICK
    @given(case=cases)
    def check(case: Any) -> None:
        response = case.call_and_validate(excluded_checks=UNCHECKED)
        assert response.status_code not in (500, 503) or path == "/ready"

    check()
