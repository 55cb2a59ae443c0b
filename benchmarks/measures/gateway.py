"""`kvindex gateway` beside Envoy, vllm-router and LiteLLM, in front of fake engines that stream."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

import msgspec

from benchmarks.bench import Bench
from benchmarks.fronts import (
    DIRECT,
    ENGINES,
    ENVOY,
    LITELLM,
    MODEL,
    VLLM_ROUTER,
    WITH_ENVOY,
    Front,
    started,
)
from benchmarks.process import ROOT
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median
from benchmarks.streaming import PROMPT, Answered, ask, chats

AT_ONCE: Final = 32
TOKENS: Final = 64  # of a stream
GAP: Final = 0.004  # seconds between them
SLOWER: Final = 16  # a peer that is so much slower gets so many fewer requests
CONNECTIONS: Final = 1_000
STREAMS: Final = 256
CHAT_TOKENS: Final = 36_000
_GROUP: Final = "gateway"
_NEEDED: Final = ("httptools", "tokenizers")
_NOTE: Final = (
    f"{ENGINES} fake engines, prompts of {PROMPT:,} tokens of which eight share three quarters, "
    f"{AT_ONCE} connections; all processes share the machine's cores. CPU is that of the "
    "gateway's processes. Only kvindex counts tokens (by the engines' /render) and follows "
    "events. Envoy has one thread and sends to the engine with the fewest requests; vllm-router "
    "runs cache_aware; its kv_aware, which follows events, was not measured."
)


class _Account(NamedTuple):
    delivered: int  # tokens found cached, as the gateway says
    hit: int  # as the engines say


def run(bench: Bench) -> list[Result]:
    """Return the figures; none if the extra `gateway` is missing."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print("\n`gateway` is left out: it needs `pip install -e '.[gateway]'`")
        return []
    with started(bench) as (fronts, urls):
        seeds = iter(range(bench.seed, 1_000_000))
        results = [*_costs(bench, fronts, seeds), *_added(bench, fronts, seeds)]
        for name in (OURS, WITH_ENVOY):
            if name in fronts:
                results += _whole(bench, name, fronts[name], urls, seeds)
    return [*results, _turn(bench)]


def _whole(
    bench: Bench, name: str, front: Front, urls: Sequence[str], seeds: Iterator[int]
) -> list[Result]:
    """Whether all is whole, released and read, of one of our two fronts."""
    before = _account(front, urls)
    results = [*_many(bench, front, seeds)]
    results += _accounts(front, before, _account(front, urls))
    if name == OURS:
        return results
    return [
        msgspec.structs.replace(result, measure=f"with Envoy: {result.measure}")
        for result in results
    ]


def _result(
    measure: str,
    unit: str,
    values: dict[str, float],
    bar: Bar | None = None,
    against: tuple[str, ...] = (),
) -> Result:
    return Result(
        group=_GROUP,
        measure=measure,
        unit=unit,
        values=values,
        bar=bar,
        against=against,
        notes=[_NOTE],
    )


def _costs(bench: Bench, fronts: dict[str, Front], seeds: Iterator[int]) -> Iterator[Result]:
    """CPU of a request with one token, and of each further token of a stream."""
    taken: dict[tuple[str, int], list[float]] = {}
    parts: dict[tuple[str, int], list[float]] = {}  # with Envoy: of it, and of the picker
    rounds = bench.scale.rounds
    for _ in range(rounds):
        for name, front in fronts.items():
            for tokens in (1, TOKENS):
                count = bench.scale.gateway_requests // (SLOWER if name == LITELLM else 1)
                bodies = list(chats(max(count, 8), next(seeds), max_tokens=tokens))
                before, picker = front.cpu(), front.cpu(without="envoy")
                _check(name, ask(front, bodies, at_once=AT_ONCE, gap=GAP))
                taken.setdefault((name, tokens), []).append((front.cpu() - before) / len(bodies))
                if name == WITH_ENVOY:
                    own = (front.cpu(without="envoy") - picker) / len(bodies)
                    parts.setdefault(("picker", tokens), []).append(own)
                    parts.setdefault(("envoy", tokens), []).append(taken[name, tokens][-1] - own)
    costs = {key: median(values) for key, values in taken.items()}
    one = {name: costs[name, 1] * 1e3 for name in fronts if name != DIRECT}
    each = {
        name: (costs[name, TOKENS] - costs[name, 1]) / (TOKENS - 1) * 1e6
        for name in fronts
        if name != DIRECT
    }
    title = "CPU of a request"
    yield _result(title, "ms", one, Bar(times=1 / 1.6), (VLLM_ROUTER,))
    if LITELLM in fronts:
        pair = {name: one[name] for name in (OURS, LITELLM)}
        yield _result(f"{title}, beside {LITELLM}", "ms", pair, Bar(times=12.0))
    title = "CPU of a streamed token"
    yield _result(title, "µs", each, Bar(times=1 / 1.4), (ENVOY,))
    if parts:
        share = {part: median(values) for part, values in parts.items()}
        envoys = (share["envoy", TOKENS] - share["envoy", 1]) / (TOKENS - 1) * 1e6
        alone = {name: each[name] for name in (ENVOY,) if name in each}
        pair = {OURS: each[WITH_ENVOY], **alone}
        yield _result(f"with Envoy: {title}", "µs", pair, Bar(times=1 / 1.2))
        yield _result(f"with Envoy: Envoy's {title}", "µs", {OURS: envoys, **alone})
        values = {OURS: share["picker", 1] * 1e3}
        yield _result("with Envoy: the picker's CPU of a request", "ms", values, Bar(at_most=3.5))


def _added(bench: Bench, fronts: dict[str, Front], seeds: Iterator[int]) -> Iterator[Result]:
    """What a gateway adds to the time to the first token, one request at a time."""
    least = dict.fromkeys(fronts, float("inf"))
    rounds = bench.scale.rounds
    for _ in range(rounds):  # in turn: the machine is not equally quick at all times
        for name, front in fronts.items():
            count = max(1, bench.scale.gateway_alone // rounds)
            bodies = list(chats(count, next(seeds), max_tokens=1))
            answers = _check(name, ask(front, bodies, at_once=1))
            least[name] = min(least[name], *(answer.first for answer in answers))
    added = {name: (least[name] - least[DIRECT]) * 1e3 for name in fronts if name != DIRECT}
    title = f"added to the first token's time, least of {bench.scale.gateway_alone}"
    yield _result(title, "ms", added, Bar(at_most=2.5))
    if WITH_ENVOY in added:
        yield _result(f"with Envoy: {title}", "ms", {OURS: added[WITH_ENVOY]}, Bar(at_most=6.0))


def _many(bench: Bench, ours: Front, seeds: Iterator[int]) -> Iterator[Result]:
    """Many connections and many streams at once: what is not whole, and what stays booked."""
    connections = min(CONNECTIONS, bench.scale.gateway_requests * 2)
    bodies = list(chats(connections, next(seeds), max_tokens=4))
    answers = ask(ours, bodies, at_once=connections, gap=GAP)
    broken = sum(not answer.is_whole for answer in answers)
    yield _result(
        f"{connections:,} connections: not whole", "answers", {OURS: broken}, Bar(at_most=0)
    )
    streams = min(STREAMS, bench.scale.gateway_requests)
    bodies = list(chats(2 * streams, next(seeds), max_tokens=TOKENS))
    answers = ask(ours, bodies, at_once=streams, gap=0.02)
    broken = sum(not answer.is_whole for answer in answers)
    yield _result(
        f"{streams} streams at once: not whole", "answers", {OURS: broken}, Bar(at_most=0)
    )
    time.sleep(1.0)
    left = ours.get("/admin/statistics")["routers"][MODEL]["bookings"]["open"]
    yield _result("bookings a second later", "", {OURS: float(left)}, Bar(at_most=0))


def _accounts(ours: Front, before: _Account, after: _Account) -> Iterator[Result]:
    """Whether the gateway has read what the engines have reported."""
    tokens = ours.get("/admin/statistics")["tokens"]
    unread = 1 - tokens["answers_with_usage"] / tokens["answers"]
    yield _result("answers without usage", "%", {OURS: 100 * unread}, Bar(at_most=0.1))
    delivered, hit = (after[n] - before[n] for n in (0, 1))
    title = f"cached tokens: the gateway's {delivered:,} differ from the engines' by"
    yield _result(title, "", {OURS: float(abs(delivered - hit))}, Bar(at_most=0))


def _account(ours: Front, urls: Sequence[str]) -> _Account:
    return _Account(ours.get("/admin/statistics")["tokens"]["delivered"], sum(map(_hits, urls)))


def _hits(url: str) -> int:
    """Return the tokens that an engine has found in its cache."""
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total{")]
    return sum(int(float(line.split()[-1])) for line in found)


def _turn(bench: Bench) -> Result:
    """A new turn of a long chat: encoding, with the pieces of the turns before remembered."""
    from kvindex.gateway.local import Segments

    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    whole, segments = _tokenizer(text), Segments(_tokenizer(text), "benchmark")
    size = 3_000
    chat, at = "", 0

    def message() -> str:
        nonlocal at
        at = (at + size) % (len(text) - size)
        return f"<|im_start|>user\n{text[at : at + size]}<|im_end|>\n"

    while len(whole.encode(chat, add_special_tokens=False).ids) < bench.scale.gateway_chat:
        chat += message()
    segments.encode(chat)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(bench.scale.rounds):
        chat += message()
        began = time.perf_counter()
        ids = segments.encode(chat)
        between = time.perf_counter()
        expected = whole.encode(chat, add_special_tokens=False).ids
        theirs.append(time.perf_counter() - between)
        ours.append(between - began)
        if list(ids) != expected:
            raise AssertionError("the pieces have other tokens than the whole")
    values = {OURS: median(ours) * 1e3, "whole": median(theirs) * 1e3}
    title = f"a new turn of a chat of {bench.scale.gateway_chat:,} tokens: encoding"
    return _result(title, "ms", values, Bar(times=15.0))


def _tokenizer(text: str) -> Any:
    """Train a byte-level BPE with the special tokens of a chat."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text], trainer)
    return made


def _check(name: str, answers: Sequence[Answered]) -> Sequence[Answered]:
    broken = sum(not answer.is_whole for answer in answers)
    if broken:
        raise AssertionError(f"{name}: {broken} of {len(answers)} answers are not whole")
    return answers
