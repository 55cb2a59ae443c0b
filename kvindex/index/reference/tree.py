"""The radix tree over prefix keys, shared by all ranks: the readable specification.

Theory of operation
-------------------
A *block* is one position of one prompt prefix; its key names the whole prefix. A *run* is a
maximal chain of blocks without a branch and with one set of owners:

```
            root (namespace: block size, LoRA, lookahead)
             │
   [0 1 2 3] {A,B}            A and B hold blocks 0…3
      │    └────────┐
   [4 5] {A}     [4'] {B}     their prompts diverge after block 3
      │
   [6] {}                     a hole: no rank holds block 6,
      │                       but it keeps the place of 7
   [7 8] {A}
```

An *owner* is a (rank, medium, group). `own` cuts runs so that exactly the given blocks get the
owner; `disown` the reverse. Afterwards the neighbourhood is *tidied*: a run without owners and
without children is dropped, and a run is joined with its only child where both have the same
owners. So the tree's shape follows from what is resident, not from the order of events, and
nothing leaks.

`check()` asserts: runs are non-empty, linked both ways, keyed by their first block and numbered
without a gap; no leaf is ownerless; no run could be joined with its parent; the counts agree.

Complexity: `extend` and `walk` cost O(blocks); `own` and `disown` cost O(blocks) plus, at each
cut or join, the smaller half of the run and the children of its end.
Thread safety: none; the index's lock owns the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvindex.index.keys import Namespace
from kvindex.index.reference.keys import Key, KeyMaker, PromptKeys
from kvindex.wire.errors import InvariantError
from kvindex.wire.rank import Rank

__all__ = ["Block", "Owner", "RadixTree", "Run", "Segment", "ancestors"]


class Owner:
    """One (rank, medium, group) that blocks can be resident in; compared by identity."""

    __slots__ = ("group_idx", "medium", "rank", "resident")

    def __init__(self, rank: Rank, medium: str, group_idx: int) -> None:
        self.rank = rank
        self.medium = medium
        self.group_idx = group_idx
        self.resident = 0

    def __repr__(self) -> str:
        return f"Owner({self.rank}, {self.medium}, group {self.group_idx}: {self.resident} blocks)"


class Block:
    """One position of one prefix. `depth` is the number of blocks before it."""

    __slots__ = ("depth", "key", "run")

    def __init__(self, key: Key, depth: int, run: Run) -> None:
        self.key = key
        self.depth = depth
        self.run = run


class Run:
    """A chain of blocks with one set of owners; a root has no blocks and no parent.

    `salted` says whether its prompts start under a salt, or other extra keys.
    """

    __slots__ = ("blocks", "children", "namespace", "owners", "parent", "salted")

    def __init__(
        self,
        namespace: Namespace,
        parent: Run | None,
        blocks: list[Block],
        owners: frozenset[Owner] = frozenset(),
        *,
        salted: bool = False,
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.blocks = blocks
        self.children: dict[Key, Run] = {}
        self.owners = owners
        self.salted = salted


class Segment(NamedTuple):
    """Blocks `start` … `stop - 1` of a prompt, all with the same owners."""

    owners: frozenset[Owner]
    start: int
    stop: int


class RadixTree:
    """Runs of blocks, one root for each namespace."""

    def __init__(self, keys: KeyMaker) -> None:
        self._keys = keys
        self._roots: dict[Namespace, Run] = {}
        self.run_count = 0
        self.block_count = 0

    def namespaces(self) -> list[Namespace]:
        """Return every namespace that holds anything."""
        return list(self._roots)

    def extend(
        self,
        parent: Block | None,
        namespace: Namespace,
        contents: Sequence[bytes],
        *,
        salted: bool = False,
    ) -> list[Block]:
        """Return the chain of blocks with these contents after a parent, made where missing.

        `salted` is for a chain without a parent; others inherit it. New blocks have no owner
        yet: the caller must `own` the last of them, or `prune` it, before anything else.
        """
        key = self._keys.root(namespace) if parent is None else parent.key
        keys = [key := self._keys.child(key, content) for content in contents]
        if parent is None:
            run, used = self.root(namespace), 0
        else:
            run, used = parent.run, parent.depth - parent.run.blocks[0].depth + 1
        chain: list[Block] = []
        for position, key in enumerate(keys):
            if used < len(run.blocks):
                if run.blocks[used].key == key:
                    chain.append(run.blocks[used])
                    used += 1
                    continue
                run, _ = self._split(run, used)
            child = run.children.get(key)
            if child is None:
                return chain + self._append(run, keys[position:], salted)
            run, used = child, 1
            chain.append(run.blocks[0])
        return chain

    def own(self, chain: Sequence[Block], owner: Owner) -> None:
        """Make a chain of consecutive blocks resident in an owner, where they are not yet."""
        for segment in _segments(chain):
            if owner not in segment[0].run.owners:
                self._isolate(segment).owners |= {owner}
                owner.resident += len(segment)
        for segment in _segments(chain):
            self._tidy(segment[0].run)

    def disown(self, blocks: Sequence[Block], owner: Owner) -> None:
        """Remove blocks, in any order, from an owner that holds all of them."""
        for segment in list(_segments(blocks)):
            run = self._isolate(segment)
            run.owners -= {owner}
            owner.resident -= len(segment)
            self._tidy(run)

    def prune(self, block: Block) -> None:
        """Drop the blocks that `extend` made up to this one, unless they have an owner."""
        self._tidy(block.run)

    def walk(self, namespace: Namespace, keys: PromptKeys) -> Iterator[Segment]:
        """Yield the prompt's segments from its start to where the tree no longer agrees.

        Keys are made one by one as the walk goes, so a caller that stops early pays only for the
        segments it has seen.
        """
        run = self._roots.get(namespace)
        depth = 0
        while run is not None and (key := keys[depth]) is not None:
            run = run.children.get(key)
            if run is None:
                return
            start, depth = depth, depth + 1
            for block in run.blocks[1:]:
                if keys[depth] != block.key:
                    break
                depth += 1
            yield Segment(run.owners, start, depth)
            if depth - start < len(run.blocks):
                return

    def root(self, namespace: Namespace) -> Run:
        """Return the run before a namespace's first blocks, made where missing."""
        if namespace not in self._roots:
            self._roots[namespace] = Run(namespace, None, [])
        return self._roots[namespace]

    def _append(self, parent: Run, keys: Sequence[Key], salted: bool) -> list[Block]:
        first = parent.blocks[-1].depth + 1 if parent.blocks else 0
        salted = parent.salted if parent.blocks else salted
        run = Run(parent.namespace, parent, [], salted=salted)
        parent.children[keys[0]] = run
        run.blocks += [Block(key, depth, run) for depth, key in enumerate(keys, first)]
        self.run_count += 1
        self.block_count += len(run.blocks)
        return list(run.blocks)

    def _isolate(self, segment: Sequence[Block]) -> Run:
        """Return a run that covers exactly the segment, which lies within one run."""
        run = segment[0].run
        first = segment[0].depth - run.blocks[0].depth
        stop = first + len(segment)
        if stop < len(run.blocks):
            run, _ = self._split(run, stop)
        if first:
            _, run = self._split(run, first)
        return run

    def _split(self, run: Run, offset: int) -> tuple[Run, Run]:
        """Cut a run before block `offset`; the smaller half moves to a new `Run`."""
        self.run_count += 1
        parent = run.parent
        assert parent is not None
        if offset * 2 >= len(run.blocks):
            tail = Run(run.namespace, run, run.blocks[offset:], run.owners, salted=run.salted)
            tail.children, run.children = run.children, {tail.blocks[0].key: tail}
            del run.blocks[offset:]
            _adopt(tail, tail.blocks, tail.children)
            return run, tail
        head = Run(run.namespace, parent, run.blocks[:offset], run.owners, salted=run.salted)
        del run.blocks[:offset]
        head.children[run.blocks[0].key] = run
        run.parent = head
        parent.children[head.blocks[0].key] = head
        _adopt(head, head.blocks, {})
        return head, run

    def _join(self, parent: Run, child: Run) -> Run:
        """Make one run of a run and its only child of equal owners; the smaller half moves."""
        self.run_count -= 1
        if len(child.blocks) <= len(parent.blocks):
            _adopt(parent, child.blocks, child.children)
            parent.blocks += child.blocks
            parent.children = child.children
            return parent
        _adopt(child, parent.blocks, {})
        child.blocks[:0] = parent.blocks
        child.parent = parent.parent
        assert child.parent is not None
        child.parent.children[child.blocks[0].key] = child
        return child

    def _tidy(self, run: Run) -> None:
        """Restore the invariant around a run whose owners or children changed."""
        while run.parent is not None and not run.owners and not run.children:
            del run.parent.children[run.blocks[0].key]
            self.run_count -= 1
            self.block_count -= len(run.blocks)
            run = run.parent
        if run.parent is None:
            if not run.children:
                self._roots.pop(run.namespace, None)
            return
        if len(run.children) == 1:
            (child,) = run.children.values()
            if child.owners == run.owners:
                run = self._join(run, child)
        above = run.parent
        if above is None or not above.blocks or len(above.children) > 1:
            return
        if above.owners == run.owners:
            self._join(above, run)

    def check(self) -> None:
        """Assert every invariant named in the module's docstring.

        Raises:
            InvariantError: one does not hold.
        """
        runs = blocks = 0
        resident: dict[Owner, int] = {}
        for root in self._roots.values():
            _require(bool(root.children), "a root without children was kept")
            for run in _descendants(root):
                _check_run(run)
                runs += 1
                blocks += len(run.blocks)
                for owner in run.owners:
                    resident[owner] = resident.get(owner, 0) + len(run.blocks)
        _require(runs == self.run_count, f"{runs} runs, counted {self.run_count}")
        _require(blocks == self.block_count, f"{blocks} blocks, counted {self.block_count}")
        for owner, count in resident.items():
            _require(count == owner.resident, f"{owner!r} owns {count} blocks")


def ancestors(block: Block) -> Iterator[Block]:
    """Yield the blocks before a block in its prompts, the nearest first."""
    run: Run | None = block.run
    stop = block.depth - block.run.blocks[0].depth
    while run is not None:
        yield from reversed(run.blocks[:stop])
        run = run.parent
        stop = len(run.blocks) if run is not None else 0


def _segments(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Yield stretches of consecutive blocks that lie in one run, as the runs are by then."""
    segment: list[Block] = []
    for block in blocks:
        if segment and (block.run is not segment[-1].run or block.depth != segment[-1].depth + 1):
            yield segment
            segment = []
        segment.append(block)
    if segment:
        yield segment


def _adopt(run: Run, blocks: Sequence[Block], children: Mapping[Key, Run]) -> None:
    """Point blocks and children that a run gets at it."""
    for block in blocks:
        block.run = run
    for child in children.values():
        child.parent = run


def _descendants(root: Run) -> Iterator[Run]:
    stack = list(root.children.values())
    while stack:
        run = stack.pop()
        yield run
        stack.extend(run.children.values())


def _check_run(run: Run) -> None:
    parent = run.parent
    assert parent is not None
    _require(bool(run.blocks), "a run without blocks")
    _require(parent.children.get(run.blocks[0].key) is run, "a run not keyed by its first block")
    depth = parent.blocks[-1].depth + 1 if parent.blocks else 0
    for block in run.blocks:
        _require(block.run is run, f"block {block.depth} points at another run")
        _require(block.depth == depth, f"block {block.depth} stands at depth {depth}")
        depth += 1
    _require(bool(run.owners or run.children), "a leaf without owners was kept")
    _require(not parent.blocks or run.salted == parent.salted, "a salt amid a prompt")
    if parent.blocks and len(parent.children) == 1:
        _require(parent.owners != run.owners, "two runs that could be one")


def _require(truth: bool, message: str) -> None:
    if not truth:
        raise InvariantError(message)
