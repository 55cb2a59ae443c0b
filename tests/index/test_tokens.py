"""Every form in which a prompt may come, and that no more of it is looked at than needed."""

from __future__ import annotations

import ctypes
from array import array
from collections import UserDict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvindex import AllBlocksCleared, EventBatch, Index
from kvindex.index.api import BaseIndex
from kvindex.index.reference.keys import KeyMaker
from kvindex.index.tokens import Prompt, pack_tokens
from kvindex.wire import text_token
from kvindex.wire.errors import TokenError
from tests.index.index_events import (
    A,
    B,
    apply,
    apply_together,
    both,
    counts_of,
    index_of,
    matched,
    prompt,
    removed,
    restored,
    stored,
)
from tests.index.index_queries import FORMS

pytestmark = pytest.mark.unit

TOKENS = prompt(4)


def encode(events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


class Tensor:
    """What torch gives: no sequence and no buffer, but it can make a list of itself."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def tolist(self) -> list[int]:
        return TOKENS


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_the_same_tokens_matches_alike(form: Callable[[list[int]], Any]) -> None:
    index = index_of(stored(0, 1, 2, token_ids=list(range(12))))
    assert index.match(form(list(range(16))))[A].blocks == 3


@pytest.mark.parametrize("empty", [[], (), range(0), *(array(code) for code in "iIlLqQ")], ids=repr)
def test_an_empty_prompt_matches_nothing(empty: Any) -> None:
    assert index_of(stored(0)).match(empty)[A].blocks == 0


@pytest.mark.parametrize(
    ("token", "same"), [(-1, 2**64 - 1), (2**63, -(2**63)), (True, 1), ("text", text_token("text"))]
)
def test_a_token_counts_modulo_64_bits(token: Any, same: int) -> None:
    assert pack_tokens([token]) == pack_tokens([same])


@pytest.mark.parametrize("signed", ["i", "q"])
def test_signed_and_unsigned_buffers_of_one_value_agree(signed: str) -> None:
    assert Prompt(array(signed, [7, 8])).packed(0, 2) == pack_tokens([7, 8])
    assert Prompt(array(signed.upper(), [7, 8])).packed(0, 2) == pack_tokens([7, 8])
    assert Prompt(array("q", [-7])).packed(0, 1) == Prompt([-7]).packed(0, 1)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        ("text", r"not str; pass tokenizer\.encode\(text\)"),
        ({"input_ids": [1]}, r"not dict; pass its \['input_ids'\]"),
        (UserDict(input_ids=[1]), r"not UserDict; pass its \['input_ids'\]"),
        (5, "int"),
        (None, "NoneType"),
        ({1, 2, 3, 4}, "set"),
        (iter([1]), "list_iterator"),
        (array("h", [1, 2]), r"are int16 \(buffer format 'h', 2 bytes .*astype\('int32'\)"),
        (array("d", [1.0]), r"are float64 \(buffer format 'd'.*astype\('int32'\)"),
        (memoryview(b"12345678"), "format 'B'"),
        *[
            (data, rf"plain {type(data).__name__}.*may be text.*memoryview\(data\)\.cast")
            for data in (b"You are a helpful assistant!", b"12345", b"", bytearray(8))
        ],
        (Tensor(1), r"not Tensor; pass token_ids\.tolist\(\)"),
        (Tensor(2), r"pass token_ids\[0\]\.tolist\(\) \(row 0\)"),
        (["You", " are"], r"not str \('You'\): no rank has stored text tokens"),
        ([1, 2, "x"], r"not str \('x'\)"),
        ([[1, 2, 3, 4]], r"not list .*row 0"),
        (memoryview(array("i", [1, 2, 3, 4]))[::2], "contiguous"),
        (memoryview(bytes(16)).cast("i", (2, 2)), r"shape \(2, 2\).*row 0"),
        ((ctypes.c_int32.__ctype_be__ * 4)(1, 2, 3, 4), "format '>"),
        ([1, 2, 3, 2**64], "64 bits"),
        ([1, 2, 3, 4.0], "float"),
        ([1, 2, None, 4], "NoneType"),
    ],
)
def test_what_is_no_prompt_is_refused_with_a_reason(refused: Any, why: str) -> None:
    with pytest.raises(TokenError, match=why):
        index_of(stored(0)).match(refused)


@pytest.mark.parametrize("item", [{"role": "user"}, "a whole prompt", [1, 2], 1.5, None])
@pytest.mark.parametrize("recomputed", [0, 1, 5])
@both
def test_one_item_that_is_no_token_is_refused_though_it_takes_no_part(
    kind: type[BaseIndex], recomputed: int, item: Any
) -> None:
    """A chat's first turn is one message, and routers leave out one token."""
    index = kind()
    apply(index, A, stored(0))
    for ask in (index.match, index.explain):
        with pytest.raises(TokenError, match="token ids must be ints"):
            ask([item], recomputed=recomputed)
    with pytest.raises(TokenError):
        index.match_many([[7], [item]], recomputed=recomputed)
    assert not index.match([7], recomputed=recomputed).best


@pytest.mark.parametrize("empty", [True, False])
def test_words_are_refused_even_where_nothing_is_held(empty: bool) -> None:
    index = Index() if empty else index_of(stored(1, parent=None))
    with pytest.raises(TokenError, match="text_token"):
        index.match([1, 2, 3, "word"])  # type: ignore[arg-type]  # mypy: list[object]


TEXT: list[Any] = ["sha256:ab", 2, 3, 4]


def test_text_is_a_token_once_a_rank_has_stored_such() -> None:
    index = index_of(stored(0))
    payload = encode([["BlockStored", [7], None, TEXT, 4, None]])
    index.apply(B, payload)
    assert counts_of(index, B)["stored_text"] == 1
    assert counts_of(index, A)["stored_text"] == 0
    assert index.match(TEXT)[B].blocks == 1
    index.apply(B, EventBatch(ts=0.0, events=[AllBlocksCleared()]))
    assert index.match(TEXT)[B].blocks == 0, "it still is an engine that tells text"
    index.remove(B)
    with pytest.raises(TokenError, match="not str"):
        index.match(TEXT)


def test_text_in_a_typed_event_and_after_a_restart_from_a_snapshot() -> None:
    index = index_of(stored(0, token_ids=TEXT))
    assert index.match(TEXT)[A].blocks == 1
    assert restored(index).match(TEXT)[A].blocks == 1


def test_text_can_always_be_asked_as_the_int_that_stands_for_it() -> None:
    question = [text_token("sha256:ab"), 2, 3, 4]
    assert index_of(stored(0)).match(question)[A].blocks == 0
    assert index_of(stored(0, token_ids=TEXT)).match(question)[A].blocks == 1


def test_large_tokens_that_stand_for_no_text_are_not_taken_for_it() -> None:
    index = index_of(stored(0, token_ids=[2**63, 2**62 - 1, 2**32, 1]))
    assert counts_of(index)["stored_text"] == 0


class CountingList(list[int]):
    """A list that counts how many of its items were taken."""

    taken = 0

    def __getitem__(self, item: Any) -> Any:
        items = super().__getitem__(item)
        self.taken += len(items) if isinstance(item, slice) else 1
        return items


def test_a_short_match_neither_packs_nor_hashes_a_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = index_of(stored(0, 1, 2))
    hashed = []
    child = KeyMaker.child

    def counting(self: KeyMaker, parent: bytes, content: bytes) -> bytes:
        hashed.append(content)
        return child(self, parent, content)

    monkeypatch.setattr(KeyMaker, "child", counting)
    long_prompt = CountingList(prompt(4_000))
    assert index.match(long_prompt)[A].blocks == 3
    assert len(hashed) <= 5, "three blocks, the one that ends the match, and the root"
    assert long_prompt.taken <= 1_024


def test_a_prompt_that_meets_nothing_or_a_hole_is_not_read_further() -> None:
    nothing, holes = index_of(stored(1, parent=None)), index_of(stored(*range(1_000)))
    apply_together(holes, A, removed(*range(1, 1_000, 2)))
    for index, blocks in ((nothing, 0), (holes, 1)):
        long_prompt = CountingList(prompt(4_000))
        assert index.match(long_prompt)[A].blocks == blocks
        assert long_prompt.taken <= 1_024


def test_long_prompts_are_packed_across_chunks() -> None:
    index = Index()
    index.apply(A, EventBatch(ts=0.0, events=[stored(*range(1_000))]))
    assert matched(index, prompt(1_000)) == 1_000
    assert index.match(array("i", prompt(1_000)))[A].blocks == 1_000
