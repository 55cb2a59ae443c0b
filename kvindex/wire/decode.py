"""Bytes of any engine version to events: one reader, no configuration.

A payload is the msgpack array `[ts, events, dp_rank]` in every released version of every engine; a
map with the same by their names is read as well. Each event is an array with its tag first (vLLM
0.9-0.23, SGLang 0.4.6-0.5.19) or a map with its tag under "type" (later ones, TensorRT-LLM). Where
versions disagree about a position, the value's type decides. The rules for what is odd:

- New things are ignored: unknown fields, further elements, unknown tags (`EventBatch.skipped`).
- A missing end has its defaults.
- Too many values (`kvindex.wire.extra_keys.MAX_VALUES`) refuses the whole batch.
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
from math import isfinite
from typing import Any, Final

import msgspec

from kvindex.wire import extra_keys as keys
from kvindex.wire import fields
from kvindex.wire.errors import DecodeError
from kvindex.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch

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

_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")

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
    """As `decode_batch`, for a payload that is known to be malformed or rare.

    Raises:
        DecodeError: likewise; without a look if it is longer than `MAX_RARE_BYTES`.
    """
    size = _size(payload)
    if size > MAX_RARE_BYTES:
        raise _too_long(size)
    return decode_batch(payload)


def check_blocks(blocks: int, size: int) -> None:
    """Refuse a batch of a stream that names more than `MAX_BLOCKS`.

    Raises:
        DecodeError: it does.
    """
    if blocks > MAX_BLOCKS:
        raise DecodeError(
            f"a batch ({size} bytes) whose events name {blocks} blocks, over {MAX_BLOCKS}",
            size=size,
        )


def decode_bounded(payload: bytes) -> EventBatch:
    """As `decode_batch`, for a batch of a stream.

    Raises:
        DecodeError: likewise; or it names more than `MAX_BLOCKS`.
    """
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
    except TypeError:
        return 0


def _batch(raw: Any, rare: _Rare) -> EventBatch:
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
    dp_rank = fields.optional_small_int(dp_rank, "dp_rank")
    skipped[MAX_SKIPPED:] = ["(more)"] * (len(skipped) > MAX_SKIPPED)
    return EventBatch(_timestamp(ts), events, dp_rank, tuple(skipped))


def _timestamp(ts: Any) -> float:
    if type(ts) not in (float, int) or not isfinite(ts):
        raise DecodeError(f"ts is not a finite number but {type(ts).__name__}")
    return float(ts)


def _event(raw: Any, rare: _Rare) -> Event | str:
    """One event, or its tag if that is unknown."""
    if type(raw) is list:
        tag = raw[0] if raw else None
    elif type(raw) is dict:
        tag = raw.get("type")
    else:
        raise DecodeError(f"{type(raw).__name__}, not an array or map")
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
    images = None
    if len(values) > _MM_INFOS and _has_mm_infos(values):
        images = values.pop(_MM_INFOS)
    named = dict(zip(_STORED_FIELDS, values, strict=False))
    if images is not None:
        named["block_mm_infos"] = images
    metadata = named.get("lora_name")
    if type(metadata) is dict:  # SGLang 0.5.18-0.5.19
        named["lora_name"] = None
        named["cache_salt"] = metadata.get("cache_salt")
    return named


def _has_mm_infos(values: list[Any]) -> bool:
    """True if Dynamo's TensorRT-LLM wrapper put images before group_idx."""
    here = values[_MM_INFOS]
    after = values[_MM_INFOS + 1] if len(values) > _MM_INFOS + 1 else None
    return type(here) is list or (here is None and type(after) is int)


def _required(raw: dict[str, Any], name: str) -> Any:
    try:
        return raw[name]
    except KeyError:
        raise DecodeError(f"{name} is missing") from None


def _stored(raw: dict[str, Any], rare: _Rare) -> BlockStored:
    get = raw.get
    hashes = fields.block_hashes(_required(raw, "block_hashes"))
    block_size = fields.small_int(_required(raw, "block_size"), "block_size")
    raw_tokens = _required(raw, "token_ids")
    lookahead = fields.tokens_per_block(get("lookahead_token_ids"))
    token_ids, texts = fields.tokens(raw_tokens)
    if texts:
        rare.note(texts)
    if token_ids is None:
        token_ids, lookahead = fields.split_bigrams(raw_tokens, len(hashes), block_size)
    if get("mm_keys") is not None or get("block_mm_infos") is not None:
        rare.note()
    medium = fields.optional_text(get("medium"), "medium")
    rare.note_medium(medium)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=fields.optional_hash(get("parent_block_hash"), "parent_block_hash"),
        token_ids=token_ids,
        block_size=block_size,
        lora_id=fields.optional_int(get("lora_id"), "lora_id"),
        medium=medium,
        lora_name=fields.optional_text(get("lora_name"), "lora_name"),
        extra_keys=_extra_keys(raw),
        group_idx=fields.optional_small_int(get("group_idx"), "group_idx"),
        kv_cache_spec_kind=fields.informational_text(get("kv_cache_spec_kind")),
        kv_cache_spec_sliding_window=fields.informational_int(get("kv_cache_spec_sliding_window")),
        locality=fields.informational_text(get("locality")),
        ownership=fields.informational_text(get("ownership")),
        session_id=fields.informational_text(get("session_id")),
        lookahead_token_ids=lookahead,
        cache_salt=fields.optional_text(get("cache_salt"), "cache_salt"),
    )


def _extra_keys(raw: dict[str, Any]) -> keys.ExtraKeys | None:
    own = keys.extra_keys(raw.get("extra_keys"))
    own = keys.join(own, keys.mm_keys(raw.get("mm_keys")))
    return keys.join(own, keys.mm_infos(raw.get("block_mm_infos")))


def _removed(raw: dict[str, Any], rare: _Rare) -> BlockRemoved:
    get = raw.get
    medium = fields.optional_text(get("medium"), "medium")
    rare.note_medium(medium)
    hashes = fields.block_hashes(_required(raw, "block_hashes"))
    return BlockRemoved(
        block_hashes=hashes,
        medium=medium,
        group_idx=fields.optional_small_int(get("group_idx"), "group_idx"),
        locality=fields.informational_text(get("locality")),
        ownership=fields.informational_text(get("ownership")),
        remaining_copy_counts=fields.copy_counts(get("remaining_copy_counts"), len(hashes)),
    )
