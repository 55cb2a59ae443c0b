"""Bytes of any engine version to events: one reader, no configuration.

A payload is the msgpack array `[ts, events, dp_rank]` in every released version of every engine; a
map with the same by their names is read as well. Each event is an array with its tag first (vLLM
0.9-0.23, SGLang 0.4.6-0.5.19) or a map with its tag under "type" (later ones, TensorRT-LLM). Where
versions disagree about a position, the value's type decides. The rules for what is odd:

- New things are ignored: unknown fields, further elements, unknown tags (`EventBatch.skipped`).
- A missing end has its defaults.
- Too many extra keys of a block (`MAX_VALUES`) refuse the whole batch.
- A fault in a known event refuses the whole batch: half a batch could leave blocks
  in the index that the engine has removed.

A malformed or rare form costs more to read than to send: it is read only in a payload of up to
`MAX_RARE_BYTES`. Rare are text among the tokens, images, media that are not ASCII and extension
types. The native reader adds what no engine writes: names that stand twice in one map (the last one
counts), map keys that are no text, and nesting of more than 32 arrays.

Normal forms: bigrams (SGLang under EAGLE) become `token_ids` plus `lookahead_token_ids`; text among
the tokens becomes ints (`kvindex.wire.quirks.text_token`); images of TensorRT-LLM become
`extra_keys`; a salt beside the event becomes `cache_salt`. Block hashes keep sign and form.
"""

from __future__ import annotations

import gc
from math import isfinite, isnan
from typing import Any, Final, TypeAlias

import msgspec

from kvindex.wire.errors import DecodeError
from kvindex.wire.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
)
from kvindex.wire.quirks import text_token

MAX_RARE_BYTES: Final = 1 << 20
"""How long a payload may be that is not of the common forms."""

MAX_BLOCKS: Final = 1 << 17
"""How many blocks the events of one batch of a stream may name in all: with 16 tokens each, two
million tokens. To apply more would keep other ranks waiting.

A message of 8 MiB, the longest by default, has room for hardly more of such blocks.
"""

MAX_TEXT_TOKENS: Final = 32_768
"""How many tokens of one batch may be text."""

MAX_SKIPPED: Final = 256
"""How many unknown tags of one batch are reported; "(more)" stands for all further ones."""

MAX_TAG: Final = 64
"""How many characters of an unknown tag are reported."""

MAX_HASH_BYTES: Final = 64
"""Longest accepted block hash: engines send 16 or 32 bytes."""

MAX_DEPTH: Final = 4
"""Deepest accepted nesting of arrays within one block's keys; vLLM nests once."""

MAX_VALUES: Final = 4096
"""How many values one block's keys may hold, those in nested arrays included; vLLM sends a few."""

Lookahead: TypeAlias = list[list[int]]
ExtraKeys: TypeAlias = list[tuple[Any, ...] | None]

_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")

_MAX_SMALL: Final = 2**31 - 1
_MAX_TEXT: Final = 1024
_INTS = list[int]
_ARRAYS: Final = (list, tuple)
_LEAVES: Final = frozenset({str, int, bytes, float, bool, type(None)})
_LONG = 1 << 16  # bytes of a payload that may hold very many values
_MM_INFOS: Final = _STORED_FIELDS.index("group_idx")


def _no_extension(code: int, data: memoryview) -> None:
    raise DecodeError("it holds an extension type")


_read = msgspec.msgpack.Decoder().decode
_read_long = msgspec.msgpack.Decoder(ext_hook=_no_extension).decode
_CLEARED: Final = AllBlocksCleared()


def decode_batch(payload: bytes | bytearray | memoryview) -> EventBatch:
    r"""Return the events in a payload, whatever engine version wrote it.

    Args:
        payload: the last frame of a live or replay message.

    Raises:
        DecodeError: the bytes are not msgpack, not an event batch, or hold an event that is known
            but malformed. Nothing else is raised, whatever the bytes are.

    Complexity: O(bytes). Thread safety: pure.

    Examples:
        >>> payload = b"\x92\x01\x91\x93\xacBlockRemoved\x91\x07\xa3GPU"
        >>> [event.block_hashes for event in decode_batch(payload).events]
        [[7]]
    """
    size = _size(payload)
    try:
        return _batch(_unpack(payload, size), _Rare(size))
    except DecodeError as error:
        if size > MAX_RARE_BYTES:
            raise _too_long(size) from None
        raise DecodeError(f"not an event batch ({size} bytes): {error}", size=size) from None


def decode_uncommon(payload: bytes | bytearray | memoryview) -> EventBatch:
    """As `decode_batch`, for a payload that is known to be malformed or rare."""
    size = _size(payload)
    # Without a look: such a payload costs more to read than to send.
    if size > MAX_RARE_BYTES:
        raise _too_long(size)
    return decode_batch(payload)


def check_blocks(blocks: int, size: int) -> None:
    """Refuse a batch of a stream that names more than `MAX_BLOCKS`: raise DecodeError."""
    if blocks > MAX_BLOCKS:
        raise DecodeError(
            f"a batch ({size} bytes) whose events name {blocks} blocks, over {MAX_BLOCKS}",
            size=size,
        )


def decode_bounded(payload: bytes) -> EventBatch:
    """As `decode_batch`, for a batch of a stream: it may not name more than `MAX_BLOCKS`."""
    return bounded(decode_batch(payload), len(payload))


def bounded(batch: EventBatch, size: int) -> EventBatch:
    """Return a batch that does not name more than `MAX_BLOCKS`; raises DecodeError."""
    removed_or_stored = (e for e in batch.events if not isinstance(e, AllBlocksCleared))
    check_blocks(sum(len(event.block_hashes) for event in removed_or_stored), size)
    return batch


def _too_long(size: int) -> DecodeError:
    return DecodeError(
        f"not an event batch ({size} bytes): it is malformed or of a rare form, and such payloads "
        f"are read up to {MAX_RARE_BYTES} bytes only",
        size=size,
    )


class _Rare:
    """The parts of a payload that are of rare forms."""

    __slots__ = ("_allowed", "_texts")

    def __init__(self, size: int) -> None:
        self._allowed = size <= MAX_RARE_BYTES
        self._texts = 0

    def note(self, texts: int = 0) -> None:
        """Refuse a rare form, or tokens that are text, where there is too much of it."""
        self._texts += texts
        if not self._allowed:
            raise DecodeError("it is of a rare form")
        if self._texts > MAX_TEXT_TOKENS:
            raise DecodeError(f"more than {MAX_TEXT_TOKENS} tokens are text")

    def note_medium(self, medium: str | None) -> None:
        if medium is not None and not medium.isascii():
            self.note()


def _unpack(payload: bytes | bytearray | memoryview, size: int) -> Any:
    # Millions of small arrays would have the collector look at all of them again and again.
    pauses = size > _LONG and gc.isenabled()
    try:
        if pauses:
            gc.disable()
        return (_read if size <= MAX_RARE_BYTES else _read_long)(payload)
    except Exception as error:  # msgspec raises six kinds, down to RecursionError and MemoryError
        raise DecodeError(f"{type(error).__name__}: {error}") from None
    finally:
        if pauses:
            gc.enable()


def _size(payload: bytes | bytearray | memoryview) -> int:
    try:
        return memoryview(payload).nbytes
    # What is no buffer is refused where it is read, by an error that says so.
    except TypeError:
        return 0


def _batch(raw: Any, rare: _Rare) -> EventBatch:
    # No release writes a map yet. SGLang has a name of its own for the rank.
    if type(raw) is dict:
        rank = raw.get("data_parallel_rank", raw.get("attn_dp_rank"))
        raw = [_required(raw, "ts"), _required(raw, "events"), rank]
    elif type(raw) is not list or len(raw) < 2:
        raise DecodeError("it is no array, and no map, of ts, events and dp_rank")
    ts, raw_events = raw[0], raw[1]
    if type(raw_events) is not list:
        raise DecodeError(f"events is {type(raw_events).__name__}, not an array")
    dp_rank = raw[2] if len(raw) > 2 else None
    events: list[Event] = []
    skipped: list[str] = []
    for position, raw_event in enumerate(raw_events):
        try:
            event = _event(raw_event, rare)
        except DecodeError as error:
            raise DecodeError(f"event {position} of {len(raw_events)}: {error}") from None
        if isinstance(event, str):
            skipped.append(event)
        else:
            events.append(event)
    dp_rank = optional_small_int(dp_rank, "dp_rank")
    # Engines send a few kinds; a publisher that invents ever new ones must not fill statistics.
    skipped[MAX_SKIPPED:] = ["(more)"] * (len(skipped) > MAX_SKIPPED)
    if type(ts) not in (float, int) or not isfinite(ts):
        raise DecodeError(f"ts is not a finite number but {type(ts).__name__}")
    return EventBatch(float(ts), events, dp_rank, tuple(skipped))


def _event(raw: Any, rare: _Rare) -> Event | str:
    """One event, or its tag if that is unknown."""
    if type(raw) is list:
        tag = raw[0] if raw else None
    elif type(raw) is dict:
        tag = raw.get("type")
    else:
        raise DecodeError(f"{type(raw).__name__}, not an array or map")
    # Without a tag it cannot be skipped: it may be an event that removes blocks.
    if type(tag) is not str:
        raise DecodeError(f"its tag is {type(tag).__name__}, not str")
    if tag == "BlockStored":
        return _stored(_named_stored(raw) if type(raw) is list else raw, rare)
    if tag == "BlockRemoved":
        if type(raw) is list:
            raw = dict(zip(_REMOVED_FIELDS, raw[1:], strict=False))
        return _removed(raw, rare)
    return _CLEARED if tag == "AllBlocksCleared" else tag[:MAX_TAG]


def _named_stored(raw: list[Any]) -> dict[str, Any]:
    """The positional fields of a BlockStored by name; two positions have two meanings."""
    values = raw[1:]
    # Dynamo's TensorRT-LLM wrapper writes images where vLLM writes the group, and the group after
    # them. Taken out, the rest stands as vLLM's does.
    images = None
    if len(values) > _MM_INFOS:
        here = values[_MM_INFOS]
        after = values[_MM_INFOS + 1] if len(values) > _MM_INFOS + 1 else None
        if type(here) is list or (here is None and type(after) is int):
            images = values.pop(_MM_INFOS)
    fields = dict(zip(_STORED_FIELDS, values, strict=False))
    if images is not None:
        fields["block_mm_infos"] = images
    metadata = fields.get("lora_name")
    if type(metadata) is dict:  # SGLang 0.5.18-0.5.19
        fields["lora_name"] = None
        fields["cache_salt"] = metadata.get("cache_salt")
    return fields


def _required(raw: dict[str, Any], name: str) -> Any:
    try:
        return raw[name]
    except KeyError:
        raise DecodeError(f"{name} is missing") from None


def _stored(raw: dict[str, Any], rare: _Rare) -> BlockStored:
    get = raw.get
    hashes = block_hashes(_required(raw, "block_hashes"))
    block_size = small_int(_required(raw, "block_size"), "block_size")
    raw_tokens = _required(raw, "token_ids")
    lookahead = tokens_per_block(get("lookahead_token_ids"))
    token_ids, texts = tokens(raw_tokens)
    if texts:
        rare.note(texts)
    if token_ids is None:
        token_ids, lookahead = split_bigrams(raw_tokens, len(hashes), block_size)
    if get("mm_keys") is not None or get("block_mm_infos") is not None:
        rare.note()
    medium = optional_text(get("medium"), "medium")
    rare.note_medium(medium)
    # TensorRT-LLM sends images beside its extra keys, and Dynamo's wrapper of it elsewhere again.
    keys = join(extra_keys(get("extra_keys")), mm_keys(get("mm_keys")))
    keys = join(keys, mm_infos(get("block_mm_infos")))
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=optional_hash(get("parent_block_hash"), "parent_block_hash"),
        token_ids=token_ids,
        block_size=block_size,
        lora_id=optional_int(get("lora_id"), "lora_id"),
        medium=medium,
        lora_name=optional_text(get("lora_name"), "lora_name"),
        extra_keys=keys,
        group_idx=optional_small_int(get("group_idx"), "group_idx"),
        kv_cache_spec_kind=informational_text(get("kv_cache_spec_kind")),
        kv_cache_spec_sliding_window=informational_int(get("kv_cache_spec_sliding_window")),
        locality=informational_text(get("locality")),
        ownership=informational_text(get("ownership")),
        session_id=informational_text(get("session_id")),
        lookahead_token_ids=lookahead,
        cache_salt=optional_text(get("cache_salt"), "cache_salt"),
    )


def _removed(raw: dict[str, Any], rare: _Rare) -> BlockRemoved:
    get = raw.get
    medium = optional_text(get("medium"), "medium")
    rare.note_medium(medium)
    hashes = block_hashes(_required(raw, "block_hashes"))
    return BlockRemoved(
        block_hashes=hashes,
        medium=medium,
        group_idx=optional_small_int(get("group_idx"), "group_idx"),
        locality=informational_text(get("locality")),
        ownership=informational_text(get("ownership")),
        remaining_copy_counts=copy_counts(get("remaining_copy_counts"), len(hashes)),
    )


# Single fields ----------------------------------------------------------------------------------

# Each function returns a value of msgpack in its one normal form, or raises DecodeError. What
# decides a block's identity or place must be right; what only informs becomes None when it is odd,
# so that a label of no consequence never costs a batch.


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
    # With another number it is unknown which count is whose, and a block could stay for ever.
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
    if kinds == {list}:  # SGLang under EAGLE
        return None, 0
    if kinds <= {int, str}:
        # Each text is hashed once: a digest may stand there many times.
        texts = [token for token in value if type(token) is str]
        ints = {text: text_token(text) for text in set(texts)}
        return [ints[token] if type(token) is str else token for token in value], len(texts)
    odd = ", ".join(sorted(kind.__name__ for kind in kinds - {int, str}))
    raise DecodeError(f"token_ids holds {odd}, not int")


def split_bigrams(
    pairs: list[Any], n_blocks: int, block_size: int
) -> tuple[list[int], Lookahead | None]:
    """Return the first token of each bigram, and the token after each block, if that is known."""
    if set(map(len, pairs)) != {2}:
        raise DecodeError("token_ids holds arrays that are not pairs")
    try:
        firsts = msgspec.convert([pair[0] for pair in pairs], _INTS)
        seconds = msgspec.convert([pair[1] for pair in pairs], _INTS)
    except msgspec.ValidationError:
        raise DecodeError("token_ids holds pairs that are not of ints") from None
    if seconds[:-1] != firsts[1:]:
        raise DecodeError("token_ids holds pairs that do not continue each other")
    # If they are not whole blocks, it is unknown which pair ends a block.
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


# Extra keys -------------------------------------------------------------------------------------

# The parts of a block's identity besides its tokens. vLLM sends `extra_keys`: for each block an
# array of mixed values (LoRA name, image digest with offset, cache salt, …) or nil. TensorRT-LLM
# sends images in `mm_keys`; Dynamo's TensorRT-LLM wrapper in `block_mm_infos`. All become, for each
# block, a hashable tuple or None.


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
    # Nearly all keys end here: no look at each item, whose type is known.
    if kinds <= _LEAVES:
        return tuple(items)
    if depth == 1:
        raise DecodeError(f"extra_keys is nested deeper than {MAX_DEPTH}")
    # Arrays within arrays are counted once more as a whole: each may be short, and all too many.
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
        for span in spans:
            if type(span) is not list or not span or type(span[0]) is not int:
                raise DecodeError("offsets holds something that is not a [start, end] pair")
            pairs.append((digest, span[0]))
        if not spans:
            pairs.append((digest, None))
    return pairs


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
