"""`kvindex replay`: recorded frames into an index, and what is resident then.

Apply recorded frames in order and print what each rank holds then. A file is one publisher's; its
name without suffix is the worker's name. What a live subscription counts is counted here too:
batches that arrive twice, gaps, restarts, batches that cannot be decoded. Exit 1: a file is cut
off, and the part before that byte is applied and printed, or it is no recording. Exit 2: a file
cannot be opened.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvindex import (
    Index,
    Rank,
    RankAdded,
    RankBatch,
    RankLost,
    RankRestarted,
    StreamItem,
)
from kvindex.tools.cli.arguments import (
    add_cache_options,
    add_prompt_options,
    option,
    read_tokens,
)
from kvindex.tools.cli.match import match_table
from kvindex.tools.cli.output import Progress, counted, json_line, table
from kvindex.tools.cli.recorded import Recorded, recordings_of

__all__ = ["add_options", "run"]


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
    recordings = recordings_of(arguments, on_loss=arguments.on_loss)
    prompt = None if arguments.probe is None else read_tokens(arguments.probe)
    index = Index()
    progress = Progress()
    for recorded in recordings:
        for item in recorded.items(progress):
            _apply(index, item)
        progress.clear()
        for rank in recorded.ranks:
            index.add(rank)
    for recorded in recordings:
        if recorded.error:
            print(f"kvindex replay: {recorded.path}: {recorded.error}", file=sys.stderr)
    readable = [
        recorded
        for recorded in recordings
        if not recorded.error or recorded.counters["live"] + recorded.counters["replies"]
    ]
    if arguments.json or readable:
        _print(arguments, index, recordings if arguments.json else readable, prompt)
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


def _print(
    arguments: argparse.Namespace,
    index: Index,
    recordings: list[Recorded],
    prompt: list[int] | None,
) -> None:
    match = None
    if prompt is not None:
        match = index.match(prompt, lora=arguments.lora, salt=arguments.salt)
    if arguments.json:
        ranks = {
            str(rank): _rank_report(index, rank, recorded)
            for recorded in recordings
            for rank in recorded.ranks
        }
        report: dict[str, Any] = {"files": [r.to_dict() for r in recordings], "ranks": ranks}
        if match is not None:
            report["probe"] = match.to_dict()
        print(json_line(report))
        return
    rows = [_row(index, rank, recorded) for recorded in recordings for rank in recorded.ranks]
    header = ("rank", "blocks", "orphans", "last seq", "applied", "complete", "noted")
    print(table(header, rows))
    if match is not None and prompt is not None:
        print()
        print(match_table(match, len(prompt)))


def _rank_report(index: Index, rank: Rank, recorded: Recorded) -> dict[str, Any]:
    tree = index.tree(rank)
    resident = sorted(
        tree.walk(), key=lambda b: (b.depth, str(b.block_hash), b.medium, b.group_idx)
    )
    return {
        "resident": resident,
        "blocks": len(tree),
        "seq": recorded.seq,
        "epoch": recorded.counters["restarts"],
        "complete": recorded.complete,
        "counters": recorded.statistics(),
        "index": tree.statistics(),
    }


def _row(index: Index, rank: Rank, recorded: Recorded) -> tuple[object, ...]:
    statistics = index.tree(rank).statistics()
    names = ("gaps", "lost", "resets", "filled", "duplicates", "restarts", "undecodable")
    noted = [f"{recorded.counters[name]} {name}" for name in (*names, "bad_frames")]
    return (
        rank,
        statistics["blocks"],
        statistics["orphans"],
        "-" if recorded.seq is None else recorded.seq,
        recorded.counters["applied"],
        "yes" if recorded.complete else "no",
        ", ".join(note for note in noted if not note.startswith("0 ")) or "-",
    )
