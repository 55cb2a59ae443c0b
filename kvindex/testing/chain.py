"""A block of the fake cache: its tokens, its prefix, and the hash that names both."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from kvindex.wire import BlockHash
from kvindex.wire.errors import ConfigurationError

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
    """Name blocks: chained SHA-256 from a root that differs for each seed.

    Without a seed the root is drawn anew, as restarted engines do. The hash of a block covers
    `lookahead` tokens after it, too.
    """

    def __init__(
        self, block_size: int, *, form: HashForm = "u64", seed: int | None = 0, lookahead: int = 0
    ) -> None:
        if form not in ("u64", "i64", "bytes"):
            raise ConfigurationError(f"hash_form is {form!r}; known: u64, i64, bytes")
        self.block_size = block_size
        self.lookahead = lookahead
        self._form = form
        start = os.urandom(32) if seed is None else str(seed).encode()
        self._root = hashlib.sha256(b"kvindex fake engine" + start).digest()

    def count(self, tokens: int) -> int:
        """Return how many blocks of so many tokens can be hashed."""
        return max(0, tokens - self.lookahead) // self.block_size

    def link(self, token_ids: Sequence[int], namespace: Namespace, parent: Link | None) -> Link:
        """Return the block of `token_ids` that follows `parent`."""
        depth = 0 if parent is None else parent.depth + 1
        start = depth * self.block_size
        stop = start + self.block_size
        own = tuple(token_ids[start:stop])
        ahead = tuple(token_ids[stop : stop + self.lookahead])
        keys = namespace.extra_keys
        content = keys[depth] if depth < len(keys) else None
        covered = (own, ahead, namespace.lora, content, namespace.salt if depth == 0 else None)
        before = self._root if parent is None else parent.digest
        digest = hashlib.sha256(before + msgspec.msgpack.encode(covered)).digest()
        return Link(digest, self._wire(digest), parent, depth, own, ahead, namespace)

    def _wire(self, digest: bytes) -> BlockHash:
        if self._form == "bytes":
            return digest
        if self._form == "i64":
            return int.from_bytes(digest[:8], "big", signed=True)
        return int.from_bytes(digest[-8:], "big")


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
        while len(self.links) < self._hasher.count(len(self.token_ids)):
            parent = self.links[-1] if self.links else None
            self.links.append(self._hasher.link(self.token_ids, self.namespace, parent))
