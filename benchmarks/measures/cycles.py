"""Memory over millions of store and remove cycles: flat, or it leaks.

Each cycle stores one block and removes one, in a changing prefix tree: prompts share beginnings,
branch, and are removed from their ends, from their middles and as a whole.
"""

from __future__ import annotations

import gc
import random
import time

from benchmarks.bench import Bench
from benchmarks.results import OURS, Result
from benchmarks.sides.remembering import resident_bytes
from kvindex import BlockRemoved, BlockStored, EventBatch, Index, Rank
from kvindex.wire import Event

BLOCK_SIZE = 4
CHAIN_BLOCKS = 32
CHAINS = 256  # chains resident at a time
REPORTS = 5
_GROUP = "memory over store/remove cycles"


def run(bench: Bench) -> list[Result]:
    """Return resident memory after each fifth of the cycles, and what is left at the end."""
    cycles = bench.scale.cycles
    index, rank, rng = Index(), Rank("engine"), random.Random(7)
    resident: list[list[int]] = []
    results: list[Result] = []
    next_hash, done, started = 1, 0, time.perf_counter()
    while done < cycles:
        hashes = list(range(next_hash, next_hash + CHAIN_BLOCKS))
        next_hash += CHAIN_BLOCKS
        resident.append(hashes)
        removed = _taken(resident, rng) if len(resident) > CHAINS else []
        index.apply(rank, EventBatch(ts=0.0, events=_events(hashes, removed, rng)))
        done += len(removed)
        if removed and done * REPORTS // cycles > len(results):
            results.append(_report(f"after {done:,} cycles", index))
    rate = done / (time.perf_counter() - started)
    index.remove(rank)
    left = index.statistics()["unique_blocks"]
    return [
        *results,
        _result("cycles", "1/s", rate),
        _result("blocks left after removing the rank", "blocks", left),
    ]


def _taken(resident: list[list[int]], rng: random.Random) -> list[int]:
    victim = resident.pop(rng.randrange(len(resident)))
    rng.shuffle(victim)
    return victim


def _events(stored: list[int], removed: list[int], rng: random.Random) -> list[Event]:
    store = BlockStored(block_hashes=list(stored), token_ids=_prompt(rng), block_size=BLOCK_SIZE)
    return [store, *(BlockRemoved(block_hashes=[block_hash]) for block_hash in removed)]


def _prompt(rng: random.Random) -> list[int]:
    """Return a prompt of one of four beginnings, a branch, and a tail of its own."""
    shared = [rng.randrange(4)] * (BLOCK_SIZE * (CHAIN_BLOCKS // 2))
    branch = [rng.randrange(16)] * (BLOCK_SIZE * (CHAIN_BLOCKS // 4))
    own = CHAIN_BLOCKS * BLOCK_SIZE - len(shared) - len(branch)
    return shared + branch + [rng.randrange(1 << 30) for _ in range(own)]


def _report(measure: str, index: Index) -> Result:
    gc.collect()
    runs = f"{index.statistics()['runs']} runs"
    return _result(f"{measure}, {runs}", "MiB", resident_bytes() / 2**20)


def _result(measure: str, unit: str, value: float) -> Result:
    note = f"One rank, typed events, {CHAINS * CHAIN_BLOCKS:,} blocks resident."
    return Result(group=_GROUP, measure=measure, unit=unit, values={OURS: value}, notes=[note])
