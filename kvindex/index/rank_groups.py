"""What is learned of a rank's KV cache groups: their kinds, windows and block sizes."""

from __future__ import annotations

from collections.abc import Mapping

from kvindex.index.keys import Namespace
from kvindex.index.rank_image import MAX_SHAPES, GroupImage, RankImage
from kvindex.wire import BlockStored, GroupSpec

__all__ = ["Group", "RankGroups"]

# Bounds against a publisher that invents ever new ones: each namespace costs every query a walk.
_MAX_GROUPS = 64


class Group:
    """What is known of one KV cache group of a rank; `block_size` is 0 until a block is stored."""

    __slots__ = ("block_size", "configured", "spec")

    def __init__(self, spec: GroupSpec | None = None) -> None:
        self.spec = spec or GroupSpec()
        self.configured = spec is not None
        self.block_size = 0


class RankGroups:
    """The groups of one rank, learned from its stores or told by the user."""

    __slots__ = ("_groups", "_main", "_shapes")

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._shapes: set[tuple[int, int]] = set()
        self._main: int | None = None

    def known(self) -> Mapping[int, Group]:
        """Return the groups by their index."""
        return self._groups

    def main(self) -> int | None:
        """Return the group whose blocks an answer counts, None before there is any.

        The first that needs all blocks before the cut, else the first that takes part at all.
        """
        return self._main

    def main_block_size(self) -> int:
        """Return the block size of the main group, 0 while it is not known."""
        return 0 if self._main is None else self._groups[self._main].block_size

    def _choose_main(self) -> None:
        """Choose the main group anew: groups or their kinds have changed."""
        self._main = min(
            (idx for idx, group in self._groups.items() if group.spec.takes_part),
            key=lambda idx: (self._groups[idx].spec.needed_blocks(1) is not None, idx),
            default=None,
        )

    def window_only(self, block_size: int) -> bool:
        """Whether no group of this block size needs all blocks before the cut.

        Then a match may skip a hole in a walk over blocks of that size.
        """
        groups = [group for group in self._groups.values() if group.block_size == block_size]
        specs = [group.spec for group in groups if group.spec.takes_part]
        return bool(specs) and all(spec.needed_blocks(1) is not None for spec in specs)

    def configure(self, specs: Mapping[int, GroupSpec]) -> None:
        """Take the user's word for the kinds of groups; the wire does not change them again."""
        for group_idx, spec in specs.items():
            told = Group(spec)
            before = self._groups.get(group_idx)
            told.block_size = before.block_size if before is not None else 0
            self._groups[group_idx] = told
        self._choose_main()

    def forget(self) -> None:
        """Forget what was learned, since another engine may follow; keep what the user told."""
        told = {idx: group for idx, group in self._groups.items() if group.configured}
        self._groups.clear()
        self._shapes.clear()
        self.configure({idx: group.spec for idx, group in told.items()})

    def image(self) -> tuple[list[GroupImage], list[tuple[int, int]]]:
        """Return the groups and the shapes of stored blocks; see `RankImage`."""
        groups: list[GroupImage] = []
        for group_idx, group in self._groups.items():
            kind, window = group.spec.kind, group.spec.sliding_window
            packed = kind.encode("utf-8", "surrogatepass")
            groups.append((group_idx, packed, window, group.configured, group.block_size))
        return groups, sorted(self._shapes)

    def restore(self, image: RankImage) -> None:
        """Take over what an image knows of groups; nothing must be known yet."""
        for group_idx, kind, window, configured, block_size in image.groups:
            group = Group(GroupSpec(kind.decode("utf-8", "surrogatepass"), window))
            group.configured, group.block_size = configured, block_size
            self._groups[group_idx] = group
        self._choose_main()
        self._shapes.update(image.shapes)

    def learn(self, event: BlockStored, namespace: Namespace, group_idx: int) -> str | None:
        """Learn the group's kind and block size; say why the event's blocks cannot count."""
        group = self._groups.get(group_idx)
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                return "too_many_groups"
            group = self._groups[group_idx] = Group()
            self._choose_main()
        if event.kv_cache_spec_kind is not None and not group.configured:
            fault = _learn_kind(group, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
            self._choose_main()
            if fault is not None:
                return fault
        if event.block_size < group.block_size:
            return "partial_block"
        shape = (namespace.block_size, namespace.lookahead)
        if shape not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                return "too_many_block_sizes"
            self._shapes.add(shape)
        group.block_size = event.block_size
        return None


def _learn_kind(group: Group, kind: str, window: int | None) -> str | None:
    if (group.spec.kind, group.spec.sliding_window) == (kind, window):
        return None
    try:
        group.spec = GroupSpec(kind, window)
    except ValueError:
        return "group_kind"
    return None
