"""Who holds which prefixes, the slow way: all places of all ranks as one trie of single blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvindex import Prefixes, Rank
from tests.index.index_model import Content, Place, RankModel


class Shape(NamedTuple):
    """A node and what follows it; siblings are sorted, since it is not said in which order."""

    block_size: int
    lora: str | int | None
    lookahead: int
    salted: bool
    depth: int
    blocks: int
    holders: tuple[tuple[Rank, str], ...]  # sorted
    following: tuple[Shape, ...]


def forest(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    return tuple(sorted(shapes, key=repr))


def expected(models: Mapping[Rank, RankModel]) -> tuple[Shape, ...]:
    holders: dict[Place, set[tuple[Rank, str]]] = defaultdict(set)
    for rank, model in models.items():
        for (block_hash, (medium, _), _), copies in model.copies.items():
            if copies and block_hash in model.places:
                holders[model.places[block_hash]].add((rank, medium))
    following: dict[Place, set[Place]] = defaultdict(set)
    for space, prefix in list(holders):
        for stop in range(len(prefix)):
            before, after = Place(space, prefix[:stop]), Place(space, prefix[: stop + 1])
            following[before].add(after)
    roots = [place for place in following if not place.prefix]
    return forest(_shape(first, holders, following) for root in roots for first in following[root])


def _shape(
    place: Place,
    holders: Mapping[Place, set[tuple[Rank, str]]],
    following: Mapping[Place, set[Place]],
) -> Shape:
    first, held = place, holders.get(place, set())
    while len(after := following.get(place, set())) == 1:
        (child,) = after
        if holders.get(child, set()) != held:
            break
        place = child
    space = place.namespace
    return Shape(
        space.unit,
        space.lora,
        space.lookahead,
        _salted(place.prefix[0]),
        len(first.prefix) - 1,
        len(place.prefix) - len(first.prefix) + 1,
        tuple(sorted(held)),
        forest(_shape(child, holders, following) for child in after),
    )


def _salted(first: Content) -> bool:
    return any(value is not None for _, value in first[1])


def shown(walk: Prefixes) -> tuple[Shape, ...]:
    """What an index says, in the same form."""
    following: dict[int, list[int]] = defaultdict(list)
    for row, node in enumerate(walk.nodes):
        following[node.parent].append(row)

    def shape(row: int) -> Shape:
        node: Any = walk.nodes[row]
        held = {(rank, name) for name in node.rows for rank in walk.holders(node, name)}
        assert node.by_medium == {name: len(walk.holders(node, name)) for name in node.rows}
        assert node.ranks == len(walk.holders(node))
        assert node.children == len(following[row]) + node.left_out
        return Shape(
            node.block_size,
            node.lora,
            node.lookahead,
            node.salted,
            node.depth,
            node.blocks,
            tuple(sorted(held)),
            forest(map(shape, following[row])),
        )

    return forest(map(shape, following[-1]))
