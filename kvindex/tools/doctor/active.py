"""The active test: one new prompt, sent twice.

Whether the engine reports its blocks, whether the index then finds the prompt, and whether the
engine hits it the second time: the eight outcomes separate the engine, the stream and the index.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvindex import Client
from kvindex.subscribe.discovery import DiscoveryError
from kvindex.tools.doctor.case import Case
from kvindex.tools.doctor.engine import EngineHttp, Usage

_BLOCKS: Final = 4
_MAX_PROMPT: Final = 1 << 18  # tokens
_USUAL_BLOCK: Final = 16  # tokens, where nothing states it
_LOOK_EVERY: Final = 0.01  # seconds between two looks whether the index has the prompt
_COMMON_IDS: Final = range(300, 1000)  # in any tokenizer's vocabulary
_HITS: Final = ("vllm:prefix_cache_hits", "sglang:cached_tokens")

OUTCOMES: Final = {
    (True, True, True): "all-well",
    (True, True, False): "engine-never-hits",
    (True, False, True): "index-misses",
    (True, False, False): "index-and-engine-miss",
    (False, True, True): "live-stream-mute",
    (False, True, False): "live-stream-mute-no-hit",
    (False, False, True): "caches-unpublished",
    (False, False, False): "nothing-cached",
}
"""The finding, by whether stores were received, the index found the prompt, the engine hit it."""


def probe_engine(case: Case, client: Client) -> None:
    """Send an engine that is asked over HTTP a prompt twice, and note the outcome."""
    assert case.http is not None
    block = _block_size(case, client)
    tokens = _prompt(case, case.http, block)
    if tokens is None:
        return  # a block does not fit into a request: `claims` has noted that
    body = {"model": case.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
    pinned = _rank_to_ask(case)
    if pinned is not None and case.engine == "sglang":
        body["data_parallel_rank"] = pinned
    if case.listener is not None:
        case.listener.want(tokens)
    try:
        case.http.complete(body, pinned)
        stored = _stored(case)
        predicted = _predicted(case, client, tokens)
        before = case.http.metrics().total(*_HITS)
        usage = case.http.complete(body, pinned)
    except DiscoveryError as error:
        case.add("completion-failed", error=str(error)[:400])
        return
    if case.listener is not None:
        case.listener.listen(case.listener.agrees, case.shared.limits.listen)
    if usage.cached_tokens is None:
        case.add("cached-tokens-unreported")
    cached = _cached(usage, before, case.http)
    if not cached and _other_rank_stored(case):
        case.add("rank-not-kept", asked_for=pinned, ranks=len(case.addresses))
        return
    if stored is None:
        stored = predicted  # bound or encrypted: only the client receives events
    seen = {"sent": len(tokens), "stored": stored, "predicted": predicted, "cached": cached}
    _judge(case, usage, {**seen, "block_size": block})


def _rank_to_ask(case: Case) -> int | None:
    """The rank that gets the prompt, where the engine has several: one that is listened to."""
    listened = [address.dp_rank for address in case.addresses]
    known = [a.dp_rank for a in case.report.ranks] if case.report else []
    if len(known or listened) < 2:
        return None
    return next((rank for rank in listened if not known or rank in known), None)


def _judge(case: Case, usage: Usage, seen: dict[str, Any]) -> None:
    """Note which of the eight outcomes it is, and smaller differences."""
    sent, stored, predicted, cached, block = seen.values()
    hit = cached >= block if cached is not None else predicted > 0 or stored > 0
    kind = OUTCOMES[stored > 0, predicted > 0, hit]
    case.test = {"outcome": kind, **seen}
    case.add(kind, **seen)
    if usage.prompt_tokens is not None and usage.prompt_tokens != sent:
        case.add("token-count-differs", counted=usage.prompt_tokens, sent=sent)
    if kind == "all-well" and cached is not None and predicted != cached:
        less = "hit-one-block-less" if predicted - cached == block else "hit-differs"
        case.add(less, cached=cached, predicted=predicted, block_size=block)


def _prompt(case: Case, http: EngineHttp, block: int) -> list[int] | None:
    """A prompt of some blocks and one token, of ids that the engine has; None if none fits."""
    longest = min(case.max_model_len or _MAX_PROMPT, _MAX_PROMPT)
    blocks = min(_BLOCKS, (longest - 2) // block)
    if blocks < 1:
        return None
    size = blocks * block + 1
    rng = random.Random(case.shared.seed)
    text = " ".join(f"{rng.getrandbits(32):08x}" for _ in range(size))
    tokens = http.tokenize({"model": case.model, "prompt": text})
    if tokens is not None and len(tokens) >= size:
        return tokens[:size]
    return rng.choices(_COMMON_IDS, k=size)


def _block_size(case: Case, client: Client) -> int:
    """Tokens of a block: the largest size reported, so that the prompt has whole blocks."""
    stated = [case.block_size or 0, *event_block_sizes(case, client.statistics())]
    return max(stated) or _USUAL_BLOCK


def event_block_sizes(case: Case, statistics: Mapping[str, Any]) -> list[int]:
    """Return the block sizes in a worker's events, as its index has them."""
    return [
        group["block_size"]
        for rank in statistics["ranks"].values()
        if rank["rank"].rpartition("/")[0] == case.name
        for group in rank["index"].get("groups", {}).values()
        if group["block_size"]
    ]


def _stored(case: Case) -> int | None:
    """How many of the prompt's tokens events reported as stored; None if no events are received."""
    listener = case.listener
    if listener is None:
        return None
    listener.listen(lambda: listener.ranks_tested() > 0, case.shared.limits.listen)
    return max((r.tested for pair in listener.received.values() for r in pair), default=0)


def _other_rank_stored(case: Case) -> bool:
    """Whether the prompt, asked of one rank twice, was computed by two."""
    listener = case.listener
    if listener is None or len(listener.received) < 2:
        return False
    return listener.listen(lambda: listener.ranks_tested() > 1, case.shared.limits.listen)


def _predicted(case: Case, client: Client, tokens: Sequence[int]) -> int:
    """How many tokens the engine will hit by the index, as soon as the index has any."""

    def best() -> int:
        match = client.match(list(tokens), recomputed=1)
        return max((held.tokens for held in match if held.rank.worker == case.name), default=0)

    until = time.monotonic() + case.shared.limits.listen
    while (hit := best()) == 0 and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)
    return hit


def _cached(usage: Usage, before: float | None, http: EngineHttp) -> int | None:
    """How many tokens the engine reports as hit: in its answer, else by its metrics."""
    if usage.cached_tokens is not None:
        return usage.cached_tokens
    after = http.metrics().total(*_HITS)
    return None if before is None or after is None else int(after - before)
