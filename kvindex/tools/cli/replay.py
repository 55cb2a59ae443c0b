"""Recordings, one publisher's each: `kvindex replay` puts them into an index.

What a live subscription counts is counted here too: batches that arrive twice, gaps, restarts,
batches that cannot be decoded. `kvindex audit` reads recordings by the same `Recording`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvindex import (
    CacheSettings,
    ConfigurationError,
    DecodeError,
    EventBatch,
    Index,
    Rank,
    RankAdded,
    RankBatch,
    RankLost,
    RankRestarted,
    StreamItem,
)
from kvindex.subscribe.resumption import Claim, settle
from kvindex.tools.cli.arguments import (
    add_cache_options,
    add_prompt_options,
    cache_of,
    option,
    read_tokens,
)
from kvindex.tools.cli.match import match_table
from kvindex.tools.cli.output import Progress, counted, json_line, table
from kvindex.wire import decode_batch, parse_live, parse_replay, read_recording


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a recording")
    text = "fill gaps, and what is missing at both ends, from the replay replies in the file"
    option(parser, "--with-replayed", text)
    text = "at a gap, drop what the rank held, since removals may be lost, or keep it"
    option(parser, "--on-loss", text, ("reset", "keep"), "reset")
    option(parser, "--probe TOKENS", "then match the prompt in this file (- for stdin)")
    add_cache_options(parser)
    add_prompt_options(parser)
    option(parser, "--json", "print one JSON object, with every resident block")


def run_replay(arguments: argparse.Namespace) -> int:
    """Apply recorded frames, and print what is resident.

    Apply recorded frames in order and print what each rank holds then. A file is one publisher's.
    It says which rank it is; for one that does not, its name without suffix is the worker's name.
    What a live subscription counts is counted here too: batches that arrive twice, gaps, restarts,
    batches that cannot be decoded. Exit 1: a file is cut off, and the part before that byte is
    applied and printed, or it is no recording. Exit 2: a file cannot be opened.
    """
    recordings = recordings_of(arguments, resets=arguments.on_loss == "reset")
    prompt = None if arguments.probe is None else read_tokens(arguments.probe)
    index = Index()
    progress = Progress()
    for recording in recordings:
        for item in recording.items(progress):
            if isinstance(item, RankAdded):
                index.configure(item.rank, item.cache)
            elif isinstance(item, RankBatch):
                index.apply(item.rank, item.batch)
            elif isinstance(item, RankRestarted) or (isinstance(item, RankLost) and item.reset):
                index.tree(item.rank).clear()
        progress.clear()
        # A recording without a readable batch has a rank all the same, which holds nothing.
        for rank in recording.ranks:
            index.add(rank)
        if recording.error:
            print(f"kvindex replay: {recording.path}: {recording.error}", file=sys.stderr)
    match = None
    if prompt is not None:
        match = index.match(prompt, lora=arguments.lora, salt=arguments.salt)
    # Of what is no recording there is nothing to show; of one that is cut off, what came before.
    readable = [
        recording
        for recording in recordings
        if not recording.error or recording.counters["live"] + recording.counters["replies"]
    ]
    if arguments.json:
        probe = {} if match is None else {"probe": match.to_dict()}
        print(json_line({**_report(index, recordings), **probe}))
    elif readable:
        rows = [_row(index, rank, recording) for recording in readable for rank in recording.ranks]
        header = ("rank", "blocks", "orphans", "last seq", "applied", "complete", "noted")
        print(table(header, rows))
        if match is not None and prompt is not None:
            print(f"\n{match_table(match, len(prompt))}")
    for recording in () if arguments.with_replayed else readable:
        replies = recording.counters["replies"]
        if replies and not recording.complete:
            print(
                f"{recording.path}: it has {counted(replies, 'replay reply', 'replay replies')}, "
                "too: --with-replayed fills with them what is missing",
                file=sys.stderr,
            )
    return 1 if any(recording.error for recording in recordings) else 0


def _report(index: Index, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return what is known of the files and of their ranks, as plain values."""
    files, ranks = [], {}
    for recording in recordings:
        counters = recording.statistics()
        files.append(
            {
                "path": str(recording.path),
                "ranks": recording.ranks,
                "counters": counters,
                "error": recording.error or None,
            }
        )
        for rank in recording.ranks:
            tree = index.tree(rank)
            resident = sorted(
                tree.walk(), key=lambda b: (b.depth, str(b.block_hash), b.medium, b.group_idx)
            )
            ranks[str(rank)] = {
                "resident": resident,
                "blocks": len(tree),
                "seq": recording.seq,
                "epoch": counters["restarts"],
                "complete": recording.complete,
                "counters": counters,
                "index": tree.statistics(),
            }
    return {"files": files, "ranks": ranks}


def _row(index: Index, rank: Rank, recording: Recording) -> tuple[object, ...]:
    statistics = index.tree(rank).statistics()
    names = ("gaps", "lost", "resets", "filled", "duplicates", "restarts", "undecodable")
    noted = [f"{recording.counters[name]} {name}" for name in (*names, "bad_frames")]
    return (
        rank,
        statistics["blocks"],
        statistics["orphans"],
        recording.seq,
        recording.counters["applied"],
        recording.complete,
        ", ".join(note for note in noted if not note.startswith("0 ")) or "-",
    )


# Reading a recording ---------------------------------------------------------------------------


def recordings_of(arguments: argparse.Namespace, *, resets: bool = True) -> list[Recording]:
    """Return the recordings that a command's arguments name, with ranks as a subscription has them.

    Raises:
        ConfigurationError: a file cannot be opened, or two would be one worker or one rank.
    """
    by_worker: dict[str, dict[Path, Claim | None]] = {}
    for path in arguments.files:
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
    # Batches may name another dp_rank than their port's: of all files of a worker together it
    # shows which names are true, as of the ranks of a live engine.
    for worker, files in by_worker.items():
        claims = {path: claim for path, claim in files.items() if claim is not None}
        for path, dp_rank in zip(claims, settle(list(claims.values())), strict=True):
            ranks[path] = Rank(worker, dp_rank)
    cache, replayed = cache_of(arguments), arguments.with_replayed
    return [
        Recording(path, ranks.get(path), resets=resets, with_replayed=replayed, cache=cache)
        for path in arguments.files
    ]


def _publisher_of(path: Path) -> tuple[str, Claim | None]:
    """Return a recording's worker, and its dp_rank by its port and by its first readable batch."""
    worker, claim = path.stem, None
    try:
        for message in read_recording(path):
            if claim is not None:
                parse = parse_live if message.kind == "live" else parse_replay
                try:
                    named = decode_batch(parse(message.frames).payload).data_parallel_rank
                except DecodeError:
                    continue  # `Recording.items` counts it
                if named is not None:
                    return worker, claim._replace(named=named)
            elif message.kind == "publisher":
                name, dp_rank = message.frames
                worker, claim = name.decode(), Claim(int(dp_rank), None)
            else:
                break  # what says whose they are comes first
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except DecodeError:
        pass  # `Recording.items` meets it too
    except ValueError as error:
        raise ConfigurationError(f"{path}: its first record names no rank: {error}") from error
    return worker, claim


class Recording:
    """Reads one publisher's recording: duplicates are dropped, gaps and restarts are noted.

    A lower or equal number with a newer timestamp is a restart, with another one a duplicate. A gap
    drops what the rank held (`resets`), and is filled from the replay replies (`with_replayed`).

    Without a `rank`, the file's name is the worker, and each batch names its dp_rank. `error` is
    why the file could not be read to its end, or "".
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
        """Yield what an event stream would have yielded, as far as the file can be read."""
        # By a pass of its own: a recording has its replay replies after all live messages.
        if self._with_replayed:
            self._collect_replies()
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size or 1
                for number, message in enumerate(read_recording(file)):
                    if number % 64 == 0:
                        progress.show(f"{self.path.name}: {file.tell() * 100 // size} %")
                    if message.kind == "live":
                        self.counters["live"] += 1
                        yield from self._live(message.frames)
                    elif message.kind == "replay":
                        self.counters["replies"] += 1
            # What follows the last live batch may be among the replies; a damaged end is a loss.
            replies = self._replies.items()
            later = [n for n, batch in replies if n >= self._next and batch.ts >= self._ts]
            if (last := max([self._damaged, *later])) >= self._next:
                yield from self._close_gap(last + 1, math.inf)
        except DecodeError as error:
            self.error = str(error)
        except OSError as error:
            raise ConfigurationError(f"cannot read {self.path}: {error}") from error

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
            # The same number again is a batch sent twice, unless it is newer: then the publisher
            # began anew.
            if batch.ts <= self._ts:
                self.counters["duplicates"] += 1
                return
            self.counters["restarts"] += 1
            self.seq, self._damaged = None, -1
            for rank in self._ranks:
                yield RankRestarted(rank, self.counters["restarts"], "seq_backwards")
        yield from self._close_gap(frame.seq, batch.ts)
        yield from self._apply(frame.seq, batch)

    def _close_gap(self, seq: int, ts: float) -> Iterator[StreamItem]:
        """Fill the numbers before `seq` from the replies; what stays missing is a loss."""
        lost = self.counters["lost"]
        for number in sorted(n for n in self._replies if self._next <= n < seq):
            # A publisher that restarted counts from 0 again: only the time shows whose reply it is.
            if self._ts <= self._replies[number].ts <= ts:
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
