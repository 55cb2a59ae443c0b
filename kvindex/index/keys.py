"""LoRAs, salts and extra keys: the parts of a block's identity besides its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvindex.wire import BlockStored

Lora: TypeAlias = str | int | None
"""A LoRA adapter: its name, or its number for engines that send no names; None for none."""

ExtraKeys: TypeAlias = Sequence[Iterable[Any] | None]
"""For each block of a prompt what its identity covers besides tokens; None for nothing."""

_encode = msgspec.msgpack.Encoder().encode


class Namespace(NamedTuple):
    """The settings that separate prompts of equal tokens from the first block on.

    Attributes:
        block_size: tokens per block.
        lora: adapter name where the engine sends one, else its numeric id, else None.
        lookahead: tokens after a block that its identity covers too (0 for most engines).
    """

    block_size: int
    lora: Lora
    lookahead: int


def event_lora(event: BlockStored) -> Lora:
    """Return the adapter's name, else its id; an empty name and id 0 mean none, as in a query."""
    return event.lora_name or event.lora_id or None


def pack_extra(items: Iterable[Any] | None, *, lora: Lora = None, salt: str | None = None) -> bytes:
    """Return one block's extra keys in a canonical form: order does not matter, LoRA is left out.

    vLLM repeats the LoRA name in each block's extra keys and puts the cache salt among those of
    the first one; SGLang sends both apart. The canonical form is the same for both.
    """
    rest = without_lora(items, lora)
    if salt:
        rest.append(salt)
    return b"".join(sorted(_encode(item) for item in rest))


def without_lora(items: Iterable[Any] | None, lora: Lora) -> list[Any]:
    """Return a block's extra keys without the LoRA's name."""
    rest = list(items or ())
    if isinstance(lora, str) and lora in rest:
        rest.remove(lora)
    return rest


def lora_tag(lora: Lora) -> bytes:
    """Return the native name of a LoRA: apart for names, for numeric ids and for none.

    Examples:
        >>> lora_tag("sql"), lora_tag(7), lora_tag(None)
        (b'ssql', b'i7', b'')
    """
    if not lora:
        return b""
    return b"s" + lora.encode("utf-8", "surrogatepass") if isinstance(lora, str) else b"i%d" % lora


def tagged_lora(tag: bytes) -> Lora:
    """Return the LoRA that a native name means."""
    if not tag:
        return None
    return tag[1:].decode("utf-8", "surrogatepass") if tag[:1] == b"s" else int(tag[1:])
