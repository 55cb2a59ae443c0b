"""What the doctor finds in a gateway's own words; a server plays the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvindex.testing import FakeEngine, HttpEngine, HttpFaults, HttpOptions
from kvindex.tools.doctor import Diagnosis, Target, examine
from tests.canned import CannedServer
from tests.testing.test_http_engine import ask

pytestmark = pytest.mark.service

RANK = {"worker": "h:8000", "dp_rank": 0, "state": "live", "reason": ""}
STATISTICS = {
    "requests": [
        ["/v1/completions", 200, "whole", 97],
        ["/v1/completions", 429, "refused", 3],
        ["(other)", 404, "refused", 50],
    ],
    "tokens": {"prompt": 1000, "delivered": 250},
    "tokens_from": {"ids": 90, "tokenize": 10, "": 7},
    "token_failures": {},
    "shed": {"full": 0, "deadline": 0},
    "routers": {"m": {"bookings": {"finished": 97, "expired": 0, "late": 0}, "ranks": {}}},
}


@pytest.fixture
def server() -> Iterator[CannedServer]:
    replies: dict[str, Any] = {
        "/v1/models": (200, {"object": "list", "data": []}),
        "/api/fleet": (200, {"ranks": [RANK], "missing": {}}),
        "/ready": (200, b""),
        "/admin/statistics": (200, STATISTICS),
    }
    with CannedServer(replies) as server:
        yield server


def look_at(server: CannedServer) -> Diagnosis:
    return examine([Target(url=server.url)], token="k")


def routed(left_out: str, reason: str, seconds: float | None = None) -> dict[str, Any]:
    told = {"left_out": left_out, "reason": reason, "seconds": seconds}
    ranks = [{**RANK, "dp_rank": n} for n in range(2)]
    load = {"open_requests": 1, "queued_tokens": 2}
    return {"missing": {}, "ranks": [{**rank, "routed": {**load, **told}} for rank in ranks]}


def test_a_healthy_gateway_is_all_well(server: CannedServer) -> None:
    report = look_at(server)
    assert [found.id for found in report.findings] == ["service-examined", "all-well"]
    assert report.exit_code == 0
    seen = "live ranks: 1; requests: 100; of their prompts' tokens cached: 25%"
    assert report.findings[1].what == f"all is well: {seen}"
    assert {token for _, token in server.asked} == {"Bearer k"}


@pytest.mark.parametrize(
    ("kind", "path", "answer", "words"),
    [
        ("gateway-not-ready", "/ready", (503, {"error": {}}), "/ready answers 503"),
        (
            "worker-ejected",
            "/api/fleet",
            routed("ejected", "failures in a row: 3, the last: status_500", 7.4),
            "h:8000 has failed and gets no requests for 7 s: failures in a row: 3, the last: sta",
        ),
        ("worker-away", "/api/fleet", routed("asleep", "it sleeps"), "no requests: it sleeps"),
        ("worker-away", "/api/fleet", routed("later", "of a later version"), "a later version"),
        ("worker-drained", "/api/fleet", routed("drained", "by him"), "gets no requests: by him"),
        (
            "tokens-unknown",
            "/admin/statistics",
            {"tokens_from": {"ids": 90, "no_source": 8, "slow": 2}, "token_failures": {"reset": 7}},
            "10 of 100 prompts went by load alone, since no engine gave their tokens: 8 no_source",
        ),
        (
            "tokens-unknown",
            "/admin/statistics",
            {"tokens_from": {"ids": 90, "refused": 10}, "token_failures": {"status_404": 12}},
            "10 of 100 prompts went by load alone, since no engine gave their tokens: 10 refused",
        ),
        (
            "hits-unexpected",
            "/admin/statistics",
            {"routers": {"m": {"ranks": {"h:8000/0": {"suspicion": "it finds less"}}}}},
            "h:8000/0 and the index disagree about its cache: it finds less",
        ),
        (
            "requests-shed",
            "/admin/statistics",
            {"shed": {"full": 1, "deadline": 2}},
            "3 of 100 requests found no room: 2 deadline, 1 full",
        ),
        (
            "bookings-expired",
            "/admin/statistics",
            {"routers": {"m": {"bookings": {"finished": 7, "expired": 3, "late": 2}}}},
            "3 of 10 bookings expired before their requests ended (2 reports came after that)",
        ),
    ],
)
def test_what_is_wrong_with_a_gateway_has_a_name_and_numbers(
    server: CannedServer, kind: str, path: str, answer: Any, words: str
) -> None:
    if path == "/admin/statistics":
        answer = {**STATISTICS, **answer}
    server.replies[path] = answer if isinstance(answer, tuple) else (200, answer)
    report = look_at(server)
    assert [found.id for found in report.findings] == [kind, "service-examined"]
    assert report.exit_code == 1
    assert words in report.findings[0].what


@pytest.mark.parametrize(
    ("requests", "apart", "found"),
    [
        ("ignored", 5, ["pair-never-transfers", "service-examined"]),
        ("ignored", 0, ["service-examined", "all-well"]),
        ("fetched", 5, ["service-examined", "all-well"]),
        ("none yet", 5, ["service-examined", "all-well"]),
    ],
)
def test_a_pair_that_never_transfers_is_found_by_ds_own_metrics(
    server: CannedServer, requests: str, apart: int, found: list[str]
) -> None:
    with FakeEngine(publish=False) as p_cache, FakeEngine(publish=False) as d_cache:
        with HttpEngine(p_cache, options=HttpOptions(role="prefill")) as p:
            with HttpEngine(d_cache, options=HttpOptions(role="decode")) as d:
                if requests == "ignored":
                    d.faults = HttpFaults(handoff="ignore")
                if requests != "none yet":
                    asked = {"prompt": [1] * 40, "kv_transfer_params": {"do_remote_decode": True}}
                    prefilled = ask(p.url + "/v1/completions", asked)
                    asked["kv_transfer_params"] = prefilled["kv_transfer_params"]
                    ask(d.url + "/v1/completions", asked)
                fleet = routed("", "")
                for rank in fleet["ranks"]:
                    rank["routed"] |= {"url": d.url, "role": "decode"}
                server.replies["/api/fleet"] = (200, fleet)
                server.replies["/admin/statistics"] = (
                    200,
                    {**STATISTICS, "prefills": {"local": 3, "apart": apart}},
                )
                report = look_at(server)
                assert [finding.id for finding in report.findings] == found
                if "pair-never-transfers" in found:
                    assert "5 prompts were prefilled apart, and by" in report.findings[0].what
                    assert d.url in report.findings[0].what


@pytest.mark.parametrize(
    ("kind", "counters", "words"),
    [
        (
            "tokens-refused",
            {"token_failures": {"status_403": 40}},
            "of the questions for prompts' tokens 40 had no answer, others had: 40 status_403",
        ),
        (
            "prompts-by-load",
            {"tokens_from": {"ids": 99, "media": 5, "slow": 1}},
            "6 of 105 prompts went by load alone: 5 media, 1 slow",
        ),
    ],
)
def test_what_requests_and_old_engines_cause_is_told_and_no_fault(
    server: CannedServer, kind: str, counters: Any, words: str
) -> None:
    server.replies["/admin/statistics"] = (200, {**STATISTICS, **counters})
    report = look_at(server)
    assert [found.id for found in report.findings] == [kind, "service-examined", "all-well"]
    assert report.exit_code == 0
    assert words in report.findings[0].what


def test_chats_that_no_engine_can_render_are_no_fault_of_a_gateway(server: CannedServer) -> None:
    counters = {"tokens_from": {"ids": 90, "refused": 10}, "token_failures": {"status_400": 30}}
    server.replies["/admin/statistics"] = (200, {**STATISTICS, **counters})
    report = look_at(server)
    told = [found.id for found in report.findings]
    assert told == ["tokens-refused", "prompts-by-load", "service-examined", "all-well"]
    assert report.exit_code == 0
    assert "10 of 100 prompts went by load alone: 10 refused" in report.findings[1].what


@pytest.mark.parametrize(("status", "code"), [(401, "token_missing"), (403, "operators")])
def test_a_gateway_that_answers_operators_only_is_told_from_an_engine(
    server: CannedServer, status: int, code: str
) -> None:
    server.replies["/api/fleet"] = (status, {"error": {"code": code}})
    report = look_at(server)
    assert [found.id for found in report.findings] == ["service-denied"]
    assert report.exit_code == 2
    assert "--admin-token-file" in report.findings[0].remedy


@pytest.mark.parametrize(
    "answer", [b"[", b"[]", {"ranks": [{"worker": 1}]}, {"ranks": 3, "missing": {}}]
)
def test_a_server_that_only_looks_like_a_gateway_is_none(server: CannedServer, answer: Any) -> None:
    server.replies["/api/fleet"] = (200, answer)
    assert [found.id for found in look_at(server).findings] == ["sources-unknown"]
