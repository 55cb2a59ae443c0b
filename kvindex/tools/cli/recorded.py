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
                    yield from self._live(message.frames)
                else:
                    self.counters["replies"] += 1
            yield from self._finish()
        except DecodeError as error:
            self.error = str(error)
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.path}: {error}") from error

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

    @property
    def _next(self) -> int:
        """The number that follows the last applied batch."""
        return 0 if self.seq is None else self.seq + 1

    def _live(self, frames: Sequence[bytes]) -> Iterator[StreamItem]:
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
            self.counters["restarts"] += 1
            self.seq, self._damaged = None, -1
            for rank in self._ranks:
                yield RankRestarted(rank, self.counters["restarts"], "seq_backwards")
        yield from self._close_gap(frame.seq, batch.ts)
        yield from self._apply(frame.seq, batch)

    def _finish(self) -> Iterator[StreamItem]:
        """Fill what follows the last live batch; a damaged end is a loss too."""
        replies = self._replies.items()
        later = [n for n, batch in replies if n >= self._next and batch.ts >= self._ts]
        last = max([self._damaged, *later])
        if last >= self._next:
            yield from self._close_gap(last + 1, math.inf)

    def _close_gap(self, seq: int, ts: float) -> Iterator[StreamItem]:
        """Fill the numbers before `seq` from the replies; what stays missing is a loss."""
        lost = self.counters["lost"]
        for number in sorted(n for n in self._replies if self._next <= n < seq):
            if self._ts <= self._replies[number].ts <= ts:  # of this epoch of the publisher
                yield from self._lose_until(number)
                self.counters["filled"] += 1
                yield from self._apply(number, self._replies.pop(number))
        yield from self._lose_until(seq)
        self.counters["gaps"] += self.counters["lost"] > lost

    def _lose_until(self, seq: int) -> Iterator[StreamItem]:
        """Note the batches between the last applied one and `seq`."""
        first = self._next
        if self.seq is None:
            self.complete = seq == 0  # joined later: partial, but true
        elif first < seq:
            self.counters["lost"] += seq - first
            self.complete = False
            self.counters["resets"] += self._resets
            lost = (self.counters["restarts"], "not_recorded", first, seq - 1, self._resets)
            yield from (RankLost(rank, *lost) for rank in self._ranks)

    def _apply(self, seq: int, batch: EventBatch) -> Iterator[StreamItem]:
        rank = Rank(self.path.stem, batch.data_parallel_rank or 0)
        if rank not in self._ranks:
            self._ranks.add(rank)
            yield RankAdded(rank, self._cache)
        yield RankBatch(rank, self.counters["restarts"], seq, batch, False)
        self.seq, self._ts = seq, batch.ts
        self.counters["applied"] += 1

    def statistics(self) -> dict[str, int]:
        """Return the counters, those at zero included."""
        names = ("live", "replies", "applied", "duplicates", "gaps", "lost", "resets", "restarts")
        return {n: self.counters[n] for n in (*names, "filled", "undecodable", "bad_frames")}
