"""`kvindex tail`: every rank's events in order, as they arrive.

Print every rank's event batches in order, one line each, with losses and restarts between them;
first what the publisher still holds for replay. Runs until Ctrl-C, which is its normal end
(exit 0), as are --limit and --seconds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter

from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventStream
from kvindex.subscribe import RankBatch, RankLost, RankRestarted, RanksRenamed, StreamItem
from kvindex.tools.cli.arguments import count, option, seconds
from kvindex.tools.cli.endpoints import add_engine_options, asked_workers
from kvindex.tools.cli.output import StateChanges, counted, json_line, printable

_LOOK = 0.5  # seconds between looks at which ranks are not live


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    option(parser, "--json", "print one JSON object per line")
    option(parser, "--limit N", "end after N lines", count)
    option(parser, "--seconds S", "end after S seconds", seconds)
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print items until there were enough, or Ctrl-C."""
    seen: Counter[str] = Counter()
    workers, _ = asked_workers(arguments)
    try:
        with EventStream(workers) as stream:
            _print_items(stream, arguments, seen)
    except KeyboardInterrupt:
        pass  # the normal end of a tail
    sys.stdout.flush()
    batches = counted(seen["RankBatch"], "batch", "batches")
    print(
        f"{batches} with {counted(seen['events'], 'event')}, "
        f"{counted(seen['RankLost'], 'loss', 'losses')}, "
        f"{counted(seen['RankRestarted'], 'restart')}",
        file=sys.stderr,
    )
    return 0


def _print_items(stream: EventStream, arguments: argparse.Namespace, seen: Counter[str]) -> None:
    until = time.monotonic() + (arguments.seconds or math.inf)
    look_at = time.monotonic() + _LOOK
    changes = StateChanges(stream.subscriber.statuses)
    while (now := time.monotonic()) < until:
        if now >= look_at:
            changes.report()
            look_at = now + _LOOK
        try:
            item = stream.get(min(until, look_at) - now)
        except TimeoutError:
            continue
        if not isinstance(item, RankBatch | RankLost | RankRestarted):
            continue
        seen[type(item).__name__] += 1
        seen["lines"] += 1
        seen["events"] += len(item.batch.events) if isinstance(item, RankBatch) else 0
        line = f"{time_of(item)}  {printable(describe(item))}"
        print(json_line(item) if arguments.json else line, flush=True)
        if seen["lines"] == arguments.limit:
            return


def time_of(item: StreamItem) -> str:
    """Return when a batch was made, by its publisher's clock; of anything else, the present."""
    ts = item.batch.ts if isinstance(item, RankBatch) else time.time()
    try:
        return time.strftime("%H:%M:%S", time.localtime(ts)) + f".{int(ts % 1 * 1000):03}"
    except (ValueError, OverflowError, OSError):
        return "--:--:--.---"  # a publisher's timestamp may be no time at all


def describe(item: StreamItem) -> str:
    """Return one line that describes an item.

    Examples:
        >>> from kvindex import Rank
        >>> describe(RankLost(Rank("vllm-0"), 0, "evicted", 5, 7, True))
        'vllm-0/0  epoch 0  LOST seq 5..7 (evicted): what the rank held is to be dropped'
    """
    if isinstance(item, RankBatch):
        how = "  (replayed)" if item.replayed else ""
        return f"{item.rank}  epoch {item.epoch}  seq {item.seq}  {_events(item.batch)}{how}"
    if isinstance(item, RankLost):
        last = "?" if item.last_seq is None else item.last_seq
        then = "what the rank held is to be dropped" if item.reset else "kept, flagged incomplete"
        return (
            f"{item.rank}  epoch {item.epoch}  LOST seq {item.first_seq}..{last} "
            f"({item.reason}): {then}"
        )
    if isinstance(item, RankRestarted):
        return f"{item.rank}  epoch {item.epoch}  RESTARTED ({item.reason}): its cache is empty"
    if isinstance(item, RanksRenamed):
        names = ", ".join(f"{old} is {new}" for old, new in item.names)
        return f"RENAMED by their batches: {names}"
    return f"{item.rank}  {type(item).__name__}"


def _events(batch: EventBatch) -> str:
    """Sum up a batch: blocks stored and removed on each medium, clears, unknown events."""
    parts: list[str] = []
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            parts.append("all cleared")
        elif isinstance(event, BlockRemoved):
            parts.append(f"-{len(event.block_hashes)} {event.medium or 'GPU'}")
        elif isinstance(event, BlockStored):
            lora = event.lora_name or (event.lora_id is not None and f"id {event.lora_id}")
            parts.append(
                f"+{len(event.block_hashes)} {event.medium or 'GPU'} "
                f"({counted(len(event.token_ids), 'token')})" + (f" (LoRA {lora})" if lora else "")
            )
    if batch.skipped:
        parts.append(f"{len(batch.skipped)} unknown")
    shown = ", ".join(parts[:6]) or "no events"
    return shown + (f", and {len(parts) - 6} more events" if len(parts) > 6 else "")
