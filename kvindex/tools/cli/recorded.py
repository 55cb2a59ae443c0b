"""One recording, in order as its publisher numbered it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from kvindex import (
    CacheSettings,
    DecodeError,
    EventBatch,
    Rank,
    RankAdded,
    RankBatch,
    RankLost,
    RankRestarted,
    StreamItem,
)
from kvindex.tools.cli.output import Progress
from kvindex.wire import (
    LiveFrame,
    RecordedMessage,
    decode_batch,
    parse_live,
    parse_replay,
    read_recording,
)

__all__ = ["Recorded"]


class Recorded:
    """Reads one publisher's recording: what came twice once, gaps and restarts noticed.

    A lower or equal number with a newer timestamp is a restart, with another one a duplicate.

    Args:
        path: the recording; its stem names the worker.
        on_loss: at a gap, "reset" has what the rank held dropped, "keep" has it kept.
        cache: what the events leave unsaid of the publisher's cache.

    Attributes:
        ranks: the ranks that its batches name, sorted.
        seq: number of the last applied batch.
        complete: whether every batch since the publisher's first was applied.
        counters: `live`, `replies`: records; `applied`: batches; `duplicates`, `restarts`; `gaps`
            and the batches `lost` in them; `filled`: batches taken from the replies; `undecodable`;
            `bad_frames`: records of another shape; `resets`: how often a loss dropped the blocks.
        error: why the file could not be read to its end, or "".
    """

    def __init__(
        self,
        path: Path,
        *,
        on_loss: Literal["reset", "keep"],
        cache: CacheSettings | None = None,
    ) -> None:
        self.path = path
        self.seq: int | None = None
        self.complete = False
        self.counters: Counter[str] = Counter()
        self.error = ""
        self._on_loss = on_loss
        self._cache = cache or CacheSettings()
        self._ts = 0.0
        self._damaged = -1  # highest number of this epoch that could not be decoded
        self._ranks: set[Rank] = set()
        self._replies: dict[int, EventBatch] = {}
        self._items: list[StreamItem] = []  # not handed on yet

    @property
    def records(self) -> int:
        """How many records were read."""
        return self.counters["live"] + self.counters["replies"]

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that its batches name, sorted; rank 0 if there is none."""
        return sorted(self._ranks) or [Rank(self.path.stem)]

    def items(self, *, with_replayed: bool, progress: Progress) -> Iterator[StreamItem]:
        """Yield what an event stream would have yielded of the whole file, in order.

        Args:
            with_replayed: fill what the live records lack from the replay replies.
            progress: told how far it is.

        Raises:
            DecodeError: the file is cut off or no recording; what came before was yielded.
            OSError: it cannot be read.
        """
        if with_replayed:
            self._collect_replies()
        for message in self._messages(progress):
            self.counters["live" if message.kind == "live" else "replies"] += 1
            if message.kind == "live":
                try:
                    frame = parse_live(message.frames)
                except DecodeError:
                    self.counters["bad_frames"] += 1
                else:
                    self._live(frame)
                    yield from self._taken()
        self._finish()
        yield from self._taken()

    def _taken(self) -> list[StreamItem]:
        items, self._items = self._items, []
        return items

    def _messages(self, progress: Progress) -> Iterator[RecordedMessage]:
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size or 1
            for number, message in enumerate(read_recording(file)):
                if number % 64 == 0:
                    progress.show(f"{self.path.name}: {file.tell() * 100 // size} %")
                yield message

    def _collect_replies(self) -> None:
        """Remember the replies whose numbers no live record has."""
        live: set[int] = set()
        replies: dict[int, EventBatch] = {}
        try:
            for message in read_recording(self.path):
                try:
                    if message.kind == "live":
                        frame = parse_live(message.frames)
                        decode_batch(frame.payload)
                        live.add(frame.seq)
                    elif not (reply := parse_replay(message.frames)).end:
                        replies[reply.seq] = decode_batch(reply.payload)
                except DecodeError:
                    continue  # `items` counts it
        except DecodeError:
            pass  # `items` meets it too, and raises
        self._replies = {seq: batch for seq, batch in replies.items() if seq not in live}

    def _live(self, frame: LiveFrame) -> None:
        try:
            batch = decode_batch(frame.payload)
        except DecodeError:
            self.counters["undecodable"] += 1
            self._damaged = max(self._damaged, frame.seq)
            return  # a hole then, unless a reply fills it
        if self.seq is not None and frame.seq <= self.seq:
            if batch.ts <= self._ts:
                self.counters["duplicates"] += 1
                return
            self._restart()
        self._close_gap(frame.seq, batch.ts)
        self._apply(frame.seq, batch)

    def _restart(self) -> None:
        self.counters["restarts"] += 1
        self.seq, self._damaged = None, -1
        epoch = self.counters["restarts"]
        self._items += [RankRestarted(rank, epoch, "seq_backwards") for rank in self._ranks]

    def _finish(self) -> None:
        """Fill what follows the last live batch; a damaged end is a loss too."""
        first = 0 if self.seq is None else self.seq + 1
        later = [n for n, batch in self._replies.items() if n >= first and batch.ts >= self._ts]
        last = max([self._damaged, *later])
        if last >= first:
            self._close_gap(last + 1, math.inf)

    def _close_gap(self, seq: int, ts: float) -> None:
        """Fill the numbers before `seq` from the replies; what stays missing is a loss."""
        first = 0 if self.seq is None else self.seq + 1
        missing = 0
        for number in sorted(n for n in self._replies if first <= n < seq):
            if self._ts <= self._replies[number].ts <= ts:  # of this epoch of the publisher
                missing += self._lost(number)
                self._fill(number)
        missing += self._lost(seq)
        self.counters["gaps"] += bool(missing)

    def _lost(self, seq: int) -> int:
        """Note the batches between the last applied one and `seq`; return how many."""
        if self.seq is None:
            self.complete = seq == 0  # joined later: partial, but true
            return 0
        missing = seq - self.seq - 1
        if missing:
            self.counters["lost"] += missing
            self.complete = False
            reset = self._on_loss == "reset"
            self.counters["resets"] += reset
            lost = (self.counters["restarts"], "not_recorded", self.seq + 1, seq - 1, reset)
            self._items += [RankLost(rank, *lost) for rank in self._ranks]
        return missing

    def _fill(self, seq: int) -> None:
        self.counters["filled"] += 1
        self._apply(seq, self._replies.pop(seq))

    def _apply(self, seq: int, batch: EventBatch) -> None:
        rank = Rank(self.path.stem, batch.data_parallel_rank or 0)
        self._know(rank)
        self._items.append(RankBatch(rank, self.counters["restarts"], seq, batch, False))
        self.seq, self._ts = seq, batch.ts
        self.counters["applied"] += 1

    def _know(self, rank: Rank) -> None:
        if rank not in self._ranks:
            self._ranks.add(rank)
            self._items.append(RankAdded(rank, self._cache))

    def statistics(self) -> dict[str, int]:
        """Return the counters, those at zero included."""
        names = ("live", "replies", "applied", "duplicates", "gaps", "lost", "resets", "restarts")
        return {n: self.counters[n] for n in (*names, "filled", "undecodable", "bad_frames")}

    def to_dict(self) -> dict[str, Any]:
        """Return what is known of the file as plain values."""
        return {
            "path": str(self.path),
            "ranks": [str(rank) for rank in self.ranks],
            "counters": self.statistics(),
            "error": self.error or None,
        }
