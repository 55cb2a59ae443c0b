"""Oddities of engines, as facts about values."""

from __future__ import annotations

import pytest

from kvindex.wire import text_token
from kvindex.wire.quirks import (
    EMPTY_TUPLE_HASH,
    content_hash,
    fold_hash,
    fold_medium,
    is_content_hash,
    is_root_parent,
)
from tests.children import run_code

pytestmark = pytest.mark.unit


def test_root_has_three_names() -> None:
    assert hash(()) == EMPTY_TUPLE_HASH
    assert [is_root_parent(parent) for parent in (None, 0, hash(()))] == [True] * 3


@pytest.mark.parametrize("parent", [1, -1, 2**63, b"", b"\x00", hash(()) + 1])
def test_other_parents_are_blocks(parent: int | bytes) -> None:
    assert not is_root_parent(parent)


def test_content_hash_is_the_tuple_hash_without_sign() -> None:
    for tokens in ([], [1, 2, 3], list(range(64)), [2**61, -1]):
        assert content_hash(tokens) == hash(tuple(tokens)) % 2**64
        assert is_content_hash(hash(tuple(tokens)), tokens)
        assert is_content_hash(hash(tuple(tokens)) % 2**64, tokens)
        assert not is_content_hash(hash(tuple(tokens)) ^ 1, tokens)
        assert not is_content_hash(b"12345678", tokens)


def test_content_hash_of_a_page_of_a_real_engine() -> None:
    # The first page that SGLang 0.4.10 announced in tests/data/captures.
    page = [12572, 25678, 28080, 26885, 31281, 29038, 30751, 24264]
    page += [16793, 26513, 4235, 16996, 25473, 18394, 6733, 13962]
    assert is_content_hash(FIRST_PAGE, page)


FIRST_PAGE = int.from_bytes(bytes.fromhex("9103d9f5f7278f62"), "big", signed=True)


def test_hashes_fold_modulo_two_to_the_64th() -> None:
    assert fold_hash(-1) == fold_hash(2**64 - 1) == 2**64 - 1
    assert fold_hash(-(2**63)) == fold_hash(2**63) == 2**63
    assert fold_hash(5) == 5
    assert fold_hash(b"\xff") == b"\xff"


@pytest.mark.parametrize(
    ("medium", "folded"),
    [
        *((None, "GPU"), ("gpu", "GPU"), ("cpu", "CPU"), ("Cpu_Pinned", "CPU_PINNED")),
        *((name, name) for name in ("DISK", "EXTERNAL", "STORAGE", "FS", "OBJ")),
        *(("cuda:0", "cuda:0"), ("tape", "tape"), ("", "")),
    ],
)
def test_media_have_one_spelling(medium: str | None, folded: str) -> None:
    assert fold_medium(medium) == folded


def test_text_tokens_meet_no_vocabulary_and_differ() -> None:
    values = {text_token(f"digest-{n}") for n in range(1000)}
    assert len(values) == 1000
    assert all(2**62 <= value < 2**63 for value in values)


def test_text_tokens_are_the_same_in_every_process() -> None:
    code = "from kvindex.wire import text_token; print(text_token('sha256:ab'))"
    assert run_code(code) == (0, f"{text_token('sha256:ab')}\n", "")
