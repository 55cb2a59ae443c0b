"""`POST /api/explain`: how far a prompt matches on each rank, and where and why it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Protocol

import msgspec

from kvindex import ConfigurationError, Explanation, Rank, TokenError, UnknownRankError
from kvindex.service.asking import UNREADABLE
from kvindex.service.tokenizing import TokenizerError, tokenize

__all__ = ["Explained", "Question", "RefusedError", "answer", "read_question"]

MOST_RANKS: Final = 1_000
"""Ranks that one answer tells of: those with the longest matches."""

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


class Explained(Protocol):
    """Whoever explains: a `Client` or a `Replica`."""

    def explain(
        self, token_ids: list[int], *, lora: str | None, salt: str | None, ranks: list[Rank]
    ) -> Explanation: ...


class RefusedError(Exception):
    """A question that is not answered: the HTTP status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def read_question(body: bytes) -> Question:
    """Return the question in a JSON body.

    Raises:
        RefusedError: there is none.
    """
    try:
        question = msgspec.json.decode(body, type=Question)
    except msgspec.ValidationError as error:
        raise RefusedError(422, f"the question cannot be read: {error}") from None
    except UNREADABLE as error:
        raise RefusedError(400, f"the body is no JSON: {error}") from None
    if (question.token_ids is None) == (question.text is None):
        raise RefusedError(422, "give either token_ids or text")
    return question


def answer(
    source: Explained,
    question: Question,
    ranks: list[Rank],
    tokenizer: str | None,
    *,
    ask: Callable[[str, str, str], list[int]] = tokenize,
) -> dict[str, Any]:
    """Return for each rank how far the prompt matches, longest first. It blocks.

    Args:
        source: a client or a replica.
        question: what is asked.
        ranks: those of the question's partition.
        tokenizer: base URL of the engine that knows the model's tokens, if one is configured.
        ask: asks it.

    Raises:
        RefusedError: it cannot be answered.
    """
    if not ranks:
        where = f"model={question.model} routing_group={question.routing_group}"
        raise RefusedError(404, f"no ranks for {where}")
    tokens = question.token_ids
    if tokens is None:
        if tokenizer is None:
            raise RefusedError(
                409, "no tokenizer is configured for this model: give token ids instead of text"
            )
        try:
            tokens = ask(tokenizer, question.model, question.text or "")
        except TokenizerError as error:
            raise RefusedError(502, str(error)) from None
    try:
        why = source.explain(tokens, lora=question.lora, salt=question.salt, ranks=ranks)
    except (TokenError, ConfigurationError) as error:
        raise RefusedError(422, str(error)) from None
    except UnknownRankError as error:
        raise RefusedError(503, f"a rank was removed just now, ask again: {error}") from None
    explained = why.to_dict()
    return {
        "tokens": len(tokens),
        "ranks": [
            _plain(explained[str(found.match.rank)], found.match.rank)
            for found, _ in zip(why, range(MOST_RANKS), strict=False)
        ],
        "left_out": max(0, len(why) - MOST_RANKS),
    }


def _plain(explained: Mapping[str, Any], rank: Rank) -> dict[str, Any]:
    return {"worker": rank.worker, "dp_rank": rank.dp_rank, **explained}
