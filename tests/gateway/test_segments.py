"""Encoding by pieces between special tokens equals encoding as a whole, or is switched off."""

from __future__ import annotations

import logging
import random

import pytest

pytest.importorskip("tokenizers")

from hypothesis import given
from hypothesis import strategies as st

from kvindex.gateway import local
from kvindex.gateway.local import Segments
from tests.docs.pages import ROOT
from tests.gateway.models import tokenizer

pytestmark = pytest.mark.property

TOKENIZER = tokenizer()
SEGMENTS = Segments(tokenizer(), "test")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<mask>", "<|im", "\n", " ", "'s", "é")
TEXTS = st.lists(st.sampled_from(SPECIAL) | st.text(max_size=5)).map("".join)


def whole(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


@given(TEXTS)
def test_pieces_have_the_tokens_of_the_whole(text: str) -> None:
    for _ in range(2):
        assert list(SEGMENTS.encode(text)) == whole(text)
    assert SEGMENTS.is_on


def test_a_turn_of_a_chat_costs_its_new_messages() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    numbers = random.Random(1)
    encoding = Segments(tokenizer(), "test")
    chat = ""
    for turn in range(1, 20):
        begin = numbers.randrange(len(text) - 500)
        chat += f"<|im_start|>user\n{text[begin : begin + 400]}<|im_end|>\n"
        assert encoding.new_characters(chat) < 500
        assert list(encoding.encode(chat)) == whole(chat)
        assert encoding.statistics()["texts"] == turn
    assert encoding.new_characters(chat) == 0


def test_a_tokenizer_that_looks_where_a_text_begins_encodes_it_as_a_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "kvindex")
    encoding = Segments(tokenizer(prefix_space=True), "model")
    assert not encoding.is_on
    assert "model: its pieces between special tokens" in caplog.text
    counted = encoding.statistics()
    assert (counted["differing"], counted["bytes"]) == (1, 0)
    text = "<|im_start|>user\nOnce<|im_end|>"
    expected = tokenizer(prefix_space=True).encode(text, add_special_tokens=False).ids
    assert list(encoding.encode(text)) == expected
    assert encoding.new_characters(text) == len(text)


def test_a_tokenizer_without_special_tokens_encodes_as_a_whole() -> None:
    from tokenizers import Tokenizer, models

    encoding = Segments(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "test")
    assert (encoding.is_on, list(encoding.encode("a"))) == (False, [0])


def test_one_text_in_a_thousand_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_CHECK_EVERY", 10)
    encoding = Segments(tokenizer(), "test")
    before = encoding.statistics()["checked"]
    for number in range(30):
        encoding.encode(f"<|im_start|>{number}")
    assert encoding.statistics()["checked"] == before + 3


def test_the_least_used_pieces_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1600  # a piece of 30 characters takes some 600 bytes
    monkeypatch.setattr(local, "_MOST_REMEMBERED", most)
    encoding = Segments(tokenizer(), "test")
    for letter in "abcd":
        encoding.encode(f"<|im_end|>{letter * 30}")
        encoding.encode(f"<|im_end|>{'a' * 30}")  # is used again and again
    assert encoding.statistics()["bytes"] <= most
    assert encoding.new_characters("<|im_end|>" + "a" * 30) == 0
    assert encoding.new_characters("<|im_end|>" + "b" * 30) == 30
    assert list(encoding.encode("x" * 1000)) == whole("x" * 1000)
    assert encoding.statistics()["bytes"] <= most


def test_what_one_salt_has_sent_costs_another_as_much_as_if_nobody_had() -> None:
    encoding = Segments(tokenizer(), "test")
    text = "<|im_end|>" + "a" * 30
    encoding.encode(text, "mine")
    assert encoding.new_characters(text, "mine") == 0
    assert encoding.new_characters(text, "theirs") == encoding.new_characters(text) == 30
