"""Prefix keys: our own identity of a block and of everything before it.

The key of a block is a keyed hash of the key before it and of the block's *content*: its packed
tokens, the lookahead tokens that its identity covers, and its extra keys. Engine hashes take no
part, so engines with other hash seeds, algorithms or restarts still share the same key.

These keys have 128 bits; the native core's have 64, and docs/guarantees.md states the consequence.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvindex.index.tokens import Prompt, pack_tokens
from kvindex.wire import BlockStored
from kvindex.wire.errors import ConfigurationError

__all__ = [
    "ExtraKeys",
    "Key",
    "KeyMaker",
    "Lora",
    "Namespace",
    "PromptKeys",
    "Salts",
    "block_contents",
    "first_extra",
    "has_own_extras",
    "lora_tag",
    "pack_extra",
    "stored_namespace",
    "tagged_lora",
]

Key: TypeAlias = bytes
Lora: TypeAlias = str | int | None
"""A LoRA adapter: its name, or its number for engines that send no names; None for none."""

ExtraKeys: TypeAlias = Sequence[Iterable[Any] | None]
"""For each block of a prompt what its identity covers besides tokens; None for nothing."""

_KEY_BYTES = 16
_MAX_SALTS = 64  # distinct first extra keys remembered
_MAX_SALT_BYTES = 256  # longer ones are not remembered: a publisher chooses the length
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


class KeyMaker:
    """Makes prefix keys under a secret seed, so that no client can aim collisions at an index.

    Args:
        seed: non-negative int below 2**128; random when None.
    """

    __slots__ = ("_salt", "seed")

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int.from_bytes(os.urandom(16), "little") if seed is None else seed
        if not 0 <= self.seed < 1 << 128:
            raise ConfigurationError(f"seed must be in 0 … 2**128 - 1, not {seed}")
        self._salt = self.seed.to_bytes(16, "little")

    def root(self, namespace: Namespace) -> Key:
        """Return the key before the first block of a namespace."""
        return self.child(b"", _encode(namespace))

    def child(self, parent: Key, content: bytes) -> Key:
        """Return the key of a block with this content after a parent."""
        # blake2b's salt is part of its parameter block: a keyed hash at no further cost.
        return blake2b(parent + content, digest_size=_KEY_BYTES, salt=self._salt).digest()


class PromptKeys:
    """The keys of a prompt's blocks in one namespace, made one after the other when asked.

    `keys[i]` is the key of block `i`, or None where the prompt has no whole block `i` (with its
    lookahead tokens, if the namespace covers any).
    """

    __slots__ = ("_extras", "_keys", "_last", "_maker", "_namespace", "_prompt", "length")

    def __init__(
        self, maker: KeyMaker, namespace: Namespace, prompt: Prompt, extras: Sequence[bytes]
    ) -> None:
        self._maker = maker
        self._namespace = namespace
        self._prompt = prompt
        self._extras = extras
        self._keys: list[Key] = []
        self._last = maker.root(namespace)
        self.length = max(0, prompt.length - namespace.lookahead) // namespace.block_size

    def __getitem__(self, index: int) -> Key | None:
        if index >= self.length:
            return None
        keys, size = self._keys, self._namespace.block_size
        while len(keys) <= index:
            start = len(keys) * size
            content = self._prompt.packed(start, start + size + self._namespace.lookahead)
            if len(keys) < len(self._extras):
                content += self._extras[len(keys)]
            self._last = self._maker.child(self._last, content)
            keys.append(self._last)
        return keys[index]


def pack_extra(items: Iterable[Any] | None, *, lora: Lora = None, salt: str | None = None) -> bytes:
    """Return one block's extra keys in a canonical form: order does not matter, LoRA is left out.

    vLLM repeats the LoRA name in each block's extra keys and puts the cache salt among those of
    the first one; SGLang sends both apart. The canonical form is the same for both.
    """
    rest = _without_lora(items, lora)
    if salt:
        rest.append(salt)
    return b"".join(sorted(_encode(item) for item in rest))


def _without_lora(items: Iterable[Any] | None, lora: Lora) -> list[Any]:
    rest = list(items or ())
    if isinstance(lora, str) and lora in rest:
        rest.remove(lora)
    return rest


def stored_namespace(event: BlockStored, unit: int) -> Namespace:
    """Return the namespace that a stored event's blocks belong to, in units of so many tokens."""
    lookahead = len(event.lookahead_token_ids[0]) if event.lookahead_token_ids else 0
    return Namespace(unit, _lora(event), lookahead)


def has_own_extras(event: BlockStored, block: int) -> bool:
    """Whether a block has extra keys that belong to some part of it only.

    A LoRA is no part of the content, and a salt (in vLLM a bare string at the prompt's start)
    belongs to the first unit.
    """
    items = _without_lora((event.extra_keys or ())[block], _lora(event))
    at_start = block == 0 and event.parent_block_hash is None
    return not (at_start and all(isinstance(item, str) for item in items)) and bool(items)


def _lora(event: BlockStored) -> Lora:
    """The adapter's name, else its id; an empty name and id 0 mean none, as in a query."""
    return event.lora_name or event.lora_id or None


def first_extra(event: BlockStored) -> bytes:
    """Return the canonical extra keys, salt included, of a stored event's first block."""
    items = event.extra_keys[0] if event.extra_keys else None
    if not items and not event.cache_salt:
        return b""
    return pack_extra(items, lora=_lora(event), salt=event.cache_salt)


class Salts:
    """The last LoRAs and extra keys that a rank's prompts started under, for `explain` to try."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[Lora, bytes], None] = {}  # the newest last

    def __iter__(self) -> Iterator[tuple[Lora, bytes]]:
        return iter(self._known)

    def learn(self, event: BlockStored, namespace: Namespace) -> bool:
        """Remember the extra keys that an event's prompt starts under; return if it has some."""
        extra = first_extra(event)
        if extra and len(extra) <= _MAX_SALT_BYTES:
            self._known.pop((namespace.lora, extra), None)
            self._known[namespace.lora, extra] = None
            if len(self._known) > _MAX_SALTS:
                del self._known[next(iter(self._known))]
        return bool(extra)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


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


def block_contents(event: BlockStored, unit: int, *, at_root: bool) -> list[bytes]:
    """Return the contents of a stored event's blocks, unit by unit.

    Args:
        event: a store that names all its blocks, and extra keys only where `has_own_extras` says
            no, or where blocks have one unit.
        unit: tokens; divides the block size.
        at_root: whether the first block starts its prompt.
    """
    size = event.block_size
    packed = pack_tokens(event.token_ids)
    blocks = [packed[start : start + size * 8] for start in range(0, len(packed), size * 8)]
    covered = unit
    if event.lookahead_token_ids:
        covered += len(event.lookahead_token_ids[0])
        after = map(pack_tokens, event.lookahead_token_ids)
        blocks = [block + ahead for block, ahead in zip(blocks, after, strict=True)]
    contents = [
        block[start * 8 : (start + covered) * 8]
        for block in blocks
        for start in range(0, size, unit)
    ]
    salt = event.cache_salt if at_root else None
    if event.extra_keys is None and not salt:
        return contents
    lora = _lora(event)
    extras = event.extra_keys or [None] * len(blocks)
    for i, items in enumerate(extras):
        if items or (salt and i == 0):
            packed_extra = pack_extra(items, lora=lora, salt=salt if i == 0 else None)
            contents[i * (size // unit)] += packed_extra
    return contents
