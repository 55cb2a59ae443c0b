"""Prompts: the active test, which sends a new one twice, and the one that a user asks about.

Whether the engine reports the test prompt's blocks, whether the index then finds it, and whether
the engine hits it the second time: the eight outcomes separate the engine, the stream and the
index.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kvindex import Client, Ending, Explanation
from kvindex.subscribe.discovery import DiscoveryError
from kvindex.tools.doctor.case import Case, Finding, finding_of
from kvindex.tools.doctor.engine import EngineHttp
from kvindex.tools.doctor.streams import event_block_sizes
from kvindex.wire.quirks import field_against_cache

_BLOCKS: Final = 4
_MAX_PROMPT: Final = 1 << 18  # tokens
_USUAL_BLOCK: Final = 16  # tokens, where nothing states it
_LOOK_EVERY: Final = 0.05  # seconds between two looks whether the index has the prompt
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
    listener, limit = case.listener, case.shared.limits.listen
    # The largest size that is known, so that the prompt has whole blocks of every group.
    stated = [case.block_size or 0, *event_block_sizes(case, client.statistics())]
    block = max(stated) or _USUAL_BLOCK
    tokens = _prompt(case, case.http, block)
    if tokens is None:
        return  # a block does not fit into a request: `claims` has noted that
    body = {"model": case.model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
    # An engine of several ranks would choose one itself: perhaps one that nobody listens to, and
    # another the second time.
    known = [address.dp_rank for address in case.report.ranks] if case.report else []
    listened = [address.dp_rank for address in case.addresses]
    pinned = None
    if len(known or listened) > 1:
        pinned = next((rank for rank in listened if not known or rank in known), None)
        if pinned is not None and case.engine == "sglang":
            body["data_parallel_rank"] = pinned
    if listener is not None:
        listener.want(tokens)
    try:
        case.http.complete(body, pinned)
        stored = None  # bound or encrypted: only the client receives events
        if listener is not None:
            listener.listen(lambda: listener.ranks_tested() > 0, limit)
            stored = max((r.tested for pair in listener.received.values() for r in pair), default=0)
        predicted = _predicted(case, client, tokens)
        before = case.http.metrics().total(*_HITS)
        usage = case.http.complete(body, pinned)
    except DiscoveryError as error:
        case.add("completion-failed", error=str(error)[:400])
        return
    # Connections lag behind one another: only then do they show several publishers.
    if listener is not None:
        listener.listen(listener.agrees, limit)
    cached = usage.cached_tokens
    if cached is None:
        case.add("cached-tokens-unreported")
        after = case.http.metrics().total(*_HITS)
        cached = None if before is None or after is None else int(after - before)
    # Asked of one rank twice, a prompt may be computed by two.
    if (
        not cached
        and listener is not None
        and len(listener.received) > 1
        and listener.listen(lambda: listener.ranks_tested() > 1, limit)
    ):
        case.add("rank-not-kept", asked_for=pinned, ranks=len(case.addresses))
        return
    stored = predicted if stored is None else stored
    hit = cached >= block if cached is not None else predicted > 0 or stored > 0
    kind = OUTCOMES[stored > 0, predicted > 0, hit]
    sizes = {"sent": len(tokens), "stored": stored, "predicted": predicted, "cached": cached}
    case.test = {"outcome": kind, **sizes, "block_size": block}
    told: dict[str, Any] = {**sizes, "block_size": block}
    if kind == "all-well":
        told["seen"] = (
            "a test prompt was stored, predicted, and hit when it was sent again "
            f"({cached} of {len(tokens)} tokens)"
        )
    case.add(kind, **told)
    if usage.prompt_tokens is not None and usage.prompt_tokens != len(tokens):
        case.add("token-count-differs", counted=usage.prompt_tokens, sent=len(tokens))
    if kind == "all-well" and cached is not None and predicted != cached:
        less = "hit-one-block-less" if predicted - cached == block else "hit-differs"
        case.add(less, cached=cached, predicted=predicted, block_size=block)


def _prompt(case: Case, http: EngineHttp, block: int) -> list[int] | None:
    """A prompt of some blocks and one token, of ids that the engine has; None if none fits."""
    longest = min(case.max_model_len or _MAX_PROMPT, _MAX_PROMPT)
    blocks = min(_BLOCKS, (longest - 2) // block)
    if blocks < 1:
        return None
    # One token more: engines compute the last one again, and drop its block from the hit.
    size = blocks * block + 1
    rng = random.Random(case.shared.seed)
    # Random words, so that no engine has them cached; each is a token at least.
    text = " ".join(f"{rng.getrandbits(32):08x}" for _ in range(size))
    tokens = http.tokenize({"model": case.model, "prompt": text})
    if tokens is not None and len(tokens) >= size:
        return tokens[:size]
    return rng.choices(_COMMON_IDS, k=size)


def _predicted(case: Case, client: Client, tokens: Sequence[int]) -> int:
    """How many tokens the engine will hit by the index, as soon as the index has any."""

    def best() -> int:
        match = client.match(list(tokens), recomputed=1)
        return max((held.tokens for held in match if held.rank.worker == case.name), default=0)

    until = time.monotonic() + case.shared.limits.listen
    while (hit := best()) == 0 and time.monotonic() < until:
        # The index announces nothing: its answer is sampled.
        time.sleep(_LOOK_EVERY)
    return hit


# A prompt of the user's --------------------------------------------------------------------------


class UserPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt to ask about; at least one of the first three.

    Attributes:
        text: as a user types it: it is looked for as plain text and as a chat's only message.
        body: a request's body, with `prompt` or `messages`.
        tokens: the token ids that your router asks with.
        lora: LoRA adapter that it asks with.
        salt: cache salt that it asks with.
    """

    text: str = ""
    body: dict[str, Any] | None = None
    tokens: list[int] | None = None
    lora: str | int | None = None
    salt: str | None = None


class _Rendering(msgspec.Struct, frozen=True):
    """One way in which the engine sees the prompt."""

    form: str
    tokens: list[int]
    media: list[int]


def check_prompt(
    prompt: UserPrompt, cases: Sequence[Case], client: Client | None
) -> tuple[list[Finding], list[str]]:
    """Return what is wrong with a prompt, and per rank how far it is held, as sentences."""
    findings: list[Finding] = []
    case = next((case for case in cases if case.http is not None), None)
    renderings = [] if case is None else _renderings(prompt, case)
    if prompt.body is not None and (field := field_against_cache(prompt.body)):
        findings.append(finding_of("prompt-logprobs", "prompt", field=field))
    ours = prompt.tokens
    if ours is not None:
        if renderings and all(rendering.tokens != ours for rendering in renderings):
            # What agrees furthest is, most probably, what was meant.
            places = [(first_difference(ours, r.tokens) or 0, r) for r in renderings]
            at, nearest = max(places, key=lambda pair: pair[0])
            evidence: dict[str, Any] = {"position": at, "compared_with": nearest.form}
            evidence["engines"] = nearest.tokens[at : at + 8]
            yours = ours[at : at + 8]
            findings.append(finding_of("tokens-differ", "prompt", **evidence, yours=yours))
        media = renderings[0].media if len(renderings) == 1 else []
        renderings.insert(0, _Rendering("your tokens", ours, media))
    if client is None or not renderings:
        return findings, []
    salt = prompt.salt or (prompt.body or {}).get("cache_salt")
    explained = [(r, client.explain(r.tokens, lora=prompt.lora, salt=salt)) for r in renderings]
    forms = {r.form: (r.tokens, _longest(why)) for r, why in explained}
    if "plain text" in forms and "a chat" in forms:
        (plain, as_plain), (chat, as_chat) = forms["plain text"], forms["a chat"]
        if as_chat > as_plain:
            lengths: dict[str, Any] = {"plain_tokens": as_plain, "chat_tokens": as_chat}
            at = first_difference(plain, chat) or 0
            findings.append(finding_of("chat-template", "prompt", position=at, **lengths))
    rendering, explanation = explained[0]
    if ours is None:  # in the form that is held furthest
        rendering, explanation = max(explained, key=lambda pair: _longest(pair[1]))
    ends = list(_about_endings(rendering, explanation))
    if not ends and not _longest(explanation):
        why = next((rank.text for rank in explanation), "no rank is known")
        ends = [finding_of("prompt-not-held", "prompt", why=why, form=rendering.form)]
    return findings + ends, [f"{rendering.form}: {rank}" for rank in list(explanation)[:8]]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first place at which two lists differ; None if they are equal.

    Examples:
        >>> first_difference([1, 2, 3], [1, 2]), first_difference([1], [1])
        (2, None)
    """
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _renderings(prompt: UserPrompt, case: Case) -> list[_Rendering]:
    assert case.http is not None
    name = {"model": case.model}
    if prompt.body is not None:
        bodies = {"the request": {**name, **prompt.body}}
    elif prompt.text:
        chat = [{"role": "user", "content": prompt.text}]
        bodies = {
            "plain text": {**name, "prompt": prompt.text},
            "a chat": {**name, "messages": chat},
        }
    else:
        bodies = {}
    rendered = {form: case.http.render(body) for form, body in bodies.items()}
    return [_Rendering(form, tokens, media) for form, (tokens, media) in rendered.items() if tokens]


def _about_endings(rendering: _Rendering, explanation: Explanation) -> Iterator[Finding]:
    """Yield what the ends of the matches show."""
    size = len(rendering.tokens)
    ends = {rank.ending: rank for rank in explanation}
    if Ending.SHORT in ends:
        block = ends[Ending.SHORT].match.block_size
        yield finding_of("prompt-short", "prompt", tokens=size, block_size=block)
    other = ends[Ending.PROMPTS].other if Ending.PROMPTS in ends else None
    if other is not None:
        under = f"LoRA {other.lora!r}" if other.lora is not None else "no LoRA"
        under += " and a salt" if other.salted else ""
        yield finding_of("namespace-differs", "prompt", other=under, tokens=other.tokens)
    if rendering.media and explanation:
        position = rendering.media[0]
        best = max(explanation, key=lambda rank: rank.match.tokens).match
        # It ends in the block of the first image, at that block's start.
        if best.tokens <= position < best.tokens + (best.block_size or 1):
            matched = best.tokens
            yield finding_of("image-placeholders", "prompt", position=position, matched=matched)


def _longest(explanation: Explanation) -> int:
    return max((rank.match.tokens for rank in explanation), default=0)
