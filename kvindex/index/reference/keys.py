"""Prefix keys: our own identity of a block and of everything before it.

The key of a block is a keyed hash of the key before it and of the block's *content*: its packed
tokens, the lookahead tokens that its identity covers, and its extra keys. Engine hashes take no
part, so engines with other hash seeds, algorithms or restarts still share the same key.

These keys have 128 bits; the native core's have 64, and docs/guarantees.md states the consequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TypeAlias

import msgspec

from kvindex.index.keys import Lora, Namespace, event_lora, pack_extra, without_lora
from kvindex.index.tokens import Prompt, pack_tokens
from kvindex.wire import BlockStored

Key: TypeAlias = bytes

_MAX_SALTS = 64  # distinct first extra keys remembered
_MAX_SALT_BYTES = 256  # longer ones are not remembered: a publisher chooses the length
_encode = msgspec.msgpack.Encoder().encode


class KeyMaker:
    """Makes prefix keys under a secret seed, so that no client can aim collisions at an index."""

    def __init__(self, seed: int) -> None:
        self._salt = seed.to_bytes(16, "little")

    def root(self, namespace: Namespace) -> Key:
        """Return the key before the first block of a namespace."""
        return self.child(b"", _encode(namespace))

    def child(self, parent: Key, content: bytes) -> Key:
        """Return the key of a block with this content after a parent."""
        # blake2b's salt is part of its parameter block: a keyed hash at no further cost.
        return blake2b(parent + content, digest_size=16, salt=self._salt).digest()


class PromptKeys:
    """The keys of a prompt's blocks in one namespace, made one after the other, on demand.

    `keys[i]` is the key of block `i`. The prompt has `length` whole blocks, each with its lookahead
    tokens if the namespace covers any.
    """

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

    def __getitem__(self, index: int) -> Key:
        keys, size = self._keys, self._namespace.block_size
        while len(keys) <= index:
            start = len(keys) * size
            content = self._prompt.packed(start, start + size + self._namespace.lookahead)
            if len(keys) < len(self._extras):
                content += self._extras[len(keys)]
            self._last = self._maker.child(self._last, content)
            keys.append(self._last)
        return keys[index]


def stored_namespace(event: BlockStored, unit: int) -> Namespace:
    """Return the namespace that a stored event's blocks belong to, in units of so many tokens."""
    lookahead = len(event.lookahead_token_ids[0]) if event.lookahead_token_ids else 0
    return Namespace(unit, event_lora(event), lookahead)


def has_own_extras(event: BlockStored, block: int) -> bool:
    """Whether a block has extra keys that belong to some part of it only.

    A LoRA is no part of the content, and a salt (in vLLM a bare string at the prompt's start)
    belongs to the first unit.
    """
    items = without_lora((event.extra_keys or ())[block], event_lora(event))
    at_start = block == 0 and event.parent_block_hash is None
    return not (at_start and all(isinstance(item, str) for item in items)) and bool(items)


class Salts:
    """The last LoRAs and extra keys that a rank's prompts started under, for `explain` to try."""

    def __init__(self) -> None:
        self._known: dict[tuple[Lora, bytes], None] = {}  # the newest last

    def __iter__(self) -> Iterator[tuple[Lora, bytes]]:
        return iter(self._known)

    def learn(self, event: BlockStored, namespace: Namespace) -> bool:
        """Remember the extra keys that an event's prompt starts under; return if it has some."""
        items = event.extra_keys[0] if event.extra_keys else None
        extra = pack_extra(items, lora=namespace.lora, salt=event.cache_salt)
        if extra and len(extra) <= _MAX_SALT_BYTES:
            self._known.pop((namespace.lora, extra), None)
            self._known[namespace.lora, extra] = None
            if len(self._known) > _MAX_SALTS:
                del self._known[next(iter(self._known))]
        return bool(extra)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


def block_contents(event: BlockStored, unit: int, *, at_root: bool) -> list[bytes]:
    """Return the contents of a stored event's blocks, unit by unit.

    The event names all its blocks; a block of several units has no extra keys of its own
    (`has_own_extras`). `at_root`: the first block starts its prompt.
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
    for i, items in enumerate(event.extra_keys or [None]):
        extra = pack_extra(items, lora=event_lora(event), salt=salt if i == 0 else None)
        contents[i * (size // unit)] += extra
    return contents
