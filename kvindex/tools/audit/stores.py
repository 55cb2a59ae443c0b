"""What stores report: what a block is, which blocks belong together, and which groups count."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvindex import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    ConfigurationError,
    Event,
    EventBatch,
    GroupSpec,
)
from kvindex.wire.quirks import fold_medium, is_root_parent, medium_tier

_MAX_GROUPS = 64
_TOKEN_BYTES = 8
_SIGN = 1 << 63
_encode = msgspec.msgpack.Encoder().encode


class MainGroup:
    """The group whose blocks stand for a rank's tokens: each token is in one block of each group.

    Attributes:
        main: its index; 0 where a model has no groups.
        size: tokens of its blocks; a smaller one is part of a block, and counts when it is whole.
        settings: the user's, of the rank's cache.
    """

    def __init__(self) -> None:
        self.main = 0
        self.size = 0
        self.settings = CacheSettings()
        self._groups: dict[int, GroupSpec] = {}
        self._unstated: set[int] = set()

    @property
    def kinds_unknown(self) -> bool:
        """Whether there are several groups, of which some may be anything (vLLM up to 0.21)."""
        return len(self._groups) > 1 and bool(self._unstated)

    @property
    def others_limit_hits(self) -> bool:
        """Whether a hit needs blocks of other groups, too: windows, Mamba's states."""
        return len(self._groups) > 1

    def forget(self) -> None:
        """Forget what was learned: another engine may follow."""
        self.main = self.size = 0
        self._groups.clear()
        self._unstated.clear()

    def learn(self, batch: EventBatch) -> bool:
        """Learn groups, kinds and sizes from all of a batch; return if another group counts now."""
        before = self.main
        for event in batch.events:
            if isinstance(event, BlockStored) and event.token_ids:
                self._learn_kind(event)
        if self._groups:
            needed = (i for i, spec in sorted(self._groups.items()) if spec.needs_all)
            self.main = next(needed, min(self._groups))
        if self.main != before:
            self.size = 0
        for event in batch.events:
            if isinstance(event, BlockStored) and (event.group_idx or 0) == self.main:
                on_device = not medium_tier(fold_medium(event.medium))
                if event.block_size > self.size and event.token_ids and on_device:
                    self.size = event.block_size
        return self.main != before

    def _learn_kind(self, event: BlockStored) -> None:
        index = event.group_idx or 0
        if index in self._groups and index not in self._unstated:
            return
        if index not in self._groups and len(self._groups) >= _MAX_GROUPS:
            return
        spec = self.settings.groups.get(index)
        if spec is None and event.kv_cache_spec_kind is not None:
            try:
                spec = GroupSpec(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            except ConfigurationError:
                spec = None
        if spec is None:
            self._unstated.add(index)
        else:
            self._unstated.discard(index)
        if spec is None or spec.takes_part:
            self._groups[index] = spec or GroupSpec()


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
    for i, items in enumerate(event.extra_keys or ([None] if salt else [])):
        own_salt = salt if i == 0 else None
        if items or own_salt:
            contents[i] += _extra(items or (), lora, own_salt)
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


def tier_of(medium: str | None) -> str | None:
    """The folded name of a medium that is not the device; None for the device."""
    folded = fold_medium(medium)
    return folded if medium_tier(folded) else None


def is_whole(event: BlockStored) -> bool:
    """Whether a store has the tokens of each of its blocks, and fitting extras."""
    count = len(event.block_hashes)
    if not count or event.block_size <= 0 or len(event.token_ids) != count * event.block_size:
        return False
    if event.extra_keys is not None and len(event.extra_keys) != count:
        return False
    ahead = event.lookahead_token_ids
    return ahead is None or (len(ahead) == count and len(set(map(len, ahead))) == 1)


def is_sparse(event: BlockStored) -> bool:
    """Whether a store leaves out some blocks of its tokens, as vLLM's windows and Mamba do."""
    blocks, rest = divmod(len(event.token_ids), event.block_size)
    return not rest and blocks > len(event.block_hashes)


def runs_of(
    events: Iterable[Event],
) -> Iterator[list[BlockStored] | BlockRemoved | AllBlocksCleared]:
    """Yield events, with stores joined that continue one another: some engines split them."""
    run: list[BlockStored] = []
    for event in events:
        if run and not (isinstance(event, BlockStored) and _continues(run[-1], event)):
            yield run
            run = []
        if isinstance(event, BlockStored):
            run.append(event)
        else:
            yield event
    if run:
        yield run


def _continues(before: BlockStored, after: BlockStored) -> bool:
    return (
        after.parent_block_hash is not None
        and bool(before.block_hashes)
        and after.parent_block_hash == before.block_hashes[-1]
        and after.medium == before.medium
        and after.block_size == before.block_size
        and is_whole(before)
        and is_whole(after)
    )
