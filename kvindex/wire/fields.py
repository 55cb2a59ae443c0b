"""Checks of single fields of an event, as msgpack gave them.

Each function returns the value in its one normal form or raises DecodeError. What decides a
block's identity or place must be right; what only informs becomes None when it is odd, so that a
label of no consequence never costs a batch.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvindex.wire.errors import DecodeError
from kvindex.wire.events import BlockHash
from kvindex.wire.quirks import text_token

MAX_HASH_BYTES: Final = 64
"""Longest accepted block hash: engines send 16 or 32 bytes."""

_MAX_SMALL: Final = 2**31 - 1
_MAX_TEXT = 1024

Lookahead = list[list[int]]
_INTS = list[int]


def block_hash(value: Any, name: str) -> BlockHash:
    """Return one block hash: an int (msgpack has 64 bits of it) or 1 to 64 bytes."""
    kind = type(value)
    if kind is int:
        return value  # type: ignore[no-any-return]
    if kind is bytes:
        if 1 <= len(value) <= MAX_HASH_BYTES:
            return value  # type: ignore[no-any-return]
        raise DecodeError(f"{name} has {len(value)} bytes, not 1 to {MAX_HASH_BYTES}")
    raise DecodeError(f"{name} is {kind.__name__}, not int or bytes")


def optional_hash(value: Any, name: str) -> BlockHash | None:
    """Return one block hash or None."""
    return None if value is None else block_hash(value, name)


def block_hashes(value: Any) -> list[BlockHash]:
    """Return the block hashes of an event, each an int or bytes."""
    try:
        # A conversion is the fastest check of a list; it never changes an int.
        hashes: list[BlockHash] = msgspec.convert(value, _INTS)
    except msgspec.ValidationError:
        if type(value) is not list:
            raise DecodeError(f"block_hashes is {type(value).__name__}, not an array") from None
        return [block_hash(item, "block_hashes[]") for item in value]
    return hashes


def copy_counts(value: Any, blocks: int) -> list[int] | None:
    """Return how many copies of each of so many blocks are left, or None."""
    if value is None:
        return None
    if type(value) is not list:
        raise DecodeError(f"remaining_copy_counts is {type(value).__name__}, not an array")
    if len(value) != blocks:
        raise DecodeError(f"remaining_copy_counts has {len(value)} counts for {blocks} blocks")
    return [small_int(count, "remaining_copy_counts[]") for count in value]


def optional_text(value: Any, name: str) -> str | None:
    """Return a str of at most 1,024 characters, or None."""
    if value is None:
        return None
    if type(value) is str:
        if len(value) > _MAX_TEXT:
            raise DecodeError(f"{name} has {len(value)} characters, over {_MAX_TEXT}")
        return value
    raise DecodeError(f"{name} is {type(value).__name__}, not str")


def optional_int(value: Any, name: str) -> int | None:
    """Return an int or None."""
    if value is None or type(value) is int:
        return value
    raise DecodeError(f"{name} is {type(value).__name__}, not int")


def small_int(value: Any, name: str) -> int:
    """Return an int from 0 to 2**31 - 1."""
    if type(value) is not int:
        raise DecodeError(f"{name} is {type(value).__name__}, not int")
    if 0 <= value <= _MAX_SMALL:
        return value
    raise DecodeError(f"{name} is {value}, not 0 to {_MAX_SMALL}")


def optional_small_int(value: Any, name: str) -> int | None:
    """Return an int from 0 to 2**31 - 1, or None."""
    return None if value is None else small_int(value, name)


def informational_text(value: Any) -> str | None:
    """Return a str of at most 1,024 characters, or None for anything else."""
    return value if type(value) is str and len(value) <= _MAX_TEXT else None


def informational_int(value: Any) -> int | None:
    """Return an int of 64 bits with a sign, or None for anything else."""
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def tokens(value: Any) -> tuple[list[int] | None, int]:
    """Return the token ids, text among them as ints, and how many are text; None if bigrams."""
    try:
        return msgspec.convert(value, _INTS), 0
    except msgspec.ValidationError:
        if type(value) is not list:
            raise DecodeError(f"token_ids is {type(value).__name__}, not an array") from None
    kinds = set(map(type, value))
    if kinds == {list}:
        return None, 0
    if kinds <= {int, str}:
        texts = [token for token in value if type(token) is str]
        ints = {text: text_token(text) for text in set(texts)}
        return [ints[token] if type(token) is str else token for token in value], len(texts)
    odd = ", ".join(sorted(kind.__name__ for kind in kinds - {int, str}))
    raise DecodeError(f"token_ids holds {odd}, not int")


def split_bigrams(
    pairs: list[Any], n_blocks: int, block_size: int
) -> tuple[list[int], Lookahead | None]:
    """Return the first token of each bigram, and the token after each block.

    The second value is None when the pairs are not whole blocks: then it is unknown which pair
    ends a block.
    """
    if set(map(len, pairs)) != {2}:
        raise DecodeError("token_ids holds arrays that are not pairs")
    try:
        firsts = msgspec.convert([pair[0] for pair in pairs], _INTS)
        seconds = msgspec.convert([pair[1] for pair in pairs], _INTS)
    except msgspec.ValidationError:
        raise DecodeError("token_ids holds pairs that are not of ints") from None
    if seconds[:-1] != firsts[1:]:
        raise DecodeError("token_ids holds pairs that do not continue each other")
    if block_size == 0 or len(pairs) != n_blocks * block_size:
        return firsts, None
    return firsts, [[token] for token in seconds[block_size - 1 :: block_size]]


def tokens_per_block(value: Any) -> Lookahead | None:
    """Return the lookahead tokens of each block, or None."""
    if value is None:
        return None
    try:
        return msgspec.convert(value, Lookahead)
    except msgspec.ValidationError as error:
        raise DecodeError(f"lookahead_token_ids: {error}") from None
