"""Recordings: one publisher's each, in the order in which it numbered its batches."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from kvindex.subscribe.resumption import Claim, settle
from kvindex.tools.cli.arguments import cache_of
from kvindex.tools.cli.output import Progress
from kvindex.wire import RecordedMessage, decode_batch, parse_live, parse_replay, read_recording


def recordings_of(arguments: argparse.Namespace, *, resets: bool = True) -> list[Recorded]:
    """Return the recordings that a command's arguments name.

    Args:
        arguments: `files`, `with_replayed`, and the options of `add_cache_options`.
        resets: whether a gap drops what the rank held.

    Raises:
        ConfigurationError: a file cannot be opened, or two would be one worker or one rank.
    """
    cache, replayed = cache_of(arguments), arguments.with_replayed
    ranks = _ranks_of(arguments.files)
    return [
        Recorded(path, ranks.get(path), resets=resets, with_replayed=replayed, cache=cache)
        for path in arguments.files
    ]


def _ranks_of(paths: Iterable[Path]) -> dict[Path, Rank]:
    """Return the rank of each recording that says whose it is, named as a subscription names it."""
    by_worker: dict[str, dict[Path, Claim | None]] = {}
    for path in paths:
        worker, claim = _publisher_of(path)
        files = by_worker.setdefault(worker, {})
        for other, claimed in files.items():
            if claim is None or claimed is None:
                raise ConfigurationError(
                    f"{other} and {path} would both be the worker {worker!r}: rename one"
                )
            if claim.expected == claimed.expected:
                rank = str(Rank(worker, claim.expected))
                raise ConfigurationError(
                    f"{other} and {path} both hold {rank!r}: read one at a time"
                )
        files[path] = claim
    ranks = {}
    for worker, files in by_worker.items():
        claims = {path: claim for path, claim in files.items() if claim is not None}
        for path, dp_rank in zip(claims, settle(list(claims.values())), strict=True):
            ranks[path] = Rank(worker, dp_rank)
    return ranks


def _publisher_of(path: Path) -> tuple[str, Claim | None]:
    """Return a recording's worker, and its dp_rank by its port and by its first readable batch."""
    worker, claim = path.stem, None
    try:
        for message in read_recording(path):
            if claim is not None:
                if (named := _dp_rank_in(message)) is not None:
                    return worker, claim._replace(named=named)
            elif message.kind == "publisher":
                name, dp_rank = message.frames
                worker, claim = name.decode(), Claim(int(dp_rank), None)
            else:
                break  # what says whose they are comes first
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except DecodeError:
        pass  # `Recorded.items` meets it too
    except ValueError as error:
        raise ConfigurationError(f"{path}: its first record names no rank: {error}") from error
    return worker, claim


def _dp_rank_in(message: RecordedMessage) -> int | None:
    parse = parse_live if message.kind == "live" else parse_replay
    try:
        return decode_batch(parse(message.frames).payload).data_parallel_rank
    except DecodeError:
        return None  # `Recorded.items` counts it


class Recorded:
    """Reads one publisher's recording: duplicates are dropped, gaps and restarts are noted.

    A lower or equal number with a newer timestamp is a restart, with another one a duplicate. A gap
    drops what the rank held (`resets`), and is filled from the replay replies (`with_replayed`).

    Args:
        path: the file.
        rank: whose batches they are; None if the file does not say: then the file's name is the
            worker, and each batch names its dp_rank.

    Attributes:
        path: as given.
        seq: number of the last applied batch.
        complete: whether every batch since the publisher's first was applied.
        counters: `live`, `replies`: records; `applied`: batches; `duplicates`, `restarts`; `gaps`
            and the batches `lost` in them; `filled`: batches from the replies; `undecodable`;
            `bad_frames`: records of another shape; `resets`: how often a loss dropped the blocks.
        error: why the file could not be read to its end, or "".
    """

    def __init__(
        self,
        path: Path,
        rank: Rank | None,
        *,
        resets: bool,
        with_replayed: bool,
        cache: CacheSettings,
    ) -> None:
        self.path = path
        self._rank = rank
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
        """The ranks of its batches, sorted; if there is none, the one it says, or rank 0."""
        return sorted(self._ranks) or [self._rank or Rank(self.path.stem)]

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
                elif message.kind == "replay":
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
                    elif (
                        message.kind == "replay" and not (reply := parse_replay(message.frames)).end
                    ):
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
        rank = self._rank or Rank(self.path.stem, batch.data_parallel_rank or 0)
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
