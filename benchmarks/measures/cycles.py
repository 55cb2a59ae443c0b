"""Memory over millions of store and remove cycles: flat, or it leaks.

Each cycle stores one block and removes one, in a changing prefix tree: prompts share beginnings,
branch, and are removed from their ends, from their middles and as a whole.
"""

from __future__ import annotations

import gc
import random
import time

from benchmarks.environment import resident_bytes
from kvindex import BlockRemoved, BlockStored, EventBatch, Index, Rank
from kvindex.wire import Event

BLOCK_SIZE = 4
CHAIN_BLOCKS = 32
CHAINS = 256  # chains resident at a time
REPORTS = 10


def run(cycles: int) -> None:
    """Print resident memory after each tenth of the cycles."""
    print(f"memory over {cycles:,} store/remove cycles ({CHAINS * CHAIN_BLOCKS:,} blocks resident)")
    index, rank, rng = Index(), Rank("engine"), random.Random(7)
    resident: list[list[int]] = []
    next_hash, done, report_at, started = 1, 0, cycles // REPORTS, time.perf_counter()
    first = 0
    while done < cycles:
        events: list[Event] = []
        hashes = list(range(next_hash, next_hash + CHAIN_BLOCKS))
        next_hash += CHAIN_BLOCKS
        events.append(
            BlockStored(
                block_hashes=list(hashes),
                token_ids=_prompt(rng),
                block_size=BLOCK_SIZE,
            )
        )
        resident.append(hashes)
        if len(resident) > CHAINS:
            victim = resident.pop(rng.randrange(len(resident)))
            rng.shuffle(victim)
            events.extend(BlockRemoved(block_hashes=[block_hash]) for block_hash in victim)
            done += CHAIN_BLOCKS
        index.apply(rank, EventBatch(ts=0.0, events=events))
        if done >= report_at:
            report_at += cycles // REPORTS
            gc.collect()
            memory = resident_bytes()
            first = first or memory
            runs = index.statistics()["runs"]
            print(
                f"  {done:>10,} cycles  {memory / 2**20:8.1f} MiB  "
                f"{(memory - first) / 2**20:+6.2f} MiB since the first report  {runs} runs"
            )
    rate = done / (time.perf_counter() - started)
    index.remove(rank)
    left = index.statistics()["unique_blocks"]
    print(f"  {rate:,.0f} cycles/s; after removing everything: {left} blocks")


def _prompt(rng: random.Random) -> list[int]:
    """Return a prompt of one of four beginnings, a branch, and a tail of its own."""
    shared = [rng.randrange(4)] * (BLOCK_SIZE * (CHAIN_BLOCKS // 2))
    branch = [rng.randrange(16)] * (BLOCK_SIZE * (CHAIN_BLOCKS // 4))
    own = CHAIN_BLOCKS * BLOCK_SIZE - len(shared) - len(branch)
    return shared + branch + [rng.randrange(1 << 30) for _ in range(own)]
