"""The wire of each engine version, as data: one `Dialect` per change of the wire.

Reading needs none of this (`kvindex.wire.decode` reads all); writing as a given version does, and
a fake of it, do. A dialect named "vllm-0.20.0" holds from that release until the next one named.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from kvindex.wire.errors import ConfigurationError


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
    early = [first, v0_9_1, v0_10_2, v0_14, v0_17, v0_20, v0_22]
    return [*early, v0_24, v0_26, v0_29, v0_30, v0_33]


def _sglang() -> list[Dialect]:
    first = Dialect(name="sglang-0.4.6", engine="sglang", stored=_BASE, has_dp_rank=False)
    optional = frozenset({"medium", "cache_salt", "session_id", "lora_name"})
    v0_4_8 = _since(first, "sglang-0.4.8", has_dp_rank=True)
    v0_5_9 = _since(v0_4_8, "sglang-0.5.9", "medium", removed="medium")
    v0_5_18 = _since(v0_5_9, "sglang-0.5.18", has_salt_metadata=True)
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
