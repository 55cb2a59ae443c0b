"""Recordings: one publisher's each, in the order in which it numbered its batches."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvindex import (
    CacheSettings,
    ConfigurationError,
    DecodeError,
    EventBatch,
    Rank,
    RankAdded,
    RankBatch,
    RankLost,
    RankRestarted,
    StreamItem,
)
from kvindex.tools.cli.arguments import cache_of
from kvindex.tools.cli.output import Progress
from kvindex.wire import RecordedMessage, decode_batch, parse_live, parse_replay, read_recording

__all__ = ["Recorded", "recordings_of"]


def recordings_of(arguments: argparse.Namespace, *, resets: bool = True) -> list[Recorded]:
    """Return the recordings that a command's arguments name.

    Args:
        arguments: `files`, `with_replayed`, and the options of `add_cache_options`.
        resets: whether a gap drops what the rank held.

    Raises:
        ConfigurationError: a file cannot be opened, or two would be one worker.
    """
    stems: dict[str, Path] = {}
    for path in arguments.files:
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        other = stems.setdefault(path.stem, path)
        if other is not path:
            raise ConfigurationError(
                f"{other} and {path} would both be the worker {path.stem!r}: rename one"
            )
    cache = cache_of(arguments)
    return [
        Recorded(path, resets=resets, with_replayed=arguments.with_replayed, cache=cache)
        for path in arguments.files
    ]


class Recorded:
    """Reads one publisher's recording: duplicates are dropped, gaps and restarts are noted.

    A lower or equal number with a newer timestamp is a restart, with another one a duplicate. A gap
    drops what the rank held (`resets`), and is filled from the replay replies (`with_replayed`).

    Attributes:
        seq: number of the last applied batch.
        complete: whether every batch since the publisher's first was applied.
        counters: `live`, `replies`: records; `applied`: batches; `duplicates`, `restarts`; `gaps`
            and the batches `lost` in them; `filled`: batches from the replies; `undecodable`;
            `bad_frames`: records of another shape; `resets`: how often a loss dropped the blocks.
        error: why the file could not be read to its end, or "".
    """

    def __init__(
        self, path: Path, *, resets: bool, with_replayed: bool, cache: CacheSettings
    ) -> None:
        self.path = path
        self.seq: int | None = None
        self.complete = False
        self.counters: Counter[str] = Counter()
        self.error = ""
        self._resets = resets
        self._with_replayed = with_replayed
        self._cache = cache
        self._ts = 0.0
        self._damaged = -1  # highest number of this epoch that could not be decoded
        self._ranks: set[Rank] = set()
        self._replies: dict[int, EventBatch] = {}
        self._items: list[StreamItem] = []  # not handed on yet

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that its batches name, sorted; rank 0 if there is none."""
        return sorted(self._ranks) or [Rank(self.path.stem)]

    def items(self, progress: Progress) -> Iterator[StreamItem]:
        """Yield what an event stream would have yielded of the whole file, in order.

        A file that is cut off, or no recording, is read as far as it goes: see `error`.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        if self._with_replayed:
            self._collect_replies()
        try:
            for message in self._messages(progress):
                if message.kind == "live":
                    self.counters["live"] += 1
                    self._live(message.frames)
                    yield from self._drained()
                else:
                    self.counters["replies"] += 1
            self._finish()
        except DecodeError as error:
            self.error = str(error)
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.path}: {error}") from error
        yield from self._drained()

    def _drained(self) -> list[StreamItem]:
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
        except (DecodeError, OSError):
            pass  # `items` meets it too
        self._replies = {seq: batch for seq, batch in replies.items() if seq not in live}

    def _live(self, frames: Sequence[bytes]) -> None:
        try:
            frame = parse_live(frames)
        except DecodeError:
            self.counters["bad_frames"] += 1
            return
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
                self.counters["filled"] += 1
                self._apply(number, self._replies.pop(number))
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
            self.counters["resets"] += self._resets
            lost = (self.counters["restarts"], "not_recorded", self.seq + 1, seq - 1, self._resets)
            self._items += [RankLost(rank, *lost) for rank in self._ranks]
        return missing

    def _apply(self, seq: int, batch: EventBatch) -> None:
        rank = Rank(self.path.stem, batch.data_parallel_rank or 0)
        if rank not in self._ranks:
            self._ranks.add(rank)
            self._items.append(RankAdded(rank, self._cache))
        self._items.append(RankBatch(rank, self.counters["restarts"], seq, batch, False))
        self.seq, self._ts = seq, batch.ts
        self.counters["applied"] += 1

    def statistics(self) -> dict[str, int]:
        """Return the counters, those at zero included."""
        names = ("live", "replies", "applied", "duplicates", "gaps", "lost", "resets", "restarts")
        return {n: self.counters[n] for n in (*names, "filled", "undecodable", "bad_frames")}
