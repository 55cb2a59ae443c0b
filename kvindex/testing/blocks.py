"""What the fake engine's cache is made of: options and answers, blocks, and where blocks live."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from kvindex.wire import BlockHash
from kvindex.wire.errors import ConfigurationError, InvariantError

CacheKey = tuple[BlockHash, str, int | None]
"""The identity of a block in events: (block_hash, medium, group_idx)."""


class PromptKeys(TypedDict, total=False):
    """The keys under which the blocks of a prompt are cached, besides its tokens.

    Attributes:
        lora: LoRA adapter name.
        salt: cache salt.
        extra_keys: for each leading block what else it covers (images, …), or None.
    """

    lora: str | None
    salt: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None


class Group(msgspec.Struct, frozen=True):
    """One KV cache group of a hybrid model.

    Attributes:
        kind: kind of attention, in vLLM's words.
        sliding_window: its window in tokens; None for full attention.
    """

    kind: str = "full_attention"
    sliding_window: int | None = None

    @classmethod
    def window(cls, tokens: int) -> Group:
        """Return a sliding-window group of this many tokens."""
        return cls("sliding_window", tokens)

    def reach(self, block_size: int) -> int | None:
        """Return how many blocks before a cut a hit needs; None for all of them."""
        if self.sliding_window is None:
            return None
        return -(-(self.sliding_window - 1) // block_size)


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The rarer properties of a `PagedCache`.

    Attributes:
        groups: KV cache groups; the first has full attention, others may have windows.
        lookahead: how many tokens after a block its hash covers (vLLM 0.33; 1 for EAGLE bigrams).
        offload: when blocks go to the CPU tier: as they are stored on the GPU, or only when
            their last GPU copy is evicted.
        placeholders: CPU stores carry the hash only (`token_ids=[]`), as vLLM's connectors do by
            default; otherwise the whole payload.
        engine: whose habits to follow. "vllm": group_idx and kinds on events, salt in extra_keys,
            several physical copies of a block, medium "CPU". "sglang": none of the former, salt in
            `cache_salt`, one copy, medium "CPU_PINNED", removals of one step in one event.
        single_hashes: each event names one block (SGLang before 0.5.18).
    """

    groups: tuple[Group, ...] = (Group(),)
    lookahead: int = 0
    offload: Literal["store", "evict"] = "store"
    placeholders: bool = True
    engine: Literal["vllm", "sglang"] = "vllm"
    single_hashes: bool = False

    def __post_init__(self) -> None:
        if not self.groups or self.groups[0].sliding_window is not None:
            raise ConfigurationError("the first of `groups` must have full attention")
        if any(g.sliding_window is not None and g.sliding_window < 1 for g in self.groups):
            raise ConfigurationError("sliding_window is at least 1 token")
        if self.lookahead < 0:
            raise ConfigurationError(f"lookahead is {self.lookahead}, below 0")
        if self.engine == "sglang" and len(self.groups) > 1:
            raise ConfigurationError("SGLang's events have no groups: use one")


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one request.

    Attributes:
        prompt_tokens: length of the prompt.
        hit_tokens: how many of them were cached.
        loaded_tokens: how many of those came from the CPU tier.
        new_tokens: how many tokens were generated.
    """

    prompt_tokens: int
    hit_tokens: int
    loaded_tokens: int = 0
    new_tokens: int = 0


class Lookup(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is resident.

    Attributes:
        blocks: leading blocks resident on any medium, by the engine's own rule for its groups.
        tokens: the same in tokens.
        by_medium: of those blocks, how many of the first group are on each medium.
    """

    blocks: int
    tokens: int
    by_medium: dict[str, int]


class ResidentPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """One block that the cache holds, with its whole prefix.

    Attributes:
        block_hash: as on the wire.
        medium: where it lives.
        group_idx: as on the wire.
        copies: physical copies there.
        prefix: all tokens from the start of the prompt through this block.
        lookahead: the tokens after it that the hash covers.
        lora: LoRA adapter name.
        salt: cache salt.
        extra_keys: what else the blocks of the prompt cover.
    """

    block_hash: BlockHash
    medium: str
    group_idx: int | None
    copies: int
    prefix: list[int]
    lookahead: list[int]
    lora: str | None
    salt: str | None
    extra_keys: list[tuple[Any, ...] | None]


# Blocks and their hashes -------------------------------------------------------------------------

HashForm = Literal["u64", "i64", "bytes"]
"""How hashes appear on the wire: vLLM's default, SGLang's, or raw SHA-256 digests."""


class Namespace(msgspec.Struct, frozen=True):
    """The `PromptKeys` of a whole prompt, which its blocks' hashes cover besides tokens."""

    lora: str | None = None
    salt: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] = ()


class Link(msgspec.Struct, frozen=True, eq=False):
    """One block of a prompt and, through `parent`, all blocks before it.

    Its digest covers the parent's digest and all below; `block_hash` is its form on the wire.
    """

    digest: bytes
    block_hash: BlockHash
    parent: Link | None
    depth: int
    token_ids: tuple[int, ...]
    lookahead: tuple[int, ...]
    namespace: Namespace

    @property
    def content(self) -> tuple[Any, ...] | None:
        """The prompt's `extra_keys` for this block."""
        keys = self.namespace.extra_keys
        return keys[self.depth] if self.depth < len(keys) else None

    def path(self) -> Iterator[Link]:
        """Yield the links from this one up to the first."""
        link: Link | None = self
        while link is not None:
            yield link
            link = link.parent


class Hasher:
    """Name blocks: chained SHA-256 from a root that differs for each seed."""

    def __init__(
        self, block_size: int, *, form: HashForm = "u64", seed: int | None = 0, lookahead: int = 0
    ) -> None:
        if form not in ("u64", "i64", "bytes"):
            raise ConfigurationError(f"hash_form is {form!r}; known: u64, i64, bytes")
        self.block_size = block_size
        self.lookahead = lookahead
        self._form = form
        # vLLM draws its root anew at each start, unless PYTHONHASHSEED is set.
        start = os.urandom(32) if seed is None else str(seed).encode()
        self._root = hashlib.sha256(b"kvindex fake engine" + start).digest()

    def count(self, tokens: int) -> int:
        """Return how many blocks of so many tokens can be hashed."""
        # A full block waits for the tokens after it that its hash covers.
        return max(0, tokens - self.lookahead) // self.block_size

    def link(self, token_ids: Sequence[int], namespace: Namespace, parent: Link | None) -> Link:
        depth = 0 if parent is None else parent.depth + 1
        start = depth * self.block_size
        stop = start + self.block_size
        own = tuple(token_ids[start:stop])
        ahead = tuple(token_ids[stop : stop + self.lookahead])
        keys = namespace.extra_keys
        content = keys[depth] if depth < len(keys) else None
        # The salt in the first block alone, as in vLLM: the chain carries it on.
        covered = (own, ahead, namespace.lora, content, namespace.salt if depth == 0 else None)
        before = self._root if parent is None else parent.digest
        digest = hashlib.sha256(before + msgspec.msgpack.encode(covered)).digest()
        block_hash: BlockHash = digest
        if self._form == "i64":  # SGLang takes the first eight bytes, vLLM the last
            block_hash = int.from_bytes(digest[:8], "big", signed=True)
        elif self._form == "u64":
            block_hash = int.from_bytes(digest[-8:], "big")
        return Link(digest, block_hash, parent, depth, own, ahead, namespace)


class Chain:
    """The tokens of one prompt and the links of its full blocks, growing together."""

    def __init__(self, hasher: Hasher, token_ids: Sequence[int], namespace: Namespace) -> None:
        self._hasher = hasher
        self.namespace = namespace
        self.token_ids: list[int] = []
        self.links: list[Link] = []
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens and link the blocks that they complete."""
        self.token_ids.extend(token_ids)
        # Only full blocks are named: engines cache no others.
        while len(self.links) < self._hasher.count(len(self.token_ids)):
            parent = self.links[-1] if self.links else None
            self.links.append(self._hasher.link(self.token_ids, self.namespace, parent))


# Where blocks live -------------------------------------------------------------------------------

Content = tuple[int, Link]
"""What a physical block holds: (group number, block)."""


class BlockPool:
    """Physical blocks as vLLM keeps them: one (group, block) may have several copies."""

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._held: list[Content | None] = [None] * num_blocks
        # What nobody uses keeps its contents, and can be hit until it leaves the queue's head.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._copies: dict[tuple[int, bytes], dict[int, Link]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, group: int, link: Link) -> int | None:
        """Return a physical block that holds this block, the one stored first."""
        return next(iter(self._copies.get((group, link.digest), ())), None)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self) -> tuple[int, Content | None]:
        """Return the block free for longest, and what it held until now."""
        block, _ = self._free.popitem(last=False)
        held = self._held[block]
        if held is not None:
            copies = self._copies[held[0], held[1].digest]
            del copies[block]
            if not copies:  # `contents` names one copy of each entry
                del self._copies[held[0], held[1].digest]
            self._held[block] = None
        self._references[block] = 1
        return block, held

    def next_evicted(self) -> Content | None:
        return self._held[next(iter(self._free))]

    def touch(self, block: int) -> None:
        # Out of the queue while it is used: vLLM evicts nothing that a request reads.
        self._free.pop(block, None)
        self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one user of each; blocks without users join the free queue's tail in this order."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def store(self, block: int, group: int, link: Link) -> None:
        """Let an allocated block hold this block, as one more copy."""
        self._held[block] = (group, link)
        self._copies.setdefault((group, link.digest), {})[block] = link

    def clear(self) -> None:
        self._held = [None] * len(self._held)
        self._copies.clear()

    def contents(self) -> Iterator[tuple[int, Link, int]]:
        """Yield (group number, block, copies)."""
        for (group, _), copies in self._copies.items():
            yield group, next(iter(copies.values())), len(copies)

    def check(self, users: Mapping[int, int]) -> None:
        """Raise InvariantError unless references, free queue and copies agree with the users."""
        for block, held in enumerate(self._held):
            if self._references[block] != users.get(block, 0):
                raise InvariantError(
                    f"block {block} counts {self._references[block]} users of {users.get(block, 0)}"
                )
            if (block in self._free) != (self._references[block] == 0):
                raise InvariantError(f"block {block} is free and in use, or neither")
            if held is not None and block not in self._copies[held[0], held[1].digest]:
                raise InvariantError(f"block {block} is missing among the copies of what it holds")
        if sum(map(len, self._copies.values())) != sum(x is not None for x in self._held):
            raise InvariantError("more copies than physical blocks that hold something")


class CpuTier:
    """The second tier: at most so many blocks, the least recently used leaves first."""

    def __init__(self, num_blocks: int) -> None:
        self._size = num_blocks
        self._held: OrderedDict[tuple[int, bytes], Link] = OrderedDict()

    def __bool__(self) -> bool:
        return self._size > 0

    def has(self, group: int, link: Link) -> bool:
        return (group, link.digest) in self._held

    def touch(self, group: int, link: Link) -> None:
        if self.has(group, link):
            self._held.move_to_end((group, link.digest))

    def store(self, group: int, link: Link) -> Content | None:
        """Keep the block; return what had to leave for it."""
        evicted = None
        if len(self._held) >= self._size:
            (out_group, _), out = self._held.popitem(last=False)
            evicted = (out_group, out)
        self._held[group, link.digest] = link
        return evicted

    def clear(self) -> None:
        self._held.clear()

    def contents(self) -> Iterator[tuple[int, Link, int]]:
        """Yield (group number, block, 1)."""
        for (group, _), link in self._held.items():
            yield group, link, 1
