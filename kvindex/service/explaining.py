"""`POST /api/explain`: how far a prompt matches on each rank, and where and why it ends.

The prompt may be text: the engine that serves the model turns it into tokens, by its `/tokenize`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Protocol

import msgspec

from kvindex import (
    ConfigurationError,
    Explanation,
    KVIndexError,
    Rank,
    TokenError,
    UnknownRankError,
)
from kvindex.service.http.messages import refusal
from kvindex.wire.errors import UNREADABLE, DiscoveryError
from kvindex.wire.web import Web

_MOST_BYTES: Final = 32 << 20  # of an engine's answer: some million tokens
_WORDS_OF_ERROR: Final = 300

MOST_RANKS: Final = 1_000
"""Ranks in one answer: those with the longest matches."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=1_000)]


class Question(msgspec.Struct, frozen=True):
    """A question: a prompt of one partition, as token ids or as text."""

    model: _Name = ""
    routing_group: _Name = "default"
    token_ids: list[_Id] | None = None
    text: Annotated[str, msgspec.Meta(max_length=4 << 20)] | None = None
    lora: _Name | None = None
    salt: _Name | None = None


class Explained(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        tokens: of the prompt.
        ranks: the longest matches first, each with `worker`, `dp_rank` and its explanation.
        left_out: ranks that are not among them.
    """

    tokens: int
    ranks: list[dict[str, Any]]
    left_out: int


class Explainer(Protocol):
    """Explains matches: a `Client` or a `Replica`."""

    def explain(
        self, token_ids: list[int], *, lora: str | None, salt: str | None, ranks: list[Rank]
    ) -> Explanation: ...


class TokenizerError(KVIndexError):
    """An engine did not turn text into tokens.

    Attributes:
        url: what was asked.
        reason: what is wrong.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url} did not give the text's tokens: {reason}")
        self.url = url
        self.reason = reason


class _Tokens(msgspec.Struct):
    tokens: list[int]


def tokenize(engine: str, model: str, text: str, *, timeout: float = 10.0) -> list[int]:
    """Return the tokens of a prompt's text as an engine (vLLM, SGLang) makes them.

    It blocks: call it in a thread.

    Args:
        engine: base URL of the engine's HTTP server.
        model: as the engine knows it.
        text: the prompt, with the chat template applied if there is one.
        timeout: seconds for all of it.

    Raises:
        TokenizerError: it cannot be reached, took too long, or answers something else.
    """
    url = engine.rstrip("/") + "/tokenize"
    body = msgspec.json.encode({"model": model, "prompt": text})
    try:
        answer = Web(engine).post("/tokenize", body, timeout, limit=_MOST_BYTES)
    except (ConfigurationError, DiscoveryError) as error:
        raise TokenizerError(url, str(error)) from None
    if answer.status != 200:
        said = answer.body[:_WORDS_OF_ERROR].decode(errors="replace")
        raise TokenizerError(url, f"it answers {answer.status}: {said}")
    try:
        return msgspec.json.decode(answer.body, type=_Tokens).tokens
    except UNREADABLE as error:
        raise TokenizerError(url, f"its answer is no list of tokens ({error})") from None


def read_question(body: bytes) -> Question:
    """Return the question in a JSON body.

    Raises:
        RefusedError: there is none.
    """
    try:
        question = msgspec.json.decode(body, type=Question)
    except msgspec.ValidationError as error:
        raise refusal(422, f"the question cannot be read: {error}") from None
    except UNREADABLE as error:
        raise refusal(400, f"the body is no JSON: {error}") from None
    if (question.token_ids is None) == (question.text is None):
        raise refusal(422, "give either token_ids or text")
    return question


def explain(
    source: Explainer,
    question: Question,
    ranks: list[Rank],
    tokenizer: str | None,
) -> Explained:
    """Return for each rank how far the prompt matches, longest first. It blocks.

    Args:
        source: a client or a replica.
        question: a prompt.
        ranks: those of the question's partition.
        tokenizer: base URL of the engine that knows the model's tokens, if one is configured.

    Raises:
        RefusedError: it cannot be answered.
    """
    if not ranks:
        where = f"model={question.model} routing_group={question.routing_group}"
        raise refusal(404, f"no ranks for {where}")
    tokens = question.token_ids
    if tokens is None:
        if tokenizer is None:
            raise refusal(
                409, "no tokenizer is configured for this model: give token ids instead of text"
            )
        try:
            tokens = tokenize(tokenizer, question.model, question.text or "")
        except TokenizerError as error:
            raise refusal(502, str(error)) from None
    try:
        why = source.explain(tokens, lora=question.lora, salt=question.salt, ranks=ranks)
    except (TokenError, ConfigurationError) as error:
        raise refusal(422, str(error)) from None
    except UnknownRankError as error:
        raise refusal(503, f"a rank was removed just now, ask again: {error}") from None
    explained = why.to_dict()
    ranks = [part.match.rank for part, _ in zip(why, range(MOST_RANKS), strict=False)]
    return Explained(
        tokens=len(tokens),
        ranks=[
            {"worker": rank.worker, "dp_rank": rank.dp_rank, **explained[str(rank)]}
            for rank in ranks
        ],
        left_out=max(0, len(why) - MOST_RANKS),
    )
