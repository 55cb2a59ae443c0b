"""The events that the fake engine's cache announces, in the habits of the engine it plays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvindex.testing.chain import Link
from kvindex.testing.values import CacheOptions
from kvindex.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event


class Announcer:
    """Collect events until they are drained."""

    def __init__(self, block_size: int, options: CacheOptions) -> None:
        self._block_size = block_size
        self._options = options
        self._vllm = options.engine == "vllm"
        self._pending: list[Event] = []
        self._lora_ids: dict[str, int] = {}
        self.gpu = "GPU"
        self.cpu = "CPU" if self._vllm else "CPU_PINNED"

    def group_idx(self, group: int) -> int | None:
        """Return how events name the group."""
        return group if self._vllm else None

    def drain(self) -> list[Event]:
        """Return the events since the last call and forget them."""
        events, self._pending = self._pending, []
        return events

    def cleared(self) -> None:
        """Announce that everything is gone."""
        self._pending.append(AllBlocksCleared())

    def stored(self, group: int, links: Sequence[Link], medium: str) -> None:
        """Announce consecutive blocks of one prompt."""
        if self._options.single_hashes:
            for link in links:
                self._pending.append(self._stored(group, [link], medium))
        elif links:
            self._pending.append(self._stored(group, links, medium))

    def moved(self, group: int, link: Link, medium: str) -> None:
        """Announce a further place of a block by its hash alone."""
        self._pending.append(
            BlockStored(
                block_hashes=[link.block_hash],
                token_ids=[],
                block_size=0,
                medium=medium,
                group_idx=self.group_idx(group),
            )
        )

    def removed(self, group: int, link: Link, medium: str) -> None:
        """Announce that one copy of a block is gone."""
        last = self._pending[-1] if self._pending else None
        together = not self._vllm and not self._options.single_hashes
        if together and isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(link.block_hash)
            return
        self._pending.append(
            BlockRemoved(
                block_hashes=[link.block_hash], medium=medium, group_idx=self.group_idx(group)
            )
        )

    def _stored(self, group: int, links: Sequence[Link], medium: str) -> BlockStored:
        first, namespace = links[0], links[0].namespace
        lookahead = self._options.lookahead
        kind = self._options.groups[group]
        return BlockStored(
            block_hashes=[link.block_hash for link in links],
            parent_block_hash=None if first.parent is None else first.parent.block_hash,
            token_ids=[token for link in links for token in link.token_ids],
            block_size=self._block_size,
            lora_id=self._lora_id(namespace.lora),
            medium=medium,
            lora_name=namespace.lora,
            extra_keys=[self._extra_keys(link) for link in links] if self._vllm else None,
            group_idx=self.group_idx(group),
            kv_cache_spec_kind=kind.kind if self._vllm else None,
            kv_cache_spec_sliding_window=kind.sliding_window,
            lookahead_token_ids=[list(link.lookahead) for link in links] if lookahead else None,
            cache_salt=None if self._vllm else namespace.salt,
        )

    def _lora_id(self, lora: str | None) -> int | None:
        if lora is None or not self._vllm:
            return None
        return self._lora_ids.setdefault(lora, len(self._lora_ids) + 1)

    @staticmethod
    def _extra_keys(link: Link) -> tuple[Any, ...] | None:
        namespace = link.namespace
        keys: tuple[Any, ...] = () if namespace.lora is None else (namespace.lora,)
        keys += link.content or ()
        if namespace.salt is not None and link.depth == 0:
            keys += (namespace.salt,)
        return keys or None
