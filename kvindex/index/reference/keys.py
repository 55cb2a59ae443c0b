"""Prefix keys: our own identity of a block and of everything before it.

The key of a block is a keyed hash of the key before it and of the block's *content*: its packed
tokens, the lookahead tokens that its identity covers, and its extra keys. Engine hashes take no
part, so engines with other hash seeds, algorithms or restarts still share the same key.

These keys have 128 bits; the native core's have 64, and docs/guarantees.md states the consequence.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b, sha256
from typing import NamedTuple, TypeAlias

import msgspec

from kvindex.index.tokens import (
    Lora,
    Namespace,
    Prompt,
    event_lora,
    pack_extra,
    pack_tokens,
    without_lora,
)
from kvindex.wire import BlockHash, BlockStored
from kvindex.wire.quirks import fold_hash

Key: TypeAlias = bytes

_MAX_SALTS = 64  # distinct first extra keys remembered
_MAX_SALT_BYTES = 256  # longer ones are not remembered: a publisher chooses the length
_MAX_STEPS = 1 << 17  # of a rank's proofs
_MAX_STEP_BYTES = 1 << 26  # of the steps' tokens: a publisher chooses its block size
_MAX_UNIT = 8192  # tokens; longer pickles have several frames
_MAX_PICKLED_SALT = 255  # bytes: pickles of longer ones begin otherwise
# Steps that may be gone back to find a resident block, and how many each hashed one adds: so a
# store costs in proportion to what was sent.
_LOOKS = 1 << 17
_LOOKS_A_STEP = 4
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
    """Whether a block has extra keys that belong to some part of it only."""
    # A LoRA is no part of the content, and a salt (in vLLM a bare string at the prompt's start)
    # belongs to the first unit.
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

    `at_root`: the first block starts its prompt.
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
    # A block of several units has no extra keys of its own (`has_own_extras`), only a salt.
    salt = event.cache_salt if at_root else None
    for i, items in enumerate(event.extra_keys or [None]):
        extra = pack_extra(items, lora=event_lora(event), salt=salt if i == 0 else None)
        contents[i * (size // unit)] += extra
    return contents


# Proofs of places -------------------------------------------------------------------------------

# Models that have only sliding windows or Mamba leave blocks out of their events: an event has the
# tokens of a whole range, and the labels of some of its blocks. vLLM makes labels by a chain of
# SHA-256 over pickles of (hash before, tokens, extra keys), from a root that is public unless
# PYTHONHASHSEED is set. So the chain over the tokens of a range shows which of its blocks a label
# names: a label of 64 bits in that chain is the proof. Where the engine hashes otherwise, no label
# ever is.


def _digest(value: object) -> bytes:
    return sha256(pickle.dumps(value, protocol=5)).digest()


_ROOT = _digest("vllm-none-hash")


class Step(NamedTuple):
    """One unit of a chain."""

    digest: bytes  # the engine's hash of it and all before it
    parent: int | None  # the key of the step before it; None at a prompt's start
    content: bytes  # of the unit, as the index has it
    salted: bool  # whether it starts a prompt under a salt


class Proofs:
    """A rank's hash chains, as far as later events may go on from them; the oldest go first."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, Step] = OrderedDict()  # by the last 64 bits of the digest
        self._looks = _LOOKS

    def clear(self) -> None:
        """Forget the chains."""
        self._steps.clear()

    def chain(self, event: BlockStored, unit: int) -> list[Step] | None:
        """Return the steps of an event's tokens, or None if they cannot be known."""
        parent: int | None = None
        digest = _ROOT
        at_root = event.parent_block_hash is None
        if event.parent_block_hash is not None:
            label = fold_hash(event.parent_block_hash)
            parent = step_key(label)
            before = self._steps.get(parent)
            if before is None or not _names(label, before.digest):
                return None
            self._steps.move_to_end(parent)
            digest = before.digest
        if not _is_plain(event, unit):
            return None
        # vLLM hashes a salt with the first block only; `_is_plain` lets no other extra key pass.
        first = event.extra_keys[0] if event.extra_keys else None
        extra = (("cache_salt", first[0]),) if first else None
        steps = []
        contents = block_contents(event, unit, at_root=at_root)
        tokens = event.token_ids
        for i, content in enumerate(contents):
            digest = _digest((digest, tuple(tokens[i * unit : (i + 1) * unit]), extra))
            steps.append(Step(digest, parent, content, extra is not None))
            parent, extra = step_key(digest), None
        self._looks = min(self._looks + _LOOKS_A_STEP * len(steps), _LOOKS)
        return steps

    def keep(self, steps: Sequence[Step], unit: int) -> None:
        """Remember a chain for later events."""
        most = min(_MAX_STEPS, _MAX_STEP_BYTES // (8 * unit))
        for step in steps:
            key = step_key(step.digest)
            self._steps[key] = step
            self._steps.move_to_end(key)
            if len(self._steps) > most:
                self._steps.popitem(last=False)

    def look(self, key: int) -> Step | None:
        """Return a step to go back over, unless too many were."""
        if not self._looks:
            return None
        self._looks -= 1
        return self._steps.get(key)


def proven_places(
    hashes: Sequence[BlockHash], steps: Sequence[Step], scale: int
) -> list[int] | None:
    """Return which blocks of a chain, each of `scale` steps, labels name; None if unsure."""
    # One pass over the steps for all labels: an event names its blocks in their order.
    places: list[int] = []
    ends = enumerate(steps[scale - 1 :: scale])
    for block_hash in hashes:
        place = next((i for i, step in ends if _names(block_hash, step.digest)), None)
        if place is None:
            return None
        places.append(place)
    return places


def step_key(label: BlockHash) -> int:
    """Return a step's key: the last 64 bits of its digest."""
    return label if isinstance(label, int) else int.from_bytes(label[-8:], "big")


def _names(label: BlockHash, digest: bytes) -> bool:
    return step_key(digest) == label if isinstance(label, int) else digest == label


def _is_plain(event: BlockStored, unit: int) -> bool:
    """Whether all that an event's labels cover is known, besides the chain before."""
    if unit > _MAX_UNIT or stored_namespace(event, unit) != Namespace(unit, None, 0):
        return False
    # Others are pickled in a longer form, which the native index, with a writer of its own, lacks.
    if not all(0 <= token < 1 << 31 for token in event.token_ids):
        return False
    first, *others = event.extra_keys or [None]
    if event.parent_block_hash is not None:
        return not first and not any(others)
    if event.cache_salt or any(others):  # extra keys of blocks that are not named are unknown
        return False
    if not first:
        return True
    salt = first[0]
    if len(first) > 1 or not isinstance(salt, str):
        return False
    return len(salt.encode("utf-8", "surrogatepass")) <= _MAX_PICKLED_SALT
