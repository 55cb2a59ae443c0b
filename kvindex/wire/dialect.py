"""The wire of each engine version, as data, and events written as that version writes them.

One `Dialect` stands for a change of the wire: "vllm-0.20.0" holds from that release until the next
one named. Reading needs none of this (`kvindex.wire.decode` reads all).

The structs that msgspec encodes are made from the dialect's field lists. The engines encode with
msgspec too, so even the width of a map's header comes out the same: recorded payloads, decoded and
encoded again, give the recorded bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import isfinite
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from kvindex.wire.decode import (
    block_hashes,
    extra_keys,
    optional_hash,
    optional_int,
    optional_small_int,
    optional_text,
    small_int,
    tokens_per_block,
)
from kvindex.wire.errors import ConfigurationError, DecodeError, EncodeError
from kvindex.wire.events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, EventBatch


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine version writes event batches and replay replies.

    Attributes:
        name: engine and the first release that writes so, e.g. "vllm-0.20.0"; the suffix "-eagle"
            for SGLang under EAGLE speculative decoding.
        engine: whose structs these are.
        form: "array" (fields by position, all of them) or "map" (fields by name).
        stored: fields of BlockStored after the tag, in wire order.
        removed: fields of BlockRemoved after the tag, in wire order.
        optional: those of the fields that the map form leaves out when they are None.
        has_dp_rank: the batch has a third element.
        has_bytes_hashes: block hashes may be raw digests.
        has_salt_metadata: a salted store has `{"cache_salt": …}` as a further element.
        replay_topic: replies to a replay request, and its end, carry a topic frame.
        bigrams: token_ids are pairs of a token and its successor.
    """

    name: str
    engine: Literal["vllm", "sglang"]
    form: Literal["array", "map"] = "array"
    stored: tuple[str, ...]
    removed: tuple[str, ...] = ("block_hashes",)
    optional: frozenset[str] = frozenset()
    has_dp_rank: bool = True
    has_bytes_hashes: bool = False
    has_salt_metadata: bool = False
    replay_topic: bool = False
    bigrams: bool = False

    def __repr__(self) -> str:  # short: it is a default in signatures that `help` shows
        return f"<Dialect {self.name}>"


_BASE: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")


def _since(
    previous: Dialect, name: str, *fields: str, removed: str = "", **changes: object
) -> Dialect:
    """The dialect that follows another: with further fields and other changes."""
    return msgspec.structs.replace(
        previous,
        name=name,
        stored=previous.stored + fields,
        removed=previous.removed + ((removed,) if removed else ()),
        **changes,
    )


def _vllm() -> list[Dialect]:
    first = Dialect(name="vllm-0.9.0", engine="vllm", stored=_BASE, has_dp_rank=False)
    kinds = ("kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    later = ("locality", "ownership", "session_id", "lookahead_token_ids")
    optional = frozenset({"extra_keys", "group_idx", *kinds, *later})
    v0_9_1 = _since(first, "vllm-0.9.1", has_dp_rank=True)
    v0_10_2 = _since(v0_9_1, "vllm-0.10.2", "medium", removed="medium", has_bytes_hashes=True)
    v0_14 = _since(v0_10_2, "vllm-0.14.0", "lora_name")
    v0_17 = _since(v0_14, "vllm-0.17.0", "extra_keys")
    v0_20 = _since(v0_17, "vllm-0.20.0", "group_idx", removed="group_idx")
    v0_22 = _since(v0_20, "vllm-0.22.0", *kinds)
    v0_24 = _since(v0_22, "vllm-0.24.0", form="map", optional=optional)
    v0_26 = _since(v0_24, "vllm-0.26.0", "locality", removed="locality", replay_topic=True)
    v0_29 = _since(v0_26, "vllm-0.29.0", "ownership", removed="ownership")
    v0_30 = _since(v0_29, "vllm-0.30.0", "session_id")
    v0_33 = _since(v0_30, "vllm-0.33.0", "lookahead_token_ids")
    # Oldest first: a release that is not named writes as the one before it.
    early = [first, v0_9_1, v0_10_2, v0_14, v0_17, v0_20, v0_22]
    return [*early, v0_24, v0_26, v0_29, v0_30, v0_33]


def _sglang() -> list[Dialect]:
    first = Dialect(name="sglang-0.4.6", engine="sglang", stored=_BASE, has_dp_rank=False)
    optional = frozenset({"medium", "cache_salt", "session_id", "lora_name"})
    v0_4_8 = _since(first, "sglang-0.4.8", has_dp_rank=True)
    v0_5_9 = _since(v0_4_8, "sglang-0.5.9", "medium", removed="medium")
    v0_5_18 = _since(v0_5_9, "sglang-0.5.18", has_salt_metadata=True)
    # In maps the salt has a field of its own, so they go on from before the metadata.
    as_map = _since(v0_5_9, "sglang-0.5.20", form="map", optional=optional)
    v0_5_20 = _since(as_map, "sglang-0.5.20", "cache_salt", "session_id")
    v0_5_22 = _since(v0_5_20, "sglang-0.5.22", "lora_name", replay_topic=True)
    v0_5_23 = _since(v0_5_22, "sglang-0.5.23")
    plain = [first, v0_4_8, v0_5_9, v0_5_18, v0_5_20, v0_5_22, v0_5_23]
    return plain + [
        _since(version, f"{version.name}-eagle", bigrams=True)
        for version in (v0_5_9, v0_5_18, v0_5_20, v0_5_22, v0_5_23)
    ]


DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {known.name: known for known in (*_vllm(), *_sglang())}
)
"""Every dialect by name, oldest first for each engine."""

LATEST: Final = DIALECTS["vllm-0.33.0"]
"""The dialect that kvindex publishes by default."""


def dialect(name: str) -> Dialect:
    """Return the dialect of this name.

    Raises:
        ConfigurationError: no dialect has the name; the message lists those that exist.

    Examples:
        >>> dialect("vllm-0.20.0").form
        'array'
    """
    try:
        return DIALECTS[name]
    except KeyError:
        known = ", ".join(DIALECTS)
        raise ConfigurationError(f"no dialect is named {name!r}; known: {known}") from None


# Writing ----------------------------------------------------------------------------------------

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
    # A whole number of seconds, too, as engines write it: msgpack has other bytes for an int.
    raw: list[Any] = [float(batch.ts), events]
    try:
        if dialect.has_dp_rank:
            raw.append(optional_small_int(batch.data_parallel_rank, "data_parallel_rank"))
    except DecodeError as error:
        raise EncodeError(str(error)) from None
    try:
        return _write(raw)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise EncodeError(f"{dialect.name} cannot carry the batch: {error}") from error


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

    def getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
        get = attrgetter(*names)
        # An attrgetter of one name returns the value, not a tuple of it: early BlockRemoved.
        return get if len(names) > 1 else lambda event: (get(event),)

    return _Shapes(
        shape("BlockStored", *dialect.stored),
        getter(dialect.stored),
        shape("BlockRemoved", *dialect.removed),
        getter(dialect.removed),
        shape("AllBlocksCleared")(),
        shape("BlockStored", *dialect.stored, "metadata") if dialect.has_salt_metadata else None,
    )


def _event(event: object, dialect: Dialect, shapes: _Shapes) -> Any:
    if isinstance(event, AllBlocksCleared):
        return shapes.cleared
    try:
        if isinstance(event, BlockStored):
            return _stored(event, dialect, shapes)
        if isinstance(event, BlockRemoved):
            _check_hashes(block_hashes(event.block_hashes), dialect)
            _check_place(event)
            return shapes.removed(*shapes.removed_fields(event))
    # The checks are the reader's own: what is written must be readable.
    except DecodeError as error:
        raise EncodeError(f"{type(event).__name__}: {error}") from None
    raise EncodeError(f"{type(event).__name__} is not an event")


def _stored(event: BlockStored, dialect: Dialect, shapes: _Shapes) -> Any:
    _check_hashes(block_hashes(event.block_hashes), dialect)
    parent = optional_hash(event.parent_block_hash, "parent_block_hash")
    _check_hashes([] if parent is None else [parent], dialect)
    if type(event.token_ids) is not list or not _ONLY_INT.issuperset(map(type, event.token_ids)):
        raise EncodeError("token_ids is no list of ints")
    _check_place(event)
    small_int(event.block_size, "block_size")
    optional_int(event.lora_id, "lora_id")
    optional_text(event.lora_name, "lora_name")
    optional_text(event.cache_salt, "cache_salt")
    tokens_per_block(event.lookahead_token_ids)
    extra_keys(event.extra_keys)
    values: Sequence[Any] = shapes.stored_fields(event)
    if dialect.bigrams:
        values = list(values)
        values[dialect.stored.index("token_ids")] = _bigrams(event)
    if shapes.salted is not None and event.cache_salt is not None:
        return shapes.salted(*values, {"cache_salt": event.cache_salt})
    return shapes.stored(*values)


def _check_place(event: BlockStored | BlockRemoved) -> None:
    optional_text(event.medium, "medium")
    optional_small_int(event.group_idx, "group_idx")


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
    # The last token of an event has no successor among its own.
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
