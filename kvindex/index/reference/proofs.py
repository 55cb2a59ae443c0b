"""Places of blocks that no event names whole, proven by vLLM's own hash chain.

Models that have only sliding windows or Mamba leave blocks out of their events: an event has the
tokens of a whole range, and the labels of some of its blocks. vLLM makes labels by a chain of
SHA-256 over pickles of (hash before, tokens, extra keys), from a root that is public unless
PYTHONHASHSEED is set. So the chain over the tokens of a range shows which of its blocks a label
names: a label of 64 bits in that chain is the proof. Where the engine hashes otherwise, no label
ever is.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from kvindex.index.keys import Namespace
from kvindex.index.reference.keys import block_contents, stored_namespace
from kvindex.wire import BlockHash, BlockStored
from kvindex.wire.quirks import fold_hash

_MAX_STEPS = 1 << 17
_MAX_STEP_BYTES = 1 << 26  # of the steps' tokens: a publisher chooses its block size
_MAX_UNIT = 8192  # tokens; longer pickles have several frames
_MAX_SALT_BYTES = 255  # pickles of longer ones begin otherwise
# Steps that may be gone back to find a resident block, and how many each hashed one adds: so a
# store costs in proportion to what was sent.
_LOOKS = 1 << 17
_LOOKS_A_STEP = 4


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
        """Return the steps of an event's tokens, or None if they cannot be known.

        They are unknown if the chain up to the parent is, and for LoRAs and extra keys other than a
        salt.
        """
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
        extra = _salted_extra(event)
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


def _salted_extra(event: BlockStored) -> tuple[tuple[str, str], ...] | None:
    """Return the extra key that vLLM hashes with the first block, which is none or a salt."""
    first = event.extra_keys[0] if event.extra_keys else None
    return (("cache_salt", first[0]),) if first else None


def _is_plain(event: BlockStored, unit: int) -> bool:
    """Whether all that an event's labels cover is known, besides the chain before."""
    if unit > _MAX_UNIT or stored_namespace(event, unit) != Namespace(unit, None, 0):
        return False
    if not all(0 <= token < 1 << 31 for token in event.token_ids):
        return False
    first, *others = event.extra_keys or [None]
    if event.parent_block_hash is not None:
        return not first and not any(others)
    if event.cache_salt or any(others):  # extra keys of blocks that are not named are unknown
        return False
    return not first or (len(first) == 1 and _is_salt(first[0]))


def _is_salt(item: object) -> bool:
    return isinstance(item, str) and len(item.encode("utf-8", "surrogatepass")) <= _MAX_SALT_BYTES
