"""`kvindex replay`: recorded frames into an index, and what is resident then.

Apply recorded frames in order and print what each rank holds then. A file is one publisher's. It
says which rank it is; for one that does not, its name without suffix is the worker's name. What a
live subscription counts is counted here too: batches that arrive twice, gaps, restarts, batches
that cannot be decoded. Exit 1: a file is cut off, and the part before that byte is applied and
printed, or it is no recording. Exit 2: a file cannot be opened.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvindex import Index, Rank, RankAdded, RankBatch, RankLost, RankRestarted, StreamItem
from kvindex.tools.cli.arguments import add_cache_options, add_prompt_options, option, read_tokens
from kvindex.tools.cli.match import match_table
from kvindex.tools.cli.output import Progress, counted, json_line, table
from kvindex.tools.cli.recorded import Recorded, recordings_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a recording")
    text = "fill gaps, and what is missing at both ends, from the replay replies in the file"
    option(parser, "--with-replayed", text)
    text = "at a gap, drop what the rank held, since removals may be lost, or keep it"
    option(parser, "--on-loss", text, ("reset", "keep"), "reset")
    option(parser, "--probe TOKENS", "then match the prompt in this file (- for stdin)")
    add_cache_options(parser)
    add_prompt_options(parser)
    option(parser, "--json", "print one JSON object, with every resident block")


def run(arguments: argparse.Namespace) -> int:
    """Apply each file, then print what is resident."""
    recordings = recordings_of(arguments, resets=arguments.on_loss == "reset")
    prompt = None if arguments.probe is None else read_tokens(arguments.probe)
    index = Index()
    progress = Progress()
    for recorded in recordings:
        for item in recorded.items(progress):
            _apply(index, item)
        progress.clear()
        for rank in recorded.ranks:
            index.add(rank)
        if recorded.error:
            print(f"kvindex replay: {recorded.path}: {recorded.error}", file=sys.stderr)
    match = None
    if prompt is not None:
        match = index.match(prompt, lora=arguments.lora, salt=arguments.salt)
    readable = [
        recorded
        for recorded in recordings
        if not recorded.error or recorded.counters["live"] + recorded.counters["replies"]
    ]
    if arguments.json:
        probe = {} if match is None else {"probe": match.to_dict()}
        print(json_line({**_report(index, recordings), **probe}))
    elif readable:
        rows = [_row(index, rank, recorded) for recorded in readable for rank in recorded.ranks]
        header = ("rank", "blocks", "orphans", "last seq", "applied", "complete", "noted")
        print(table(header, rows))
        if match is not None and prompt is not None:
            print(f"\n{match_table(match, len(prompt))}")
    if not arguments.with_replayed:
        for recorded in readable:
            _hint(recorded)
    return 1 if any(recorded.error for recorded in recordings) else 0


def _apply(index: Index, item: StreamItem) -> None:
    if isinstance(item, RankAdded):
        index.configure(item.rank, item.cache)
    elif isinstance(item, RankBatch):
        index.apply(item.rank, item.batch)
    elif isinstance(item, RankRestarted) or (isinstance(item, RankLost) and item.reset):
        index.tree(item.rank).clear()


def _hint(recorded: Recorded) -> None:
    """Print on stderr where replies that are in the file could fill what is missing."""
    replies = recorded.counters["replies"]
    if replies and not recorded.complete:
        print(
            f"{recorded.path}: it has {counted(replies, 'replay reply', 'replay replies')}, too: "
            "--with-replayed fills with them what is missing",
            file=sys.stderr,
        )


def _report(index: Index, recordings: Sequence[Recorded]) -> dict[str, Any]:
    """Return what is known of the files and of their ranks, as plain values."""
    files, ranks = [], {}
    for recorded in recordings:
        counters = recorded.statistics()
        files.append(
            {
                "path": str(recorded.path),
                "ranks": recorded.ranks,
                "counters": counters,
                "error": recorded.error or None,
            }
        )
        for rank in recorded.ranks:
            tree = index.tree(rank)
            resident = sorted(
                tree.walk(), key=lambda b: (b.depth, str(b.block_hash), b.medium, b.group_idx)
            )
            ranks[str(rank)] = {
                "resident": resident,
                "blocks": len(tree),
                "seq": recorded.seq,
                "epoch": counters["restarts"],
                "complete": recorded.complete,
                "counters": counters,
                "index": tree.statistics(),
            }
    return {"files": files, "ranks": ranks}


def _row(index: Index, rank: Rank, recorded: Recorded) -> tuple[object, ...]:
    statistics = index.tree(rank).statistics()
    names = ("gaps", "lost", "resets", "filled", "duplicates", "restarts", "undecodable")
    noted = [f"{recorded.counters[name]} {name}" for name in (*names, "bad_frames")]
    return (
        rank,
        statistics["blocks"],
        statistics["orphans"],
        recorded.seq,
        recorded.counters["applied"],
        recorded.complete,
        ", ".join(note for note in noted if not note.startswith("0 ")) or "-",
    )
