"""What an index shows of its ranks: live views, resident blocks, prefixes, statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from kvindex.index.match import Match, Trusts
from kvindex.index.questions import Question
from kvindex.index.tokens import Lora, Namespace, TokenIds, lora_tag
from kvindex.wire import BlockHash, GroupSpec
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank

# Stretches of a prompt --------------------------------------------------------------------------

Spans = list[tuple[int, int]]
"""Stretches [start, stop) of a prompt's blocks or tokens, ascending and not touching."""


class _HasSpec(Protocol):
    @property
    def spec(self) -> GroupSpec: ...


def extend_spans(spans: Spans, start: int, stop: int) -> None:
    """Add [start, stop) to spans whose last one does not reach beyond it."""
    if spans and spans[-1][1] >= start:
        spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
    else:
        spans.append((start, stop))


def union(stretches: Iterable[tuple[int, int]]) -> Spans:
    """Return the spans that cover these stretches, which may overlap, in any order."""
    spans: Spans = []
    for start, stop in sorted(stretches):
        extend_spans(spans, start, stop)
    return spans


def main_group(groups: Mapping[int, _HasSpec]) -> int:
    """Return the index of the group whose blocks an answer counts.

    That is the first that needs all blocks before the cut, else the first.
    """
    return min(groups, key=lambda group_idx: (not groups[group_idx].spec.needs_all, group_idx))


# Views of a rank --------------------------------------------------------------------------------


class ResidentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One resident block of a rank, as `TreeView.walk` yields it.

    Attributes:
        block_hash: the engine's label (ints modulo 2**64).
        depth: blocks before it in its prompt.
        medium: where it is.
        group_idx: KV cache group (0 when the engine names none).
        copies: physical copies there.
        block_size: tokens per block.
        lora: LoRA name or id, or None.
    """

    block_hash: BlockHash
    depth: int
    medium: str
    group_idx: int
    copies: int
    block_size: int
    lora: str | int | None


class Holding(NamedTuple):
    """Which of a prompt's blocks, of one size, a rank holds in one group on one medium."""

    rank: Rank
    group_idx: int
    medium: str
    block_size: int
    lookahead: int
    spans: Spans


class Inspectable(ABC):
    """The part of an index that views and explanations use."""

    # Each of these but the last raises UnknownRankError.

    @abstractmethod
    def _view_size(self, rank: Rank) -> int: ...

    @abstractmethod
    def _view_clear(self, rank: Rank) -> None: ...

    @abstractmethod
    def _view_statistics(self, rank: Rank) -> dict[str, Any]: ...

    @abstractmethod
    def _view_origins(self, rank: Rank) -> tuple[list[Lora], list[tuple[Lora, bytes]]]:
        """Return the LoRAs of resident blocks, and the last salted starts of prompts."""

    @abstractmethod
    def _view_walk(self, rank: Rank) -> Iterator[ResidentBlock]: ...

    @abstractmethod
    def _look(
        self, token_ids: TokenIds, question: Question, trust: Trusts | None
    ) -> tuple[Match, list[Holding]]:
        """Return an answer, and all blocks of the prompt that the ranks hold at that moment."""


class TreeView:
    """A live view of what one rank holds.

    Thread safety: as the index.

    Raises:
        UnknownRankError: by every method once the rank was removed from the index.
    """

    __slots__ = ("_index", "rank")

    def __init__(self, index: Inspectable, rank: Rank) -> None:
        self._index = index
        self.rank = rank

    def __len__(self) -> int:
        """Return the number of resident blocks of the rank, each counted once. O(1)."""
        return self._index._view_size(self.rank)

    def clear(self) -> None:
        """Drop everything the rank holds and all that was learned from its events; it stays known.

        Settings of `Index.configure` stay. Complexity: O(blocks of the rank).
        """
        self._index._view_clear(self.rank)

    def statistics(self) -> dict[str, Any]:
        """Return the rank's part of `Index.statistics()["ranks"]`."""
        return self._index._view_statistics(self.rank)

    def walk(self) -> Iterator[ResidentBlock]:
        """Iterate over a snapshot of the resident blocks, once for each medium and group.

        Complexity: O(blocks of the rank).
        """
        return self._index._view_walk(self.rank)


# Prefixes ---------------------------------------------------------------------------------------


class PrefixNode(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that follow one another: no prompt leaves in between, and the same ranks hold all.

    Attributes:
        parent: row of the node before it in `Prefixes.nodes`, always a smaller one; -1 where
            prompts begin.
        depth: blocks before it in its prompts.
        blocks: blocks of its own, at most 8,192: a longer chain continues in its only child.
        block_size: tokens per block. Of ranks whose groups have several block sizes, this is
            what divides all of them, and a block is held where an engine's block ends.
        lora: LoRA name or id, or None.
        lookahead: tokens after a block that its identity covers too (EAGLE), 0 for most engines.
        salted: whether its prompts start under a salt, or other extra keys.
        ranks: how many ranks hold it, on any medium; 0 is a hole, which keeps the place of later
            nodes.
        by_medium: how many ranks hold it on each medium. A rank may hold it on several.
        rows: which ranks, on each medium: bit `r % 8` of byte `r // 8` stands for
            `Prefixes.ranks[r]`. `Prefixes.holders` reads it.
        children: nodes that follow it directly.
        left_out: how many of these are not in `Prefixes.nodes`.
        left_out_blocks: their own blocks, as far as they were looked at, without later nodes.
    """

    parent: int
    depth: int
    blocks: int
    block_size: int
    lora: str | int | None
    lookahead: int
    salted: bool
    ranks: int
    by_medium: Mapping[str, int]
    rows: Mapping[str, bytes]
    children: int
    left_out: int
    left_out_blocks: int


class Prefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranks hold which prefixes, the most widely held first; `Index.prefixes` makes it.

    Attributes:
        nodes: in the order of the walk, each after its parent.
        ranks: the ranks that the nodes' `rows` stand for.
        children: nodes that begin prompts, in all namespaces that were looked at.
        left_out: how many of these are not in `nodes`.
        left_out_blocks: their own blocks, as far as they were looked at.
        looked_at: nodes that were looked at, shown or not: the cost of the walk.
        unique_blocks: blocks in the whole tree, each counted once however many ranks hold it.

    Thread safety: immutable.
    """

    nodes: tuple[PrefixNode, ...]
    ranks: tuple[Rank, ...]
    children: int
    left_out: int
    left_out_blocks: int
    looked_at: int
    unique_blocks: int

    def holders(self, node: PrefixNode, medium: str | None = None) -> tuple[Rank, ...]:
        """Return the ranks that hold a node, on one medium ("GPU") or on any. O(ranks)."""
        held = 0
        for name, rows in node.rows.items():
            if medium in (None, name):
                held |= int.from_bytes(rows, "little")
        return tuple(rank for row, rank in enumerate(self.ranks) if held >> row & 1)


def prefix_node(
    numbers: Sequence[Any], namespace: Namespace, holders: tuple[int, Mapping[str, bytes]]
) -> PrefixNode:
    """Return a node from the core's numbers, its namespace, and its ranks: how many, and which."""
    parent, depth, blocks, _, _, salted, children, left_out, left_out_blocks = numbers
    ranks, rows = holders
    return PrefixNode(
        parent=parent,
        depth=depth,
        blocks=blocks,
        block_size=namespace.block_size,
        lora=namespace.lora,
        lookahead=namespace.lookahead,
        salted=salted,
        ranks=ranks,
        by_medium={name: int.from_bytes(bits, "little").bit_count() for name, bits in rows.items()},
        rows=rows,
        children=children,
        left_out=left_out,
        left_out_blocks=left_out_blocks,
    )


def walk_limit(name: str, value: object) -> int:
    """Return a limit of a walk, capped; reject one that could show nothing."""
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be an int from 1 on, not {value!r}")
    return min(value, 2**32 - 1)  # more than any index has


# Statistics of a rank ---------------------------------------------------------------------------

_MAX_LORAS = 64  # distinct LoRAs of a rank that statistics name


def with_advice(statistics: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's statistics with advice on its `CacheSettings`."""
    advice = []
    stored = {idx: group for idx, group in statistics["groups"].items() if group["block_size"]}
    unknown = [idx for idx, group in stored.items() if not group["known"]]
    # vLLM up to 0.21 reports no kinds. One group alone is full attention.
    if unknown and len(stored) > 1:
        advice.append(
            f"the events do not report the kinds of groups {', '.join(unknown)}: answers are "
            "upper bounds until CacheSettings(groups={...}) names them"
        )
    for idx, group in stored.items():
        if group["kind"] == "chunked_local_attention" and group["attention_chunk_size"] is None:
            advice.append(
                f"the events do not report the size of group {idx}'s chunks: answers are too low "
                "until GroupSpec(attention_chunk_size=...) names it"
            )
    if statistics["reannounced"] and statistics["removed_unknown"]:
        advice.append(
            f'report_mode="full": {statistics["removed_unknown"]} removals named blocks that are '
            "not held, so some stores that were taken for announcements were copies"
        )
    return {**statistics, "advice": advice}


def shown_loras(counts: Mapping[Lora, int]) -> dict[str, int]:
    """Return the blocks of each LoRA by its name in statistics: those with most, and the rest."""
    shown = {
        f"id {lora}" if isinstance(lora, int) else lora or "": counts[lora]
        for lora in largest_loras(counts)
    }
    rest = sum(counts.values()) - sum(shown.values())
    return {**shown, "(other)": rest} if rest else shown


def largest_loras(counts: Mapping[Lora, int]) -> list[Lora]:
    """Return the LoRAs with most blocks."""
    # Of equal ones by their tag: names and numbers do not compare.
    return sorted(counts, key=lambda lora: (-counts[lora], lora_tag(lora)))[:_MAX_LORAS]
