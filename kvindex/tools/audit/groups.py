"""Which KV cache group of a model counts: its first one that needs every block of a prefix."""

from __future__ import annotations

from kvindex import BlockStored, CacheSettings, ConfigurationError, EventBatch, GroupSpec
from kvindex.wire.quirks import fold_medium, medium_tier

__all__ = ["MainGroup"]

_MAX_GROUPS = 64


class MainGroup:
    """The group whose blocks stand for a rank's tokens: each token is in one block of each group.

    Attributes:
        main: its index; 0 where a model has no groups.
        size: tokens of its blocks; a smaller one is part of a block, and counts when it is whole.
        settings: what the user told of the rank's cache.
    """

    def __init__(self) -> None:
        self.main = 0
        self.size = 0
        self.settings = CacheSettings()
        self._groups: dict[int, GroupSpec] = {}
        self._untold: set[int] = set()

    @property
    def kinds_untold(self) -> bool:
        """Whether there are several groups, of which some may be anything (vLLM up to 0.21)."""
        return len(self._groups) > 1 and bool(self._untold)

    @property
    def others_limit_hits(self) -> bool:
        """Whether a hit needs blocks of other groups, too: windows, Mamba's states."""
        return len(self._groups) > 1

    def configure(self, settings: CacheSettings) -> None:
        """Apply the user's settings of the kinds of groups."""
        self.settings = settings

    def forget(self) -> None:
        """Forget what was learned: another engine may follow."""
        self.main = self.size = 0
        self._groups.clear()
        self._untold.clear()

    def learn(self, batch: EventBatch) -> bool:
        """Learn groups, kinds and sizes from all of a batch; say if another group counts now."""
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
        if index in self._groups and index not in self._untold:
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
            self._untold.add(index)
        else:
            self._untold.discard(index)
        if spec is None or spec.takes_part:
            self._groups[index] = spec or GroupSpec()
