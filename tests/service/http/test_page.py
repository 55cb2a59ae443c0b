"""What the page asks for: its files, the fleet, prefixes, explanations and news."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("httpx")

import httpx

from kvindex import State
from kvindex.service import timeline as news
from kvindex.service.catalog import Partition
from kvindex.service.http.guards import Guard, Limits
from kvindex.service.http.messages import RefusedError, Request, Route, Stream
from kvindex.service.http.site import Site
from kvindex.service.page import tokenize
from kvindex.service.timeline import StreamCounters, Timeline
from kvindex.service.timeline import event_stream as news_of
from kvindex.testing import FakeEngine, HttpEngine
from tests.canned import CannedServer
from tests.index.index_events import apply, removed, stored
from tests.live import PATIENCE, caught_up, until, wait_status, worker_of
from tests.service.http.scenes import (
    MODEL,
    Asker,
    ManyRanks,
    add_to,
    listening_on,
    page_of,
    paged,
    pieces_of,
)
from tests.service.test_fleet_overview import A, status_of

pytestmark = pytest.mark.service

PROMPT = list(range(48))


@pytest.fixture
def asker() -> Iterator[Asker]:
    page = page_of(ManyRanks(16))
    yield Asker(page.routes)
    page.close()


# Files


def test_the_page_lets_nothing_in_from_elsewhere_and_nothing_inline(asker: Asker) -> None:
    for path in ("/", "/static/app.js", "/static/style.css"):
        answer = asker.send("GET", path)
        assert answer.status == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    text = asker.send("GET", "/").text
    assert "<style" not in text
    assert "<script>" not in text
    assert "//" not in text.replace("<!doctype html>", "")


def test_a_file_that_has_not_changed_is_not_sent_again(asker: Asker) -> None:
    tag = asker.send("GET", "/static/app.js").headers["etag"]
    again = asker.send("GET", "/static/app.js", headers={"If-None-Match": tag})
    assert (again.status, again.body) == (304, b"")


def test_only_files_of_the_page_are_served(asker: Asker) -> None:
    for path in ("/static/../page.py", "/static/%2e%2e/page.py", "/static/", "/static/none.js"):
        assert asker.send("GET", path).status == 404


# The fleet and its prefixes


def test_the_fleet_is_told_and_its_prefixes_with_who_holds_them() -> None:
    with FakeEngine("a", block_size=16) as fake, FakeEngine("b", block_size=16) as second:
        fake.serve(PROMPT)
        second.serve(PROMPT[:16])
        with paged(fake, second) as (_, client, url):
            caught_up(client, fake, second)
            fleet = httpx.get(f"{url}/api/fleet").json()
            query = {"model": MODEL.model, "max_nodes": "10"}
            prefixes = httpx.get(f"{url}/api/prefixes", params=query).json()
            none = httpx.get(f"{url}/api/prefixes", params={"model": "other"}).json()
    assert [(rank["worker"], rank["blocks"]) for rank in fleet["ranks"]] == [
        ("a", {"GPU": 3}),
        ("b", {"GPU": 1}),
    ]
    assert [(node["blocks"], node["ranks"]) for node in prefixes["nodes"]] == [(1, 2), (2, 1)]
    assert prefixes["ranks"] == [["a", 0], ["b", 0]]
    assert none["nodes"] == []


def test_prefixes_of_one_partition_have_no_totals_of_others() -> None:
    with FakeEngine("a", block_size=16) as fake, FakeEngine("b", block_size=16) as second:
        fake.serve(PROMPT)
        second.serve([9] * 64)
        with paged(fake) as (page, client, url):
            add_to(page._service, second, partition=Partition("qwen"))  # type: ignore[arg-type]
            caught_up(client, fake, second)
            llama = httpx.get(f"{url}/api/prefixes", params={"model": MODEL.model}).json()
            everybody = httpx.get(f"{url}/api/prefixes").json()
    assert (llama["children"], llama["left_out"], llama["unique_blocks"]) == (1, 0, None)
    assert (everybody["children"], everybody["unique_blocks"]) == (2, 7)


def test_prefixes_of_the_only_partition_have_its_holes_and_the_size_of_the_tree() -> None:
    fleet = ManyRanks(2)
    apply(fleet.index, fleet.ranks[0], stored(0, 1, 2, 3), removed(1, 2))
    page = page_of(fleet)
    _, shown = Asker(page.routes).get(f"/api/prefixes?model={MODEL.model}")
    page.close()
    assert [(node["blocks"], node["ranks"]) for node in shown["nodes"]] == [(1, 1), (2, 0), (1, 1)]
    assert shown["unique_blocks"] == 4


def test_engines_that_were_not_found_are_told(asker: Asker) -> None:
    _, fleet = asker.get("/api/fleet")
    assert fleet["missing"] == {"http://vllm-99:8000": "nothing listens there"}


def test_what_was_asked_is_told_over_time_and_by_partition() -> None:
    fleet = ManyRanks(16)
    page = page_of(fleet)
    fleet.traffic.query(MODEL, 100, 60, 1_000)
    page.look()
    asker = Asker(page.routes)
    page.close()
    _, all_of_it = asker.get("/api/traffic?seconds=300")
    _, other = asker.get("/api/traffic?seconds=300&model=qwen")
    assert all_of_it["partitions"] == [{"model": "llama", "routing_group": "default"}]
    assert sum(all_of_it["points"]["best_match"]) == 60
    assert all_of_it["points"]["ranks"][-1] == 16
    assert sum(other["points"]["queries"]) == 0
    status, said = asker.get("/api/traffic?seconds=7")
    assert (status, said["error"]) == (
        422,
        "seconds must be one of 300, 900, 3600, 21600, 86400, not '7'",
    )


def test_the_timeline_says_since_when_it_has_everything() -> None:
    now = [100.0]
    timeline = Timeline(most=2, clock=lambda: now[0])
    page = page_of(ManyRanks(0), timeline=timeline)
    asker = Asker(page.routes)
    timeline.observe(status_of(A))
    assert asker.get("/api/timeline")[1]["since"] == 100.0
    for losses in range(1, 4):
        now[0] += 1
        timeline.sweep([status_of(A, losses=losses)])
    said = asker.get("/api/timeline")[1]
    page.close()
    assert (said["dropped"], said["since"]) == (2, 102.0)


@pytest.mark.parametrize("question", ["max_nodes=0", "max_nodes=99999", "min_blocks=x"])
def test_numbers_that_cannot_be_are_refused_in_words(asker: Asker, question: str) -> None:
    status, said = asker.get(f"/api/prefixes?{question}")
    assert status == 422
    assert question.partition("=")[0] in said["error"]


# Explanations


def test_a_prompt_is_explained_for_each_rank_longest_first() -> None:
    with FakeEngine("a", block_size=16) as fake, FakeEngine("b", block_size=16) as second:
        fake.serve(PROMPT[:16])
        second.serve(PROMPT)
        with paged(fake, second) as (_, client, url):
            caught_up(client, fake, second)
            question = {"model": MODEL.model, "token_ids": PROMPT}
            shown = httpx.post(f"{url}/api/explain", json=question).json()
    assert [(r["worker"], r["match"]["tokens"], r["ending"]) for r in shown["ranks"]] == [
        ("b", 48, "whole"),
        ("a", 16, "end"),
    ]
    assert shown["tokens"] == 48
    assert shown["ranks"][1]["held"]["spans"] == [[0, 16]]


def test_text_is_turned_into_tokens_by_the_engine_that_the_operator_named() -> None:
    with FakeEngine("a", block_size=4) as fake, HttpEngine(fake) as http:
        said = {"model": MODEL.model, "prompt": "one two three four five six"}
        tokens = httpx.post(f"{http.url}/tokenize", json=said).json()["tokens"]
        fake.serve(tokens)
        with paged(fake, engine=http.url) as (_, client, url):
            caught_up(client, fake)
            question = {"model": MODEL.model, "text": said["prompt"]}
            shown = httpx.post(f"{url}/api/explain", json=question).json()
            fleet = httpx.get(f"{url}/api/fleet").json()
        assert shown["tokens"] == len(tokens)
        assert shown["ranks"][0]["match"]["tokens"] == len(tokens) // 4 * 4
        assert fleet["partitions"][0]["tokenizer"] is True
        http.close()
        with paged(fake, engine=http.url) as (_, client, url):
            gone = httpx.post(f"{url}/api/explain", json=question)
            assert gone.status_code == 502
            assert http.url in gone.json()["error"]
        configured = page_of(ManyRanks(1), tokenizer=http.url)
        answer = Asker(configured.routes).send("POST", "/api/explain", json=question)
        configured.close()
        assert answer.status == 502  # it was asked, though no registration names it
        # An engine that came over HTTP is not asked: who registers could name any address.
        with paged(fake, engine=http.url, source="zmq") as (_, client, url):
            assert httpx.post(f"{url}/api/explain", json=question).status_code == 409


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"model": "\xff", "token_ids": []}', 400),
        pytest.param(b'{"x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", 400, id="too deep"),
        (b"{}", 422),
        (b'{"token_ids": [1], "text": "a"}', 422),
        (b'{"token_ids": [-1]}', 422),
        (b'{"token_ids": [1.5]}', 422),
        (b'{"token_ids": [9223372036854775808]}', 422),
        (b'{"token_ids": [1], "model": "nobody"}', 404),
        (b'{"text": "a", "model": "llama"}', 409),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_in_words(
    asker: Asker, body: bytes, status: int
) -> None:
    answer = asker.send("POST", "/api/explain", content=body)
    assert answer.status == status
    assert answer.json["error"]


# News


class Events:
    """The events of a stream, one after the other."""

    def __init__(self, response: Any) -> None:
        self._lines = response.iter_lines()

    def __next__(self) -> dict[str, Any]:
        event: dict[str, Any] = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if not line and event:
                return event
            if name:
                event[name] = json.loads(value) if name == "data" else value
        raise AssertionError("the stream has ended")


def test_the_stream_begins_with_the_states_and_tells_that_an_engine_went_away() -> None:
    with FakeEngine("a") as fake:
        with paged(fake) as (page, client, url):
            caught_up(client, fake)
            with httpx.stream("GET", f"{url}/events", timeout=PATIENCE) as response:
                events = Events(response)
                first = next(events)
                assert (first["event"], first["data"]["missed"]) == ("fleet", 0)
                assert [rank["state"] for rank in first["data"]["ranks"]] == ["live"]
                fake.close()
                lost = next(events)
            assert (lost["event"], lost["data"]["state"]) == ("state", "connecting")
            assert lost["data"]["model"] == MODEL.model
            assert lost["id"] == f"{page.timeline.life}-{page.timeline.position}"


def test_a_rank_that_is_added_is_told_with_its_model_from_the_first() -> None:
    with paged() as (page, client, _), FakeEngine("a") as fake:
        page._service.registry.add(worker_of(fake), MODEL)  # type: ignore[attr-defined]
        caught_up(client, fake)
        happenings = page.timeline.since(0).happenings
        assert happenings[0].kind == "added"
        assert {happening.model for happening in happenings} == {MODEL.model}


def test_who_comes_back_gets_what_it_has_missed_and_is_told_if_some_is_gone() -> None:
    with FakeEngine("a") as fake, paged(fake) as (page, client, url):
        fake.serve(PROMPT)
        caught_up(client, fake)
        last = f"{page.timeline.life}-{page.timeline.position}"
        fake.restart()
        wait_status(client, fake.rank, restarts=1, state=State.LIVE)

        def come_back(event_id: str) -> list[dict[str, Any]]:
            headers = {"Last-Event-ID": event_id}
            with httpx.stream("GET", f"{url}/events", headers=headers, timeout=PATIENCE) as shown:
                events = Events(shown)
                return [next(events), next(events)]

        fleet, missed = come_back(last)
        assert (fleet["data"]["missed"], fleet["id"]) == (0, last)
        assert (missed["event"], missed["data"]["state"]) == ("state", "connecting")
        for other in ("0badc0de-5", "nonsense"):
            fleet, oldest = come_back(other)
            assert fleet["data"]["missed"] is None
            assert oldest["event"] == "added"


def test_a_slow_reader_is_cut_off_counted_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(news, "SEND_WITHIN", 0.05)
    timeline, counters = Timeline(), StreamCounters()
    for number in range(1000):
        timeline.observe(status_of(A, (State.LIVE, State.STALE)[number % 2]))

    async def stream(_: Request) -> Stream:
        return news_of(timeline, dict, counters, "unknown-0")

    site = Site([Route("GET", "/events", stream)], Guard())
    with listening_on(site, SO_SNDBUF=4096) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        client.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        until(lambda: (counters.cut_off, counters.open_now) == (1, 0))
    assert counters.opened == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_more_streams_are_open_than_allowed() -> None:
    page = page_of(ManyRanks(1), guard=Guard(limits=Limits(streams=1)))
    page.streams.open_now = 1
    answer = Asker(page.routes).send("GET", "/events")
    page.close()
    assert (answer.status, answer.json["reason"]) == (503, "streams")


async def test_a_reader_that_fell_behind_the_history_is_cut_off() -> None:
    counters, timeline = StreamCounters(), Timeline(most=2)
    pieces = pieces_of(news_of(timeline, dict, counters))
    await asyncio.wait_for(pieces.__anext__(), PATIENCE)
    timeline.observe(status_of(A))  # while the first event is on its way, much happens
    for losses in range(1, 9):
        timeline.sweep([status_of(A, losses=losses)])
    assert [piece async for piece in pieces] == []
    assert counters.cut_off == 1


async def test_a_silent_stream_says_now_and_then_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(news, "HEARTBEAT", 0.01)
    pieces = pieces_of(news_of(Timeline(), dict, StreamCounters()))
    sent = [await asyncio.wait_for(pieces.__anext__(), PATIENCE) for _ in range(3)]
    await pieces.aclose()
    assert sent[1:] == [b": alive\n\n"] * 2


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b'{"tokens": "no"}', 200, "no list of tokens"),
        (b"\xff", 200, "no list of tokens"),
        (b"nothing here", 404, "it answers 404: nothing here"),
    ],
)
def test_an_engine_that_gives_no_tokens_is_told_with_what_it_said(
    body: bytes, status: int, why: str
) -> None:
    with CannedServer({"/tokenize": (status, body)}) as engine:
        with pytest.raises(RefusedError, match=why):
            tokenize(engine.url, "m", "text")
    with pytest.raises(RefusedError, match="refuses the connection"):
        tokenize(engine.url, "m", "text")  # it is gone
