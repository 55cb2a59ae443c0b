"""The parts of a block's identity besides its tokens, in one form for every engine.

vLLM sends `extra_keys`: for each block an array of mixed values (LoRA name, image digest with
offset, cache salt, …) or nil. TensorRT-LLM sends images in `mm_keys`; Dynamo's TensorRT-LLM wrapper
in `block_mm_infos`. All become, for each block, a hashable tuple or None.
"""

from __future__ import annotations

from math import isnan
from typing import Any, Final

from kvindex.wire.errors import DecodeError

MAX_DEPTH: Final = 4
"""Deepest accepted nesting of arrays within one block's keys; vLLM nests once."""

MAX_VALUES: Final = 4096
"""How many values one block's keys may hold, those in nested arrays included; vLLM sends a few."""

ExtraKeys = list[tuple[Any, ...] | None]

_ARRAYS: Final = (list, tuple)
_LEAVES: Final = frozenset({str, int, bytes, float, bool, type(None)})


def extra_keys(value: Any) -> ExtraKeys | None:
    """Return the keys of each block, arrays as tuples and an empty array as None."""
    if value is None:
        return None
    blocks = _array(value, "extra_keys")
    if blocks.count(None) == len(blocks):
        return blocks
    return [
        None if block is None else _tuple(_array(block, "extra_keys[]"), MAX_DEPTH) or None
        for block in blocks
    ]


def _tuple(items: list[Any], depth: int) -> tuple[Any, ...]:
    _check_count(len(items))
    kinds = set(map(type, items))
    if float in kinds and any(type(item) is float and isnan(item) for item in items):
        raise DecodeError("extra_keys holds NaN, which equals nothing")
    if kinds <= _LEAVES:
        return tuple(items)
    if depth == 1:
        raise DecodeError(f"extra_keys is nested deeper than {MAX_DEPTH}")
    made = tuple(
        _tuple(item, depth - 1) if type(item) in _ARRAYS else _leaf(item) for item in items
    )
    _check_count(_count(made))
    return made


def _count(items: tuple[Any, ...]) -> int:
    return sum(1 + _count(item) if type(item) is tuple else 1 for item in items)


def _check_count(count: int) -> None:
    if count > MAX_VALUES:
        raise DecodeError(f"the extra keys of one block hold more than {MAX_VALUES} values")


def _leaf(item: Any) -> Any:
    if type(item) in _LEAVES:
        return item
    raise DecodeError(f"extra_keys holds {type(item).__name__}")


def mm_keys(value: Any) -> ExtraKeys | None:
    """Return TensorRT-LLM's images of each block as (hash, start offset) pairs."""
    if value is None:
        return None
    return [
        None if block is None else tuple(map(_mm_key, _few(block, "mm_keys[]"))) or None
        for block in _array(value, "mm_keys")
    ]


def _mm_key(item: Any) -> tuple[Any, Any]:
    if type(item) is not dict:
        raise DecodeError(f"mm_keys holds {type(item).__name__}, not a map")
    digest, offset = item.get("hash"), item.get("start_offset")
    if type(digest) not in (str, int, bytes) or type(offset) is not int:
        raise DecodeError("mm_keys holds a map without a hash and an int start_offset")
    return digest, offset


def mm_infos(value: Any) -> ExtraKeys | None:
    """Return Dynamo's images of each block as (hash, start offset) pairs, offset None if unsaid."""
    if value is None:
        return None
    return [
        None if block is None else tuple(_mm_info(block)) or None
        for block in _array(value, "block_mm_infos")
    ]


def _mm_info(block: Any) -> list[tuple[Any, Any]]:
    if type(block) is not dict:
        raise DecodeError(f"block_mm_infos holds {type(block).__name__}, not a map")
    pairs: list[tuple[Any, Any]] = []
    for item in _few(block.get("mm_objects"), "mm_objects"):
        digest = item.get("mm_hash") if type(item) is dict else None
        if type(digest) not in (int, str, bytes):
            raise DecodeError("mm_objects holds something without an mm_hash")
        spans = _few(item.get("offsets", []), "offsets")
        pairs.extend((digest, _start(span)) for span in spans)
        if not spans:
            pairs.append((digest, None))
    return pairs


def _start(span: Any) -> int:
    if type(span) is list and span and type(span[0]) is int:
        return span[0]
    raise DecodeError("offsets holds something that is not a [start, end] pair")


def join(first: ExtraKeys | None, second: ExtraKeys | None) -> ExtraKeys | None:
    """Return the keys of each block from both lists, those of the first before."""
    if first is None or second is None:
        return second if first is None else first
    if len(first) != len(second):
        raise DecodeError(f"extra_keys is of {len(first)} blocks, images are of {len(second)}")
    return [(a or ()) + (b or ()) or None for a, b in zip(first, second, strict=True)]


def _few(value: Any, name: str) -> list[Any]:
    items = _array(value, name)
    _check_count(len(items))
    return items


def _array(value: Any, name: str) -> list[Any]:
    if type(value) in _ARRAYS:
        return value  # type: ignore[no-any-return]
    raise DecodeError(f"{name} is {type(value).__name__}, not an array")
