"""The hit that the engine itself would get, from the blocks of each of its KV cache groups.

The rules are those of vLLM 0.33 (`vllm/v1/core/kv_cache_coordinator.py` and
`single_type_kv_cache_manager.py`): each group finds the longest hit that it can serve within a
given length; groups take turns until none of them shortens the hit any more. A plain model has one
group of full attention. `docs/wire.md`, "Predicting the engine's hit", lists the checks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from kvindex.index.views import Spans, extend_spans
from kvindex.wire import GroupSpec


class Cache(NamedTuple):
    """What all groups of a rank have in common."""

    unit: int  # tokens per block of the index
    alignment: int  # tokens whose multiples the hits are
    offload_chunk: int = 0  # least tokens that the engine loads from beyond its device


class GroupCoverage(NamedTuple):
    """The part of a prompt that one rank holds in one group."""

    spec: GroupSpec
    block_size: int  # in tokens
    spans: Spans  # in units
    eagle: bool = False  # whether the engine drops the last block that it matched there


class TieredHit(NamedTuple):
    """How many leading tokens of a prompt the engine holds."""

    tokens: int  # on all tiers
    device_tokens: int  # on its device by itself
    host_tokens: int  # on its device and its host together


def tiered_hit(
    cache: Cache, length: int, tiers: Mapping[int, Sequence[GroupCoverage]]
) -> TieredHit:
    """Return how many leading tokens of a prompt the engine holds, up to each tier.

    `tiers` is the coverage by tier (0 is the device, 1 the host), of the same groups in each.
    """
    hit = on_device = on_host = 0
    path: Sequence[GroupCoverage] = ()
    # The device's prefix comes first; each further tier can only continue where the one before
    # ended. Once a prefix is left for a further tier, the engine does not return.
    for tier, groups in sorted(tiers.items()):
        cut = hit // cache.unit
        before = path or [group._replace(spans=[]) for group in groups]
        path = [
            group._replace(spans=_joined(early.spans, cut, group.spans))
            for early, group in zip(before, groups, strict=True)
        ]
        hit = max(hit, engine_hit(cache, length, path))
        if tier == 0:
            on_device = hit
        if tier <= 1:
            on_host = hit
    # Beyond the device whole chunks are loaded: less than one more of them is nothing.
    if hit - on_device < cache.offload_chunk:
        hit = on_device
    if on_host - on_device < cache.offload_chunk:
        on_host = on_device
    return TieredHit(hit, on_device, on_host)


def _joined(before: Spans, cut: int, after: Spans) -> Spans:
    """Return the part of some spans before a cut, and of others after it."""
    joined: Spans = []
    for start, stop in before:
        if start < cut:
            extend_spans(joined, start, min(stop, cut))
    for start, stop in after:
        if stop > cut:
            extend_spans(joined, max(start, cut), stop)
    return joined


def engine_hit(cache: Cache, length: int, groups: Sequence[GroupCoverage]) -> int:
    """Return how many leading tokens of a prompt the engine would find cached on one tier.

    Complexity: O(blocks × log spans) for each round of the groups.
    """
    if len(groups) < 2:
        return _find(groups[0], cache, length, drop=groups[0].eagle) if groups else 0
    groups = sorted(groups, key=lambda group: not group.spec.needs_all)
    # Of two groups the first, which needs all blocks, has all of whatever the second one leaves.
    one_round = len(groups) == 2 and groups[0].spec.needs_all
    reached: dict[int, int] = {}  # by groups that need all blocks: one look-up each
    dropped: set[int] = set()  # groups that have dropped their block for the present length
    hit = length
    while True:
        current = hit
        for number, group in enumerate(groups):
            if number in reached:
                current = min(current, reached[number])
                continue
            drop = group.eagle and number not in dropped
            limit = current
            if drop and not group.spec.is_mamba:  # the block that is dropped may lie beyond
                margin = min(cache.alignment, group.block_size)
                limit = min(current + margin, length - length % cache.unit)
            reach = _find(group, cache, limit, drop=drop)
            if drop:
                dropped.add(number)
            # A shorter hit is another one: each group drops the last block of that.
            elif reach < current:
                dropped.clear()
            current = reach
            if group.spec.needs_all:
                reached[number] = reach
        if one_round or current >= hit:
            return current
        hit = current


def _find(group: GroupCoverage, cache: Cache, length: int, *, drop: bool) -> int:
    """Return the longest hit within `length` tokens that a group can serve."""
    if group.spec.is_mamba:
        return _find_state(group, cache, length)
    if group.spec.has_window:
        return _find_window(group, cache, length, drop=drop)
    if group.spec.is_chunked:
        return _find_chunk(group, cache, length)
    return _find_all(group, cache, length, drop=drop)


def _find_all(group: GroupCoverage, cache: Cache, length: int, *, drop: bool) -> int:
    size, alignment = group.block_size, cache.alignment
    hit = _reach(group, cache, 0, length)
    if alignment < size:  # a hit may end within a block, where it has an entry of its own
        last = min(hit + size - alignment, length - length % alignment)
        ends = range(last, hit, -alignment)
        hit = next((stop for stop in ends if _holds(group, cache, stop)), hit)
    if drop and hit:
        hit -= min(alignment, size)
    return hit - hit % alignment


def _find_window(group: GroupCoverage, cache: Cache, length: int, *, drop: bool) -> int:
    size, alignment = group.block_size, cache.alignment
    needed = group.spec.window_blocks(size) + drop
    count = 0  # blocks in a row, from right to left
    for block in range(length // size - 1, -1, -1):
        if not _holds(group, cache, (block + 1) * size):
            count = 0
        elif count or (block + (not drop)) * size % alignment == 0:  # a hit may end here
            count += 1
            if count >= needed:
                hit = (block + count) * size
                break
    else:  # too few, but from the prompt's start
        hit = count * size
        hit -= hit % alignment
    if drop and hit:
        hit -= size
    return hit - hit % alignment


def _find_chunk(group: GroupCoverage, cache: Cache, length: int) -> int:
    assert group.spec.attention_chunk_size is not None
    size = group.block_size
    start = length - length % group.spec.attention_chunk_size
    # A chunk may begin within a block, which is needed as a whole then.
    return _reach(group, cache, start - start % size, length)


def _find_state(group: GroupCoverage, cache: Cache, length: int) -> int:
    step = min(group.block_size, cache.alignment)
    ends = range(length - length % step, 0, -step)
    fitting = (stop for stop in ends if stop % cache.alignment == 0)
    return next((stop for stop in fitting if _holds(group, cache, stop)), 0)


def _reach(group: GroupCoverage, cache: Cache, start: int, length: int) -> int:
    """Return the token up to which a group holds all blocks from a block's start on."""
    while start + group.block_size <= length and _holds(group, cache, start + group.block_size):
        start += group.block_size
    return start


def _holds(group: GroupCoverage, cache: Cache, stop: int) -> bool:
    """Whether the group holds the block that ends after `stop` tokens."""
    unit = stop // cache.unit - 1
    before = bisect_right(group.spans, unit, key=itemgetter(0))
    return before > 0 and unit < group.spans[before - 1][1]
