"""How much is measured: the full table, a minute of it, or a sign of life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements; blocks and entries are counts, durations seconds."""

    rounds: int  # repetitions, each of every side in turn
    match_entries: dict[int, int]  # by number of ranks
    match_repeats: int
    prompts: int
    select_entries: dict[int, int]  # by number of ranks, besides the prompts' own
    select_prompts: int  # of each kind
    bookings: dict[int, int]  # by number of ranks
    bookings_open: int  # of them at once
    apply_blocks: int
    apply_single_blocks: int
    ingest_blocks: int
    ingest_single_blocks: int
    busy_entries: int
    busy_seconds: float
    paced_ranks: tuple[int, ...]
    paced_rounds: int
    paced_seconds: float
    memory_entries: int
    memory_ranks: int
    growth: tuple[int, ...]
    growth_ranks: int
    cycles: int
    load_ranks: int
    load_batches: int
    queue_rounds: int
    queue_seconds: float
    queue_slow_seconds: float
    queue_settle: float
    queue_idle: float
    http_entries: dict[int, int]  # by number of ranks
    http_requests: int
    http_seconds: float
    fanout_seconds: float
    fanout_ranks: int
    nats_ranks: tuple[int, ...]
    nats_join: int
    shared_seconds: float
    gateway_requests: int
    gateway_alone: int
    gateway_chat: int  # tokens
    gpu_seconds: float
    routing_seeds: int
    routing_requests: int  # of generated traffic
    routing_trace: int  # of a trace, at most
    routing_all_loads: bool


FULL: Final = Scale(
    rounds=5,
    match_entries={64: 300_000, 512: 1_000_000},
    match_repeats=2_000,
    prompts=64,
    select_entries={8: 100_000, 64: 300_000, 512: 300_000},
    select_prompts=8,
    bookings={64: 1_000_000, 512: 200_000},
    bookings_open=10_000,
    apply_blocks=1_000_000,
    apply_single_blocks=300_000,
    ingest_blocks=2_000_000,
    ingest_single_blocks=600_000,
    busy_entries=300_000,
    busy_seconds=5.0,
    paced_ranks=(64, 512),
    paced_rounds=2,
    paced_seconds=3.0,
    memory_entries=10_000_000,
    memory_ranks=512,
    growth=(100_000, 300_000, 1_000_000, 3_000_000, 10_000_000),
    growth_ranks=512,
    cycles=2_000_000,
    load_ranks=64,
    load_batches=2_000,
    queue_rounds=3,
    queue_seconds=0.7,
    queue_slow_seconds=1.5,
    queue_settle=2.0,
    queue_idle=5.0,
    http_entries={64: 300_000, 512: 300_000},
    http_requests=1_000,
    http_seconds=2.0,
    fanout_seconds=5.0,
    fanout_ranks=512,
    nats_ranks=(64, 512),
    nats_join=2_000_000,
    shared_seconds=5.0,
    gateway_requests=1_000,
    gateway_alone=90,
    gateway_chat=36_000,
    gpu_seconds=5.0,
    routing_seeds=5,
    routing_requests=5_000,
    routing_trace=1_000_000,
    routing_all_loads=True,
)

QUICK: Final = Scale(
    rounds=3,
    match_entries={64: 60_000, 512: 60_000},
    match_repeats=300,
    prompts=16,
    select_entries={8: 10_000, 64: 30_000, 512: 10_000},
    select_prompts=1,
    bookings={64: 100_000, 512: 20_000},
    bookings_open=10_000,
    apply_blocks=128_000,
    apply_single_blocks=32_000,
    ingest_blocks=128_000,
    ingest_single_blocks=32_000,
    busy_entries=60_000,
    busy_seconds=1.0,
    paced_ranks=(64,),
    paced_rounds=1,
    paced_seconds=1.0,
    memory_entries=300_000,
    memory_ranks=512,
    growth=(100_000, 300_000),
    growth_ranks=512,
    cycles=100_000,
    load_ranks=16,
    load_batches=200,
    queue_rounds=1,
    queue_seconds=0.5,
    queue_slow_seconds=1.0,
    queue_settle=2.0,
    queue_idle=2.0,
    http_entries={64: 60_000},
    http_requests=300,
    http_seconds=0.5,
    fanout_seconds=1.0,
    fanout_ranks=64,
    nats_ranks=(64,),
    nats_join=200_000,
    shared_seconds=2.0,
    gateway_requests=200,
    gateway_alone=30,
    gateway_chat=8_000,
    gpu_seconds=2.0,
    routing_seeds=2,
    routing_requests=500,
    routing_trace=500,
    routing_all_loads=False,
)

SMOKE: Final = Scale(
    rounds=1,
    match_entries={64: 2_000},
    match_repeats=20,
    prompts=2,
    select_entries={8: 1_000},
    select_prompts=1,
    bookings={8: 2_000},
    bookings_open=200,
    apply_blocks=2_000,
    apply_single_blocks=1_000,
    ingest_blocks=4_000,
    ingest_single_blocks=1_000,
    busy_entries=2_000,
    busy_seconds=0.2,
    paced_ranks=(8,),
    paced_rounds=1,
    paced_seconds=0.2,
    memory_entries=4_000,
    memory_ranks=8,
    growth=(2_000, 4_000),
    growth_ranks=8,
    cycles=10_000,
    load_ranks=8,
    load_batches=50,
    queue_rounds=1,
    queue_seconds=0.03,
    queue_slow_seconds=0.06,
    queue_settle=0.05,
    queue_idle=0.1,
    http_entries={8: 1_000},
    http_requests=20,
    http_seconds=0.1,
    fanout_seconds=0.2,
    fanout_ranks=4,
    nats_ranks=(4,),
    nats_join=4_000,
    shared_seconds=0.3,
    gateway_requests=16,
    gateway_alone=3,
    gateway_chat=1_000,
    gpu_seconds=0.3,
    routing_seeds=1,
    routing_requests=30,
    routing_trace=30,
    routing_all_loads=False,
)
