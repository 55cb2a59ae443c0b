"""The facts about a rank's KV cache groups: their kinds, their block sizes, the unit of blocks.

A group's blocks may be larger than another's; an engine hashes prompts in steps that divide all
of them, and a hash names the whole prefix up to its end. So the index keeps a rank's prompts in
*units* of the greatest size that divides every group's blocks, and a group's block is the unit
that it ends with. A rank with one group has its block size as the unit.
"""

from __future__ import annotations

from math import gcd, lcm

from kvindex.index.reference.keys import stored_namespace
from kvindex.index.views import Spans, main_group, union
from kvindex.wire import BlockStored, CacheSettings, GroupSpec
from kvindex.wire.decode import informational_int
from kvindex.wire.quirks import fold_medium, medium_tier

# Bounds against a publisher that invents ever new names: each namespace costs every query a walk.
_MAX_GROUPS = 64
_MAX_SHAPES = 16  # distinct (block size, lookahead)


class Group:
    """The facts about one KV cache group of a rank."""

    def __init__(self, spec: GroupSpec | None = None) -> None:
        self.spec = spec or GroupSpec()
        self.configured = spec is not None  # by the user: events do not change the kind then
        self.known = spec is not None  # the kind; otherwise it counts as full attention
        self.block_size = 0  # tokens, 0 until a block is stored
        # Whether that is the size of a store off the device, which may be of several blocks.
        self.size_off_device = False


class RankGroups:
    """The groups of one rank, learned from its stores or set by the user."""

    def __init__(self) -> None:
        self.known: dict[int, Group] = {}
        self._shapes: set[tuple[int, int]] = set()
        self._main: int | None = None
        self.settings = CacheSettings()  # the user's
        self.unit = 0  # tokens per block of the index, 0 until a block is stored
        # Whether no group of a known kind needs all blocks: then no event may name all of them.
        self.windows_only = False

    def main_block_size(self) -> int:
        """Return the block size of the rank's `main_group`, 0 before any is known."""
        return 0 if self._main is None else self.known[self._main].block_size

    def _choose_main(self) -> None:
        """Choose the main group anew: groups, their kinds or their sizes have changed."""
        hashed = self.hashed()
        self._main = main_group(hashed) if hashed else None
        needs_all = [group.spec.needs_all for group in hashed.values() if group.known]
        self.windows_only = bool(needs_all) and not any(needs_all)

    def hashed(self) -> dict[int, Group]:
        """Return the groups that take part in prefix caching and have stored a block.

        Their order is that of the engine's look-ups.
        """
        known = sorted(self.known.items())
        return {i: group for i, group in known if group.spec.takes_part and group.block_size}

    @property
    def kinds_unknown(self) -> bool:
        """Whether there are several groups, some of unknown kind (vLLM up to 0.21)."""
        groups = self.hashed().values()
        return len(groups) > 1 and not all(group.known for group in groups)

    @property
    def upper_bound(self) -> bool:
        """Whether the engine's hits may be shorter than the answers."""
        # In report mode "full" some announcements look like copies.
        announces = self.settings.report_mode == "full"
        return self.settings.upper_bound or announces or self.kinds_unknown

    @property
    def device_size_known(self) -> bool:
        """Whether a store on the device has shown a group's block size."""
        return any(g.block_size and not g.size_off_device for g in self.known.values())

    def chunk_of(self, event: BlockStored) -> int:
        """Return the `Place.chunk` of the blocks that an event stores."""
        if not medium_tier(fold_medium(event.medium)):
            return 0
        if event.block_size <= 0:  # vLLM's events without tokens do not state a size
            return self.settings.offload_chunk or 0
        group = self.known.get(event.group_idx or 0)
        if group is None or group.size_off_device or event.block_size > group.block_size:
            return event.block_size
        return 0

    @property
    def offload_chunk(self) -> int:
        """Tokens that the engine loads together from beyond its device; 0: any blocks."""
        tokens = self.settings.offload_chunk or 0
        return tokens if self.units_in(tokens) > 1 else 0

    def units_in(self, tokens: int) -> int:
        """Return how many units a chunk has; 1 if it has no whole number of them."""
        is_whole = tokens and self.unit and tokens % self.unit == 0
        return tokens // self.unit if is_whole else 1

    def whole_chunks(self, spans: Spans, group_idx: int, chunk: int) -> Spans:
        """Return the units that count where a place off the device has labels at these units."""
        # A chunk counts from its first unit to its label. With `offload_chunk`, the engine loads
        # whole chunks only, also where events name each of their blocks.
        whole = self.units_in(self.offload_chunk)
        if whole > 1 and not chunk and group_idx in self.known:
            chunk = self.known[group_idx].block_size
        before = self.units_in(chunk) - 1
        covered = union((max(0, start - before), stop) for start, stop in spans)
        rounded = ((-(-start // whole) * whole, stop // whole * whole) for start, stop in covered)
        return [(start, stop) for start, stop in rounded if start < stop]

    def drops_last(self, group_idx: int) -> bool:
        """Whether EAGLE drops the last block of a group: set for the group or one of its kind."""
        eagle = self.settings.eagle
        if isinstance(eagle, bool):
            return eagle
        kind = self._alike(group_idx)
        return any(self._alike(other) == kind for other in eagle if other in self.known)

    def _alike(self, group_idx: int) -> tuple[GroupSpec, int]:
        """The common properties of groups that an engine looks up together."""
        return self.known[group_idx].spec, self.known[group_idx].block_size

    @property
    def alignment(self) -> int:
        """Tokens whose multiples an engine's hits are."""
        # As in vLLM: what all groups' block sizes divide, or one unit where Mamba's states are kept
        # at any hash and no other group needs whole blocks.
        groups = self.hashed().values()
        fine = any(g.spec.is_mamba and g.block_size > self.unit for g in groups) and all(
            g.spec.is_mamba or g.spec.needs_all or g.block_size == self.unit for g in groups
        )
        return self.unit if fine else lcm(*(group.block_size for group in groups))

    @property
    def ends_at_holes(self) -> bool:
        """Whether a match ends at the first missing block: one group, which needs all of them."""
        groups = list(self.hashed().values())
        whole = len(groups) == 1 and groups[0].spec.needs_all
        return whole and groups[0].block_size == self.unit

    def configure(self, settings: CacheSettings) -> None:
        """Apply the user's settings for what the events do not state."""
        self.settings = settings
        for group_idx, group in self.known.items():
            if group.configured and group_idx not in settings.groups:  # events may set it again
                group.spec, group.configured, group.known = GroupSpec(), False, False
        for group_idx, spec in settings.groups.items():
            group = Group(spec)
            before = self.known.get(group_idx)
            if before is not None:
                group.block_size = before.block_size
                group.size_off_device = before.size_off_device
            self.known[group_idx] = group
        self._choose_main()

    def forget(self) -> None:
        """Forget what was learned, since another engine may follow; keep the user's settings."""
        self.known.clear()
        self._shapes.clear()
        self.unit = 0
        self.configure(self.settings)

    def learn_size(self, event: BlockStored) -> None:
        """Learn a group's block size, and adapt the unit."""
        size, group_idx = event.block_size, event.group_idx or 0
        if size <= 0 or not event.token_ids:
            return
        group = self.known.get(group_idx)
        if group is None:
            if len(self.known) >= _MAX_GROUPS:
                return
            group = self.known[group_idx] = Group()
        # A store of offloaded blocks, which may be larger, changes no known group; and what was
        # learned from one yields to the device's size.
        off_device = bool(medium_tier(fold_medium(event.medium)))
        known = group.block_size
        if known and (off_device or (known == size and not group.size_off_device)):
            return
        if group.size_off_device:
            known = 0
        group.size_off_device = off_device
        alone = all(other is group or not other.block_size for other in self.known.values())
        group.block_size = max(known, size)
        if alone:  # a smaller block is a partial one: it has no place of its own
            self.unit = gcd(group.block_size, self.settings.hash_block_size or 0)
        else:
            self.unit = gcd(self.unit, size)
        self._choose_main()

    def learn(self, event: BlockStored, group_idx: int) -> str | None:
        """Learn the group's kind; return why the event's blocks cannot count."""
        group = self.known.get(group_idx)
        if group is None:
            return "too_many_groups"
        if event.kv_cache_spec_kind is not None and not group.configured:
            window = informational_int(event.kv_cache_spec_sliding_window)
            fault = _learn_kind(group, event.kv_cache_spec_kind, window)
            self._choose_main()
            if fault is not None:
                return fault
        if event.block_size % self.unit:
            return "partial_block"
        shape = stored_namespace(event, self.unit)[::2]
        if shape not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                return "too_many_block_sizes"
            self._shapes.add(shape)
        return None


def _learn_kind(group: Group, kind: str, window: int | None) -> str | None:
    if group.known and (group.spec.kind, group.spec.sliding_window) == (kind, window):
        return None
    try:
        group.spec = GroupSpec(kind, window)
    except ValueError:
        return "group_kind"
    group.known = True
    return None
