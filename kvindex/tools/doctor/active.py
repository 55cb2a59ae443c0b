"""The active test: it sends one new prompt twice.

Whether the engine tells of its blocks, whether the index finds it then, and whether the engine
hits it when it comes again: the eight outcomes separate the engine, the stream and the index.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvindex import Client, Rank, RankStatus
from kvindex.subscribe.discovery import DiscoveryError
from kvindex.tools.doctor.case import Case
from kvindex.tools.doctor.engine_http import EngineHttp, Usage
from kvindex.tools.doctor.limits import Limits

__all__ = ["OUTCOMES", "probe_engine"]

_BLOCKS: Final = 4
_MAX_PROMPT: Final = 1 << 18  # tokens
_USUAL_BLOCK: Final = 16  # tokens, where nobody tells
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
"""By whether stores were heard, the index found the prompt, and the engine hit it: the finding."""


def probe_engine(case: Case, client: Client, limits: Limits, *, model: str, seed: int) -> None:
    """Send the engine a prompt twice and note what came of it.

    Args:
        case: of an engine that is asked over HTTP.
        client: subscribed to it.
        limits: how long to wait.
        model: which model to ask; "" for the first that the engine serves.
        seed: of the prompt. Engines with one tokenizer get the same prompt.
    """
    assert case.http is not None
    assert case.report is not None
    block = _block_size(case, client)
    tokens = _prompt(case.http, model or case.report.model, block, case.max_model_len, seed)
    if tokens is None:
        return  # a block does not fit into a request: `claims` has said so
    body = {
        "model": model or case.report.model,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0.0,
    }
    pinned = _rank_to_ask(case)
    if pinned is not None and case.engine == "sglang":
        body["data_parallel_rank"] = pinned
    if case.ear is not None:
        case.ear.want(tokens)
    try:
        case.http.complete(body, pinned)
        stored = _stored(case, limits)
        predicted = _predicted(case, client, tokens, limits)
        before = case.http.metrics().total(*_HITS)
        usage = case.http.complete(body, pinned)
    except DiscoveryError as error:
        case.add("completion-failed", error=str(error)[:400])
        return
    if case.ear is not None:
        case.ear.listen(case.ear.agrees, limits.listen)
    if usage.cached_tokens is None:
        case.add("cached-tokens-unreported")
    cached = _cached(usage, before, case.http)
    if not cached and _other_rank_stored(case, limits):
        case.add("rank-not-kept", asked_for=pinned, ranks=len(case.addresses))
        return
    if stored is None:
        stored = predicted  # bound or encrypted: only the client hears it
    _judge(case, tokens, block, usage, (stored, predicted, cached))


def _rank_to_ask(case: Case) -> int | None:
    """The rank that gets the prompt, where the engine has several: one that is listened to."""
    listened = [address.dp_rank for address in case.addresses]
    known = [a.dp_rank for a in case.report.ranks] if case.report else []
    if len(known or listened) < 2:
        return None
    return next((rank for rank in listened if not known or rank in known), None)


def _judge(
    case: Case,
    tokens: Sequence[int],
    block: int,
    usage: Usage,
    seen: tuple[int, int, int | None],
) -> None:
    """Note which of the eight outcomes it is, and smaller differences."""
    stored, predicted, cached = seen
    hit = cached >= block if cached is not None else predicted > 0 or stored > 0
    kind = OUTCOMES[stored > 0, predicted > 0, hit]
    sent = len(tokens)
    case.test = {
        "outcome": kind,
        "sent": sent,
        "stored": stored,
        "predicted": predicted,
        "cached": cached,
        "block_size": block,
    }
    case.add(kind, **{name: value for name, value in case.test.items() if name != "outcome"})
    if usage.prompt_tokens is not None and usage.prompt_tokens != sent:
        case.add("token-count-differs", counted=usage.prompt_tokens, sent=sent)
    if kind == "all-well" and cached is not None and predicted != cached:
        less = "hit-one-block-less" if predicted - cached == block else "hit-differs"
        case.add(less, cached=cached, predicted=predicted, block_size=block)


def _prompt(
    http: EngineHttp, model: str, block: int, longest: int | None, seed: int
) -> list[int] | None:
    """A prompt of some blocks and one token, of ids that the engine knows; None if none fits."""
    longest = _MAX_PROMPT if longest is None else min(longest, _MAX_PROMPT)
    blocks = min(_BLOCKS, (longest - 2) // block)
    if blocks < 1:
        return None
    size = blocks * block + 1
    rng = random.Random(seed)
    text = " ".join(f"{rng.getrandbits(32):08x}" for _ in range(size))
    tokens = http.tokenize({"model": model, "prompt": text})
    if tokens is not None and len(tokens) >= size:
        return tokens[:size]
    return rng.choices(_COMMON_IDS, k=size)


def _block_size(case: Case, client: Client) -> int:
    """Tokens of a block: the largest size reported, so that the prompt has whole blocks."""
    told = [case.block_size or 0, *heard_block_sizes(case, client.statistics())]
    return max(told) or _USUAL_BLOCK


def heard_block_sizes(case: Case, statistics: Mapping[str, Any]) -> list[int]:
    """Return the block sizes in a worker's events, as its index knows them."""
    return [
        group["block_size"]
        for rank in statistics["ranks"].values()
        if rank["rank"].rpartition("/")[0] == case.name
        for group in rank["index"].get("groups", {}).values()
        if group["block_size"]
    ]


def _stored(case: Case, limits: Limits) -> int | None:
    """How many of the prompt's tokens events reported as stored; None if no events are received."""
    ear = case.ear
    if ear is None:
        return None
    every = [heard for ranks in ear.heard.values() for heard in ranks]

    def one_rank_has_all() -> bool:
        return any(all(heard.tested for heard in ranks) for ranks in ear.heard.values())

    ear.listen(one_rank_has_all, limits.listen)
    return max((heard.tested for heard in every), default=0)


def _other_rank_stored(case: Case, limits: Limits) -> bool:
    """Whether the prompt, asked of one rank twice, was computed by two."""
    ear = case.ear
    if ear is None or len(ear.heard) < 2:
        return False

    def two_have_it() -> bool:
        return sum(all(heard.tested for heard in ranks) for ranks in ear.heard.values()) > 1

    return ear.listen(two_have_it, limits.listen)


def _predicted(case: Case, client: Client, tokens: Sequence[int], limits: Limits) -> int:
    """How many tokens the index says that the engine will hit, as soon as it says any."""
    asked = list(tokens)

    def best() -> int:
        match = client.match(asked, recomputed=1)
        return max((one.tokens for one in match if one.rank.worker == case.name), default=0)

    def found(_: Mapping[Rank, RankStatus]) -> bool:
        return best() > 0

    client.wait_for(found, limits.listen)
    return best()


def _cached(usage: Usage, before: float | None, http: EngineHttp) -> int | None:
    """How many tokens the engine says that it hit: in its answer, else by its metrics."""
    if usage.cached_tokens is not None:
        return usage.cached_tokens
    after = http.metrics().total(*_HITS)
    return None if before is None or after is None else int(after - before)
