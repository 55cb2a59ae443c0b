"""Sessions are played through each router, and what users and engines saw of it is counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

from benchmarks.fronts import MODEL, Front, port_of
from benchmarks.gpu.sessions import KINDS, Kind, Request, Texts, sessions, words
from benchmarks.results import OURS, Result
from benchmarks.stats import percentile
from benchmarks.streaming import Answered, Client

RULES: Final = ("round-robin", "least-request", "sticky")
_LOAD: Final = 0.65  # of the capacity
_USERS: Final = 12  # for each engine, while the capacity is measured
_NOTE: Final = (
    "TTFT: to the first byte of the stream; times in ms. Hit: `cached_tokens` in % of the prompts' "
    "tokens; computed: a prompt's other tokens, in the mean. As predicted: % of the requests whose "
    "`cached_tokens` are what the index said. round-robin, least-request and sticky choose in the "
    "client, with exact knowledge, and pay for no proxy. Caches are small on purpose; weights are "
    "random, answers are not those in later prompts. Engines that share a card have their own SMs, "
    "but one bandwidth and one power limit: who computes less has a faster card."
)


@dataclass(frozen=True)
class Plan:
    """What is played.

    Attributes:
        kinds: of sessions.
        seeds: runs of each kind and router, all routers one after the other.
        warm: seconds of each run that do not count.
        seconds: those that do.
        rate: requests a second; None: 65 % of what is served, round-robin, without pauses.
        share: by what prompts' sizes are divided.
    """

    kinds: Sequence[str] = tuple(KINDS)
    seeds: Sequence[int] = (1, 2)
    warm: float = 8.0
    seconds: float = 32.0
    rate: float | None = None
    share: int = 1


class Choice:
    """A rule in the client: it costs nothing, and knows exactly what is open."""

    def __init__(self, rule: str, ports: Sequence[int]) -> None:
        self._rule, self._ports = rule, ports
        self._turns = itertools.count()
        self._open = [0] * len(ports)

    async def ask(self, request: Request) -> Answered:
        """Send a request by this rule, over a connection of its own."""
        count, turn = len(self._ports), next(self._turns)
        place = (request.session if self._rule == "sticky" else turn) % count
        if self._rule == "least-request":
            place = min(range(count), key=lambda i: (self._open[i], (i - turn) % count))
        self._open[place] += 1
        try:
            client = await Client.connected(self._ports[place])
            answered = await client.ask(request.body)
            client.transport.close()
        finally:
            self._open[place] -= 1
        return answered


def measure(plan: Plan, urls: Sequence[str], fronts: Mapping[str, Front]) -> list[Result]:
    """Play every kind through every router and return the table."""
    texts, engines = Texts(tokens_per_word(urls[0]), plan.share), [port_of(url) for url in urls]
    routers = dict.fromkeys(RULES, engines) | {n: [f.port] for n, f in fronts.items()}
    return [result for kind in plan.kinds for result in _measured(plan, kind, texts, routers)]


def _measured(
    plan: Plan, name: str, texts: Texts, routers: Mapping[str, Sequence[int]]
) -> list[Result]:
    kind, rows = KINDS[name], {router: list[Answered]() for router in routers}
    rate = plan.rate
    if rate is None:
        rate = _LOAD * asyncio.run(_capacity(plan, kind, texts, routers[RULES[0]]))
    for seed, (router, ports) in itertools.product(plan.seeds, routers.items()):
        print(
            f"… {name}, {rate:.3g} requests/s, seed {seed}, {router}", file=sys.stderr, flush=True
        )
        # Each run has prompts of its own: what the run before left in the caches is of no use.
        played = sessions(
            kind,
            texts,
            seed=seed,
            label=f"{time.time_ns()}",
            rate=rate,
            seconds=plan.warm + plan.seconds,
        )
        rows[router] += asyncio.run(_play(Choice(router, ports), played, plan.warm))
    return [_result(f"{name}, {rate:.3g}/s: {router}", router, rows[router]) for router in routers]


def _result(measure: str, router: str, answers: Sequence[Answered]) -> Result:
    good = [one for one in answers if one.is_whole and one.usage]
    if not good:
        raise RuntimeError(f"{measure}: none of {len(answers)} requests was answered")
    prompt = sum(one.usage["prompt_tokens"] for one in good)
    cached = sum(map(_cached, good))
    first, whole = [1e3 * one.began for one in good], [1e3 * one.ended for one in good]
    values = {
        "requests": float(len(good)),
        "failed": float(len(answers) - len(good)),
        "TTFT mean": sum(first) / len(good),
        "p50": percentile(first, 50),
        "p99": percentile(first, 99),
        "end to end mean": sum(whole) / len(good),
        "end to end p99": percentile(whole, 99),
        "hit": 100 * cached / prompt,
        "computed": (prompt - cached) / len(good),
    }
    if router == OURS:
        values["as predicted"] = 100 * sum(one.held == _cached(one) for one in good) / len(good)
    return Result(group="gpu", measure=measure, unit="ms, %", values=values, notes=[_NOTE])


def _cached(answered: Answered) -> int:
    details = answered.usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


async def _play(choice: Choice, played: Sequence[Sequence[Request]], warm: float) -> list[Answered]:
    """Send each request at its time, or once the one before it is answered.

    Return the answers to those whose time is after so many seconds.
    """
    answers: list[Answered] = []
    began = time.perf_counter()

    async def one(requests: Sequence[Request]) -> None:
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at - time.perf_counter()))
            try:
                answered = await choice.ask(request)
            except OSError:
                answered = Answered(is_whole=False)
            if request.at >= warm:
                answers.append(answered)

    await asyncio.gather(*map(one, played))
    return answers


async def _capacity(plan: Plan, kind: Kind, texts: Texts, ports: Sequence[int]) -> float:
    """Return the requests a second that are served round-robin while nobody ever pauses."""
    choice, half, done = Choice(RULES[0], ports), plan.seconds / 2, 0
    users = _USERS * len(ports)
    label = f"{time.time_ns()}"
    played = sessions(
        kind, texts, seed=0, label=label, rate=users * 4.0, seconds=max(4.0, plan.seconds / 4)
    )
    waiting = itertools.cycle(played)
    began = time.perf_counter()

    async def user() -> None:
        nonlocal done
        for requests in waiting:
            for request in requests:
                await choice.ask(request)
                at = time.perf_counter() - began
                done += half <= at < plan.seconds
                if at >= plan.seconds:
                    return

    await asyncio.gather(*(user() for _ in range(users)))
    return done / half


def tokens_per_word(url: str) -> float:
    """Ask an engine's tokenizer."""
    body = json.dumps({"model": MODEL, "prompt": " ".join(words())}).encode()
    request = UrlRequest(f"{url}/tokenize", body, {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return float(json.load(answer)["count"]) / len(words())
