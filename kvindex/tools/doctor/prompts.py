"""A prompt of the user's: as the engine sees it, against what is indexed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvindex import Client, Ending, Explanation, RankExplanation
from kvindex.tools.doctor.case import Case
from kvindex.tools.doctor.report import Finding, finding_of
from kvindex.wire.quirks import field_against_cache


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
    check = _Check()
    case = next((case for case in cases if case.http is not None), None)
    renderings = [] if case is None else _renderings(prompt, case)
    if prompt.body is not None and (field := field_against_cache(prompt.body)):
        check.add("prompt-logprobs", field=field)
    if prompt.tokens is not None:
        check.compare(prompt.tokens, renderings)
        media = renderings[0].media if len(renderings) == 1 else []
        renderings.insert(0, _Rendering("your tokens", prompt.tokens, media))
    if client is None or not renderings:
        return check.findings, []
    body: Mapping[str, Any] = prompt.body or {}
    salt = prompt.salt or body.get("cache_salt")
    explained = [(r, client.explain(r.tokens, lora=prompt.lora, salt=salt)) for r in renderings]
    check.compare_forms(explained)
    asked = explained[0]
    if prompt.tokens is None:
        asked = max(explained, key=lambda pair: _longest(pair[1]))
    check.endings(*asked)
    return check.findings, [f"{asked[0].form}: {rank}" for rank in list(asked[1])[:8]]


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


class _Check:
    """The findings about the prompt."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, kind: str, **evidence: Any) -> None:
        self.findings.append(finding_of(kind, "prompt", **evidence))

    def compare(self, tokens: list[int], renderings: Sequence[_Rendering]) -> None:
        """Note if the router's tokens are none of those that the engine sees."""
        if not renderings or any(rendering.tokens == tokens for rendering in renderings):
            return
        places = [(first_difference(tokens, r.tokens) or 0, r) for r in renderings]
        at, nearest = max(places, key=lambda pair: pair[0])
        self.add(
            "tokens-differ",
            position=at,
            compared_with=nearest.form,
            yours=tokens[at : at + 8],
            engines=nearest.tokens[at : at + 8],
        )

    def compare_forms(self, explained: Sequence[tuple[_Rendering, Explanation]]) -> None:
        """Note if the prompt is held as a chat and not as plain text."""
        forms = {r.form: (r.tokens, _longest(why)) for r, why in explained}
        if "plain text" not in forms or "a chat" not in forms:
            return
        (plain, as_plain), (chat, as_chat) = forms["plain text"], forms["a chat"]
        if as_chat > as_plain:
            at = first_difference(plain, chat)
            self.add("chat-template", position=at, plain_tokens=as_plain, chat_tokens=as_chat)

    def endings(self, rendering: _Rendering, explanation: Explanation) -> None:
        """Note what the ends of the matches show."""
        before = len(self.findings)
        ends = {rank.ending: rank for rank in explanation}
        if Ending.SHORT in ends:
            size = ends[Ending.SHORT].match.block_size
            self.add("prompt-short", tokens=len(rendering.tokens), block_size=size)
        other = ends[Ending.PROMPTS].other if Ending.PROMPTS in ends else None
        if other is not None:
            under = f"LoRA {other.lora!r}" if other.lora is not None else "no LoRA"
            under += " and a salt" if other.salted else ""
            self.add("namespace-differs", other=under, tokens=other.tokens)
        longest = _longest(explanation)
        if rendering.media and explanation and _ends_at(rendering.media[0], explanation):
            self.add("image-placeholders", position=rendering.media[0], matched=longest)
        if not longest and len(self.findings) == before:
            why = next((rank.text for rank in explanation), "no rank is known")
            self.add("prompt-not-held", why=why, form=rendering.form)


def _longest(explanation: Explanation) -> int:
    return max((rank.match.tokens for rank in explanation), default=0)


def _ends_at(position: int, explanation: Explanation) -> bool:
    """Whether the longest match ends in the block of this position, at its start."""
    best: RankExplanation = max(explanation, key=lambda rank: rank.match.tokens)
    size = best.match.block_size or 1
    return best.match.tokens <= position < best.match.tokens + size
