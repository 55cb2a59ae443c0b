"""What an audit must find, by brute force over whole prefixes as tuples of tokens.

Nothing here is quick or bounded. Who holds what at a moment comes from the fake engines' caches
themselves, not from their events, as far as other ranks are concerned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, Event, Rank
from kvindex.testing import FakeEngine

# LoRA, salt, and all tokens up to the end of a block.
Path = tuple[object, object, tuple[int, ...]]


class ModelRank:
    """One rank's labels, and what it evicted, oldest first."""

    def __init__(self) -> None:
        self.copies: dict[tuple[object, str], int] = Counter()
        self.paths: dict[object, Path | None] = {}
        self.evicted: list[Path] = []
        self.lifetimes = 0

    def labels(self) -> set[object]:
        return {label for (label, _), count in self.copies.items() if count}

    def held(self) -> set[Path]:
        return {p for label in self.labels() if (p := self.paths[label]) is not None}

    def forget(self) -> None:
        self.copies.clear()
        self.evicted.clear()


class Model:
    """The fleet by brute force; feed it each batch's events before the next request is served."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.ranks: dict[Rank, ModelRank] = {}
        self.tokens: dict[Rank, Counter[str]] = {}
        self.distances: dict[Rank, Counter[int]] = {}
        self.peaks: Counter[Rank] = Counter()  # blocks on the device, copies included
        # Of one cache for all: what no rank holds any more, oldest first; the most blocks of each
        # rank; tokens by how many times as large it must be.
        self.evicted: list[Path] = []
        self.most: Counter[Rank] = Counter()
        self.needs: Counter[float] = Counter()

    def add(self, rank: Rank) -> None:
        self.ranks[rank] = ModelRank()
        self.tokens[rank] = Counter()
        self.distances[rank] = Counter()

    def apply(
        self, rank: Rank, events: Sequence[Event], elsewhere: Mapping[Rank, set[Path]]
    ) -> None:
        """Take one batch, while the other ranks hold what `elsewhere` says."""
        me = self.ranks[rank]
        # Distances are as of the batch's beginning.
        frozen, room = [*me.evicted], self._room()
        gone = [*self.evicted]
        evicted_now: list[Path] = []
        for run in joined(events):
            first = run[0]
            if isinstance(first, AllBlocksCleared):
                me.forget()
                self.evicted.clear()
                frozen, gone, evicted_now = [], [], []
            elif isinstance(first, BlockRemoved):
                self._remove(me, first, evicted_now)
            elif first.medium in (None, "GPU"):
                self._need(me, run, elsewhere, room, gone, evicted_now)
                self._store(rank, run, elsewhere, frozen, evicted_now)
            else:
                for event in run:
                    self._copy(rank, event)
        held = me.held()
        for path in evicted_now:
            if path not in held:
                if path in me.evicted:
                    me.evicted.remove(path)
                me.evicted.append(path)
        me.evicted = [path for path in me.evicted if path not in held]
        on_device = sum(count for (_, medium), count in me.copies.items() if medium == "GPU")
        self.peaks[rank] = max(self.peaks[rank], on_device)
        self.most[rank] = max(self.most[rank], on_device, len(me.labels()))
        anywhere = set().union(*(one.held() for one in self.ranks.values()))
        gone = [path for path in (*self.evicted, *evicted_now) if path not in anywhere]
        self.evicted = [path for i, path in enumerate(gone) if path not in gone[i + 1 :]]

    def _room(self) -> int:
        """Blocks that one cache for all has beside what the ranks hold, each path once."""
        ranks = self.ranks.values()
        paths = {path for rank in ranks for path in rank.held()}
        unplaced = sum(rank.paths[label] is None for rank in ranks for label in rank.labels())
        return self.most.total() - len(paths) - unplaced

    def _need(
        self,
        me: ModelRank,
        run: Sequence[Event],
        elsewhere: Mapping[Rank, set[Path]],
        room: int,
        gone: list[Path],
        evicted_now: list[Path],
    ) -> None:
        """Count by how many times as large one cache for all must be to hold a run's blocks."""
        held, need = me.held(), 0.0
        for _, path in self._paths(me, run):
            if path is None or whole(path, held, self.size):
                continue
            if path not in held and not any(path in paths for paths in elsewhere.values()):
                memory = evicted_now if path in evicted_now else gone
                if path not in memory:
                    return
                distance = memory[::-1].index(path) + 1
                need = max(need, 1 + (distance - room) / max(1, self.most.total()))
            self.needs[need] += self.size

    def _remove(self, me: ModelRank, event: BlockRemoved, evicted_now: list[Path]) -> None:
        for label in event.block_hashes:
            place = (label, event.medium or "GPU")
            if not me.copies[place]:
                continue
            me.copies[place] -= 1
            if label not in me.labels():
                me.lifetimes += 1
                path = me.paths[label]
                if path is not None:
                    evicted_now.append(path)

    def _copy(self, rank: Rank, event: Event) -> None:
        me = self.ranks[rank]
        assert isinstance(event, BlockStored)
        for label in event.block_hashes:
            self.tokens[rank]["offloaded"] += self.size
            if label not in me.labels():
                me.paths[label] = None
            me.copies[label, str(event.medium)] += 1

    def _store(
        self,
        rank: Rank,
        run: Sequence[Event],
        elsewhere: Mapping[Rank, set[Path]],
        frozen: list[Path],
        evicted_now: list[Path],
    ) -> None:
        me, counts = self.ranks[rank], self.tokens[rank]
        blocks = list(self._paths(me, run))
        held = me.held()
        labels = me.labels()
        for label, path in blocks:
            if path is not None and whole(path, held, self.size):
                loaded = label in labels and not me.copies[label, "GPU"]
                counts["returned" if loaded else "here"] += self.size
                counts["computed"] += 0 if loaded else self.size
                continue
            counts["computed"] += self.size
            if path is None:
                counts["unknown"] += self.size
                continue
            holders = [r for r, paths in elsewhere.items() if whole(path, paths, self.size)]
            if holders:
                near = any(r.worker == rank.worker for r in holders)
                counts["same_worker" if near else "other_worker"] += self.size
            distance = self._count_evicted(path, held, counts, bool(holders), frozen, evicted_now)
            if distance:
                self.distances[rank][distance] += self.size
        for label, path in blocks:
            if label not in labels or me.paths[label] is None:
                me.paths[label] = path
            me.copies[label, "GPU"] += 1

    def _count_evicted(
        self,
        path: Path,
        held: set[Path],
        counts: Counter[str],
        elsewhere: bool,
        frozen: list[Path],
        evicted_now: list[Path],
    ) -> int:
        """Count a block that the rank could not use; return how many blocks too few it had."""
        if path in held:
            counts["unreachable"] += 0 if elsewhere else self.size
            return 0
        if path in evicted_now:
            distance = len(evicted_now) - max(i for i, p in enumerate(evicted_now) if p == path)
        elif path in frozen:
            distance = len(frozen) - frozen.index(path)
        else:
            counts["first"] += 0 if elsewhere else self.size
            return 0
        counts["evicted"] += self.size
        counts["evicted_elsewhere"] += self.size if elsewhere else 0
        return distance

    def _paths(self, me: ModelRank, run: Sequence[Event]) -> Iterator[tuple[object, Path | None]]:
        known = me.labels()
        first = run[0]
        assert isinstance(first, BlockStored)
        salt = first.cache_salt or next(
            (k for k in (first.extra_keys or [None])[0] or () if k != first.lora_name), None
        )
        path: Path | None = (first.lora_name, salt, ())
        if first.parent_block_hash is not None:
            parent = first.parent_block_hash
            path = me.paths[parent] if parent in known else None
        for event in run:
            assert isinstance(event, BlockStored)
            for i, label in enumerate(event.block_hashes):
                own = tuple(event.token_ids[i * self.size : (i + 1) * self.size])
                if path is not None:
                    path = (path[0], path[1], path[2] + own)
                elif label in known:
                    path = me.paths[label]
                yield label, path


def whole(path: Path, held: set[Path], size: int) -> bool:
    lora, salt, tokens = path
    return all((lora, salt, tokens[:end]) in held for end in range(size, len(tokens) + 1, size))


def joined(events: Sequence[Event]) -> list[list[Event]]:
    """Stores that go on where the one before ended, together; all others alone."""
    runs: list[list[Event]] = []
    for event in events:
        before = runs[-1][-1] if runs else None
        if (
            isinstance(event, BlockStored)
            and isinstance(before, BlockStored)
            and event.token_ids
            and before.token_ids
            and event.medium == before.medium
            and event.parent_block_hash is not None
            and event.parent_block_hash == before.block_hashes[-1]
        ):
            runs[-1].append(event)
        else:
            runs.append([event])
    return runs


def contents(engine: FakeEngine) -> set[Path]:
    """What the engine's cache holds on any medium, asked of the cache itself."""
    return {
        (held.lora, held.salt, tuple(held.prefix))
        for held in engine.resident_prefixes()
        if not held.group_idx
    }
