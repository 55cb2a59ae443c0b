"""Events to bytes, exactly as a given engine version writes them.

The structs that msgspec encodes are made from the dialect's field lists. The engines encode with
msgspec too, so even the width of a map's header comes out the same: recorded payloads, decoded and
encoded again, give the recorded bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import isfinite
from operator import attrgetter
from typing import Any

import msgspec

from kvindex.wire import extra_keys, fields
from kvindex.wire.dialect import LATEST, Dialect
from kvindex.wire.errors import DecodeError, EncodeError
from kvindex.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch

_write = msgspec.msgpack.Encoder().encode
_ONLY_INT = frozenset({int})
_HASH_KINDS = {True: frozenset({int, bytes}), False: _ONLY_INT}  # by has_bytes_hashes


def encode_batch(batch: EventBatch, dialect: Dialect = LATEST) -> bytes:
    """Return the payload that an engine of this dialect would send for the batch.

    A field that the version does not have is left out, as that version would leave it out, even
    where blocks differ by it: before vLLM 0.14 no LoRA name, before 0.17 no extra_keys, and in
    every vLLM no `cache_salt` (vLLM has the salt in the first block's extra_keys). Likewise
    `batch.skipped` is not written.

    Args:
        batch: the events; block hashes are written as they are, with their sign.
        dialect: whose bytes to write.

    Raises:
        EncodeError: a value that the dialect cannot carry: raw block hashes where it has ints
            only, an int beyond 64 bits, a value of a wrong type, a timestamp that is not finite,
            an object that is no event; for bigrams, token ids without the token after each block.

    Complexity: O(bytes). Thread safety: pure.

    Examples:
        >>> encode_batch(EventBatch(1.0, [AllBlocksCleared()], 0)).hex()
        '93cb3ff00000000000009181a474797065b0416c6c426c6f636b73436c656172656400'
    """
    if not isinstance(batch.ts, int | float) or not isfinite(batch.ts):
        raise EncodeError(f"ts is {batch.ts!r}, not a finite number of seconds")
    shapes = _shapes(dialect)
    events = [_event(event, dialect, shapes) for event in batch.events]
    raw = [float(batch.ts), events]
    if dialect.has_dp_rank:
        raw.append(_dp_rank(batch.data_parallel_rank))
    try:
        return _write(raw)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise EncodeError(f"{dialect.name} cannot carry the batch: {error}") from error


def _dp_rank(value: Any) -> int | None:
    try:
        return fields.optional_small_int(value, "data_parallel_rank")
    except DecodeError as error:
        raise EncodeError(str(error)) from None


class _Shapes(msgspec.Struct, frozen=True):
    """The structs of one dialect, in the form that its engine encodes."""

    stored: Callable[..., Any]
    stored_fields: Callable[[Any], tuple[Any, ...]]
    removed: Callable[..., Any]
    removed_fields: Callable[[Any], tuple[Any, ...]]
    cleared: Any
    salted: Callable[..., Any] | None


@cache
def _shapes(dialect: Dialect) -> _Shapes:
    def shape(tag: str, *names: str) -> Callable[..., Any]:
        return msgspec.defstruct(
            tag,
            [(name, Any, None) if name in dialect.optional else (name, Any) for name in names],
            tag=True,
            array_like=dialect.form == "array",
            omit_defaults=True,
        )

    return _Shapes(
        shape("BlockStored", *dialect.stored),
        attrgetter(*dialect.stored),
        shape("BlockRemoved", *dialect.removed),
        _getter(dialect.removed),
        shape("AllBlocksCleared")(),
        shape("BlockStored", *dialect.stored, "metadata") if dialect.has_salt_metadata else None,
    )


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads these attributes as a tuple, also where there is only one."""
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda event: (get(event),)


def _event(event: object, dialect: Dialect, shapes: _Shapes) -> Any:
    if isinstance(event, AllBlocksCleared):
        return shapes.cleared
    try:
        if isinstance(event, BlockStored):
            return _stored(event, dialect, shapes)
        if isinstance(event, BlockRemoved):
            return _removed(event, dialect, shapes)
    except DecodeError as error:  # the checks are the reader's own: it must be able to read this
        raise EncodeError(f"{type(event).__name__}: {error}") from None
    raise EncodeError(f"{type(event).__name__} is not an event")


def _removed(event: BlockRemoved, dialect: Dialect, shapes: _Shapes) -> Any:
    _check_hashes(fields.block_hashes(event.block_hashes), dialect)
    _check_place(event)
    return shapes.removed(*shapes.removed_fields(event))


def _stored(event: BlockStored, dialect: Dialect, shapes: _Shapes) -> Any:
    _check_stored(event, dialect)
    values: Sequence[Any] = shapes.stored_fields(event)
    if dialect.bigrams:
        values = list(values)
        values[dialect.stored.index("token_ids")] = _bigrams(event)
    if shapes.salted is not None and event.cache_salt is not None:
        return shapes.salted(*values, {"cache_salt": event.cache_salt})
    return shapes.stored(*values)


def _check_stored(event: BlockStored, dialect: Dialect) -> None:
    _check_hashes(fields.block_hashes(event.block_hashes), dialect)
    parent = fields.optional_hash(event.parent_block_hash, "parent_block_hash")
    _check_hashes([] if parent is None else [parent], dialect)
    if type(event.token_ids) is not list or not _ONLY_INT.issuperset(map(type, event.token_ids)):
        raise EncodeError("token_ids is no list of ints")
    _check_place(event)
    fields.small_int(event.block_size, "block_size")
    fields.optional_int(event.lora_id, "lora_id")
    fields.optional_text(event.lora_name, "lora_name")
    fields.optional_text(event.cache_salt, "cache_salt")
    fields.tokens_per_block(event.lookahead_token_ids)
    extra_keys.extra_keys(event.extra_keys)


def _check_place(event: BlockStored | BlockRemoved) -> None:
    fields.optional_text(event.medium, "medium")
    fields.optional_small_int(event.group_idx, "group_idx")


def _check_hashes(block_hashes: list[BlockHash], dialect: Dialect) -> None:
    allowed = _HASH_KINDS[dialect.has_bytes_hashes]
    if allowed.issuperset(map(type, block_hashes)):
        return
    kinds = set(map(type, block_hashes))
    odd = ", ".join(sorted(kind.__name__ for kind in kinds - allowed))
    known = " or ".join(sorted(kind.__name__ for kind in allowed))
    raise EncodeError(f"a block hash is {odd}; {dialect.name} carries {known} only")


def _bigrams(event: BlockStored) -> list[tuple[int, int]]:
    """Each token with its successor; the last one's is the lookahead of the last block."""
    token_ids, lookahead = event.token_ids, event.lookahead_token_ids
    if not token_ids:
        return []
    if not lookahead or len(lookahead[-1]) != 1:
        raise EncodeError("bigrams need lookahead_token_ids with the one token after each block")
    pairs = list(zip(token_ids, [*token_ids[1:], lookahead[-1][0]], strict=True))
    ends = pairs[event.block_size - 1 :: event.block_size] if event.block_size else []
    if [[second] for _, second in ends] != lookahead:
        raise EncodeError(
            f"lookahead_token_ids of {len(lookahead)} blocks does not agree with "
            f"{len(token_ids)} token_ids in blocks of {event.block_size}"
        )
    return pairs
