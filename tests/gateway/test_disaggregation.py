"""`kvindex gateway --prefill URL --decode URL` in front of fake engines that play P and D."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvindex.testing import FakeEngine, HttpEngine, HttpFaults, HttpOptions
from kvindex.testing.handoffs import TOKEN_BYTES
from tests.gateway.test_gateway import (
    CHAT,
    Gateway,
    chat,
    content_of,
    examined,
    faulty,
    gateway_of,
    live_ranks,
)
from tests.live import PATIENCE, meanwhile, until
from tests.tools.doctor.doctored import ids

pytestmark = pytest.mark.service

BLOCK = 16
TIMES = 20  # that each fault is met
DOCUMENT = "What one engine computes another one need not compute again. " * 12
LOCAL = 256  # tokens: a question about a known document is short, a new document is not


class Pair(Gateway):
    """A gateway, engines that prefill and decode, and a plain one whose answers are the truth."""

    prefill: list[HttpEngine]
    decode: list[HttpEngine]
    plain: HttpEngine

    def engine_totals(self, name: str) -> int:
        """A counter of the engines that prefill, summed up."""
        return sum(engine.counters[name] for engine in self.prefill)

    def moved_tokens(self) -> int:
        """What the engines that decode have fetched, by their counters."""
        counters = [c for engine in self.decode for c in engine._routes.counters.values()]
        return sum(counter["moved_bytes"] for counter in counters) // TOKEN_BYTES

    def has_all_events(self) -> bool:
        """Whether the gateway has received what its engines have published."""
        ranks = [rank for engine in self.engines for rank in engine._routes.ranks.values()]
        lines = self.ask("/metrics")[1].decode().splitlines()
        batches = [line for line in lines if line.startswith("kvindex_batches_total{")]
        received = sum(float(line.split()[-1]) for line in batches)
        return received == sum(rank.published for rank in ranks)

    def has_pinned(self) -> bool:
        """Whether the gateway has P's answer, and no D has begun: nothing but blocks counts."""
        ranks = self.statistics()["routers"]["fake-model"]["ranks"].values()
        return any(rank["decode_blocks"] and not rank["open_requests"] for rank in ranks)

    def log(self) -> dict[str, Any]:
        """The next line of the access log."""
        line: dict[str, Any] = json.loads(self.process.err.readline())
        return line

    def is_answered(self, text: str, *, stream: bool) -> None:
        """Send a chat; the answer must be that of a plain engine."""
        body = chat(text, stream=stream)
        status, answer = self.ask(CHAT, body)
        assert status == 200, answer
        place = urlsplit(self.plain.url)
        connection = HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE)
        fields = {"content-type": "application/json"}
        connection.request("POST", CHAT, json.dumps({**body, "stream": False}), fields)
        truth = json.load(connection.getresponse())["choices"][0]["message"]["content"]
        connection.close()
        found = (
            content_of(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]
        )
        assert found == truth
        assert not stream or answer.endswith(b"data: [DONE]\n\n")


@contextmanager
def paired(*options: str, prefill: int = 2, decode: int = 2, **own: Any) -> Iterator[Pair]:
    """Run a gateway in front of so many engines of each role."""
    roles = ["prefill"] * prefill + ["decode"] * decode + ["null"]
    with ExitStack() as opened:
        engines = [
            opened.enter_context(
                HttpEngine(
                    opened.enter_context(FakeEngine(f"{role}-{number}", block_size=BLOCK)),
                    options=HttpOptions(role=role, **own),
                )
            )
            for number, role in enumerate(roles)
        ]
        named = [
            word
            for engine, role in zip(engines[:-1], roles, strict=False)
            for word in (f"--{role}", engine.url)
        ]
        limit = ("--local-tokens", str(LOCAL))
        served = opened.enter_context(gateway_of(engines[:-1], *limit, *options, *named))
        pair = Pair(served.process, served.port, served.engines)
        pair.prefill, pair.decode = engines[:prefill], engines[prefill:-1]
        pair.plain = engines[-1]
        until(lambda: live_ranks(pair) == prefill + decode)
        yield pair


def test_answers_transfers_and_hits_are_as_predicted() -> None:
    with paired("--access-log") as pair:
        lines = []
        for number in range(30):
            # Five documents, each again and again: with another question, or a long new part.
            part = f"{number} " * 150 if number % 7 == 6 else ""
            text = f"{number % 5} {DOCUMENT}{part}{number}?"
            pair.is_answered(text, stream=number % 2 == 0)
            until(pair.has_all_events)
            lines.append(pair.log())
        apart = [line for line in lines if line["disaggregated"]]
        assert {line["prefill"] for line in lines} == {"apart", "local"}
        assert {line["prefill"] for line in apart} == {"apart"}
        assert len(apart) >= 9
        assert all(line["held"] == line["delivered"] for line in lines), "P's hit, or D's own"
        # Whole blocks move, the last one too: the prompt's but those that D holds.
        moved = [
            -(-line["prompt_tokens"] // BLOCK) - (line["prompt_tokens"] - line["moved"]) // BLOCK
            for line in apart
        ]
        assert pair.moved_tokens() == sum(moved) * BLOCK
        assert {line["prefill_rank"] for line in apart} <= {
            f"{engine.url.removeprefix('http://')}/0" for engine in pair.prefill
        }
        statistics = pair.settled()
        assert statistics["prefills"] == {"apart": len(apart), "local": len(lines) - len(apart)}
        assert statistics["tokens"]["moved"] == sum(line["moved"] for line in apart)
        router = statistics["routers"]["fake-model"]
        assert router["bookings"]["open"] == 0
        assert all(not rank["suspicion"] for rank in router["ranks"].values())
        assert router["funnel"]["reported"]["requests"] == len(lines)
        assert (pair.engine_totals("handed_over"), pair.engine_totals("pinned")) == (len(apart), 0)
        series = f'kvindex_gateway_prefills_total{{reason="apart"}} {float(len(apart))}'
        assert series in pair.ask("/metrics")[1].decode()


def met(pair: Pair, *engines: HttpEngine, **faults: Any) -> dict[str, Any]:
    """Have new documents meet faults, TIMES times, beside other requests; return the statistics.

    After each the engines answer once more: else they would be ejected, and met no longer.
    """
    numbers = count()

    def send() -> None:  # short: those that decode do it alone
        pair.is_answered(f"Beside {next(numbers)}", stream=True)

    with meanwhile(send):
        for number in range(TIMES):
            with faulty(*engines, **faults):
                pair.is_answered(f"{number} {DOCUMENT}", stream=number % 2 == 0)
            for each in range(len(pair.engines)):
                pair.is_answered(f"{number} {each} {DOCUMENT}", stream=True)
    statistics = pair.settled()
    assert statistics["routers"]["fake-model"]["bookings"]["open"] == 0
    assert statistics["requests"] == [[CHAT, 200, "whole", statistics["requests"][0][3]]]
    return statistics


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        *(({"kind": str(status)}, f"status_{status}") for status in (400, 500, 503)),
        *(({"kind": kind}, kind) for kind in ("reset", "garbage")),
        ({"kind": "half_head"}, "reset"),
        ({"handoff": "none"}, "no_params"),
    ],
    ids=str,
)
def test_a_p_that_fails_is_done_without(faults: dict[str, Any], reason: str) -> None:
    with paired(prefill=1, decode=1) as pair:
        statistics = met(pair, *pair.prefill, **faults)
        assert statistics["failures"] == {reason: TIMES}
        assert statistics["prefills"]["failed"] == TIMES
        assert statistics["ejections"] == pair.engine_totals("pinned") == 0


def test_a_p_that_fails_is_replaced() -> None:
    with paired("--policy", "round-robin", decode=1) as pair:
        statistics = met(pair, pair.prefill[0], kind="500")
        assert statistics["failures"].keys() == {"status_500"}
        assert statistics["prefills"].keys() == {"apart", "local"}, "the other one answers"


def test_what_p_has_lost_d_computes_by_itself() -> None:
    with paired(prefill=1, decode=1) as pair:
        statistics = met(pair, *pair.prefill, handoff="lost")
        assert statistics["failures"] == {"status_500": TIMES}
        assert statistics["prefills"]["lost"] == TIMES
        assert statistics["ejections"] == 0, "no fault of D"


@pytest.mark.parametrize("kind", ["503", "reset", "garbage"])
def test_another_d_gets_a_prefill_of_its_own(kind: Any) -> None:
    with paired("--policy", "round-robin", prefill=1) as pair:
        statistics = met(pair, pair.decode[0], kind=kind)
        tried_again = sum(statistics["failures"].values())
        assert tried_again > 0
        apart = statistics["prefills"]["apart"]
        assert apart <= pair.engine_totals("handed_over") <= apart + tried_again
        until(lambda: pair.statistics()["routers"]["fake-model"]["bookings"]["open"] == 0)


def test_a_d_that_recomputes_what_was_lost_answers_at_once() -> None:
    with paired(prefill=1, decode=1, load_failure="recompute") as pair:
        with faulty(*pair.prefill, handoff="lost"):
            pair.is_answered(DOCUMENT, stream=True)
        assert pair.settled()["prefills"] == {"apart": 1}


def test_a_p_that_hangs_is_given_up_and_one_that_dies_between_the_phases_is_not_missed() -> None:
    with paired("--head-within", "1", "--access-log") as pair:
        first, second = pair.prefill
        with faulty(first, second, kind="hang"):
            # As long as it needs to be: these engines are asked for its tokens, too.
            pair.is_answered(DOCUMENT * 2, stream=True)
        line = pair.log()
        assert (line["prefill"], len(line["failures"])) == ("failed", 2)
        assert {failure.split()[1] for failure in line["failures"]} == {"timeout_head"}
        for engine in pair.prefill:
            engine.faults = HttpFaults(kind="die")
        lines = []
        for number in range(6):
            pair.is_answered(f"{number} {DOCUMENT}", stream=number % 2 == 0)
            lines.append(pair.log())
        # Each has answered once, and its blocks are gone; then nobody is there to ask.
        assert [line["prefill"] for line in lines[:2]] == ["lost"] * 2
        assert lines[-1]["prefill"] == "no_prefill"
        assert all(line["status"] == 200 for line in lines)
        assert pair.settled()["routers"]["fake-model"]["bookings"]["open"] == 0


def test_a_client_that_leaves_between_the_phases_leaves_no_block_pinned() -> None:
    with paired(lease=PATIENCE) as pair, faulty(*pair.decode, pull_seconds=3.0):
        connection = HTTPConnection("127.0.0.1", pair.port, timeout=PATIENCE)
        body = json.dumps(chat(f"leaves {DOCUMENT}", stream=True))
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        until(pair.has_pinned)
        connection.close()
        until(lambda: pair.bookings()["open"] == 0)
        until(lambda: pair.engine_totals("fetched") == 1)
        assert pair.engine_totals("pinned") == 0


def test_without_a_d_there_is_no_answer() -> None:
    with paired(prefill=1, decode=1) as pair:
        pair.decode[0].close()
        status, body = pair.ask(CHAT, chat(DOCUMENT))
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_answer")
        assert pair.settled()["routers"]["fake-model"]["bookings"]["open"] == 0
    with paired(prefill=1, decode=0) as pair:
        status, body = pair.ask(CHAT, chat(DOCUMENT))
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_rank")
        assert pair.ask("/ready")[0] == 503


def test_the_doctor_finds_a_pair_that_never_transfers_and_events_that_are_off() -> None:
    with paired(prefill=1, decode=1) as pair:
        with faulty(*pair.decode, handoff="ignore"):
            pair.is_answered(DOCUMENT, stream=False)
        assert ids(examined(pair))[0] == "pair-never-transfers"
        pair.is_answered(f"Another {DOCUMENT}", stream=False)
        assert ids(examined(pair))[-2:] == ["service-examined", "all-well"]
    mute = FakeEngine("mute", publish=False)
    with mute, HttpEngine(mute, options=HttpOptions(role="prefill")) as p:
        with gateway_of([p], "--prefill", p.url) as served:
            until(lambda: "service-rank-not-live" in ids(examined(served)))
