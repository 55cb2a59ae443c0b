"""What tells a stored block from every other block at its place, as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from kvindex import BlockStored
from kvindex.wire.quirks import is_root_parent

__all__ = ["block_contents"]

_TOKEN_BYTES = 8
_SIGN = 1 << 63
_encode = msgspec.msgpack.Encoder().encode


def block_contents(event: BlockStored) -> list[bytes]:
    """Return the content of each block of a store that names all its blocks.

    Equal prompts give equal contents whatever engine they are from: tokens, LoRA, salt, images and
    the tokens that lookahead hashing covers are in them, engine hashes and their seeds are not.
    """
    lora = event.lora_name or event.lora_id or None
    ahead = event.lookahead_token_ids
    covered = len(ahead[0]) if ahead else 0
    tag = _encode((event.block_size, lora, covered))
    packed, width = _packed(event.token_ids), event.block_size * _TOKEN_BYTES
    contents = [tag + packed[i : i + width] for i in range(0, len(packed), width)]
    if ahead:
        contents = [
            content + _packed(tokens) for content, tokens in zip(contents, ahead, strict=True)
        ]
    salt = event.cache_salt if is_root_parent(event.parent_block_hash) else None
    if event.extra_keys is not None:
        for i, items in enumerate(event.extra_keys):
            if items:
                contents[i] += _extra(items, lora, salt if i == 0 else None)
            elif salt and i == 0:
                contents[0] += _extra((), lora, salt)
    elif salt:
        contents[0] += _extra((), lora, salt)
    return contents


def _extra(items: Iterable[Any], lora: str | int | None, salt: str | None) -> bytes:
    """One block's extra keys: in no order, without the LoRA, which vLLM repeats for each block."""
    rest = list(items)
    if isinstance(lora, str) and lora in rest:
        rest.remove(lora)
    if salt:  # vLLM puts it among the extra keys, SGLang beside them
        rest.append(salt)
    return b"".join(sorted(map(_encode, rest)))


def _packed(token_ids: Iterable[int]) -> bytes:
    try:
        return array("q", token_ids).tobytes()
    except OverflowError:  # ids are any integers of 64 bits
        return array("q", [(t + _SIGN) % (2 * _SIGN) - _SIGN for t in token_ids]).tobytes()
