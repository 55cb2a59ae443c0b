"""The audit's figures against brute force, and against the fake engines' own accounts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.routing.cache import PrefixCache
from benchmarks.routing.engine import Model as EngineModel
from benchmarks.routing.field import make_policy
from benchmarks.routing.runs import Fleet as SimulatedFleet
from benchmarks.routing.runs import Traffic
from benchmarks.routing.simulation import Clock, Simulation
from benchmarks.routing.traffic import BLOCK, Turn
from kvindex import EventBatch, Index, Rank, RankBatch, RankLost, RankRestarted
from kvindex.routing import Router
from kvindex.testing import CacheOptions, FakeEngine, Group, Request, Workload
from kvindex.tools.audit import Auditor, AuditReport, Tokens
from kvindex.tools.audit.blocks import Histogram, Prefix, PrefixTree
from kvindex.wire import decode_batch
from tests.tools.audit.audit_model import Model, contents

pytestmark = pytest.mark.property

SIZE = 4
NAMES = (
    *("computed", "same_worker", "other_worker", "evicted", "evicted_elsewhere", "here"),
    *("unreachable", "first", "unknown", "returned", "offloaded"),
)
RANKS = (Rank("a", 0), Rank("a", 1), Rank("b", 0))


class Fleet:
    """Engines whose events go to an auditor and to the brute-force model."""

    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        self.engines = {engine.rank: engine for engine in engines}
        self.auditor = Auditor()
        self.auditor.begin(0.0)
        self.model = Model(SIZE)
        self.now = 0.0
        for rank, engine in self.engines.items():
            self.model.add(rank)
            self.report_events(rank, engine.events)

    def serve(self, rank: Rank, request: Request, *, reported_only: bool = False) -> int:
        """Serve a request; return the tokens in whole blocks that were computed for it.

        What others hold is read from their caches, or (`reported_only`) from their events alone.
        """
        engine = self.engines[rank]
        served = engine.serve(
            request.token_ids, lora=request.lora, salt=request.salt, new_tokens=request.new_tokens
        )
        self.report_events(rank, engine.events, reported_only=reported_only)
        fed = len(request.token_ids) + max(0, len(request.new_tokens) - 1)
        return fed // SIZE * SIZE - served.hit_tokens

    def report_events(
        self, rank: Rank, events: Sequence[object], *, reported_only: bool = False
    ) -> None:
        self.now += 1.0
        elsewhere = {
            r: self.model.ranks[r].held() if reported_only else contents(engine)
            for r, engine in self.engines.items()
            if r != rank
        }
        batch = EventBatch(self.now, list(events), rank.dp_rank)  # type: ignore[arg-type]
        self.model.apply(rank, batch.events, elsewhere)
        self.auditor.receive(RankBatch(rank, 0, int(self.now), batch, False), self.now)

    def restart(self, rank: Rank) -> None:
        self.engines[rank].restart()
        self.model.ranks[rank].forget()
        self.auditor.receive(RankRestarted(rank, 1, "test"), self.now)
        self.report_events(rank, self.engines[rank].events)

    def check(self) -> Tokens:
        report = self.auditor.report(self.now + 1)
        for rank_report in report.ranks:
            worker, _, dp_rank = rank_report.rank.rpartition("/")
            expected = self.model.tokens[Rank(worker, int(dp_rank))]
            got = {name: getattr(rank_report.tokens, name) for name in NAMES}
            assert got == {name: expected[name] for name in NAMES}
        assert sum(bar.weight for bar in report.ages) == report.tokens.evicted
        for saving in report.savings:
            assert saving.tokens == self.saved_by(saving.factor)
        # One cache for all holds what any rank holds, and an infinite one all that was before.
        needs = self.model.needs
        saved = {saving.factor: saving.tokens for saving in report.capacity.savings}
        for factor in (1.0, 2.0, 8.0):
            held = sum(tokens for need, tokens in needs.items() if need <= factor)
            assert saved[factor] == held
        assert report.tokens.again == needs.total()
        assert report.tokens.elsewhere <= saved[1.0]
        assert report.capacity.size == self.model.most.total() * SIZE
        return report.tokens

    def saved_by(self, factor: float) -> int:
        saved = 0
        for rank, distances in self.model.distances.items():
            histogram = Histogram()
            for distance, tokens in distances.items():
                histogram.add(distance, tokens)
            saved += histogram.up_to((factor - 1) * self.model.peaks[rank])
        return saved


def engines(blocks: int, **options: Any) -> list[FakeEngine]:
    return [
        FakeEngine(
            rank.worker,
            dp_rank=rank.dp_rank,
            block_size=SIZE,
            num_blocks=blocks,
            seed=number,
            publish=False,
            **options,
        )
        for number, rank in enumerate(RANKS)
    ]


def sums_up(tokens: Tokens) -> bool:
    parts = tokens.unknown + tokens.here + tokens.elsewhere + tokens.unreachable + tokens.first
    return tokens.computed == parts + tokens.evicted - tokens.evicted_elsewhere


def workload(seed: int, **options: Any) -> Workload:
    return Workload(
        40,
        seed=seed,
        system_prompts=2,
        system_tokens=14,
        turn_tokens=9,
        new_tokens=6,
        max_tokens=60,
        align=SIZE,
        vocabulary=50,
        **options,
    )


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), blocks=st.sampled_from([24, 40]), sglang=st.booleans())
def test_every_token_is_counted_as_by_brute_force(seed: int, blocks: int, sglang: bool) -> None:
    dialect = ("sglang-0.5.18", "sglang-0.5.23")[seed % 2] if sglang else "vllm-0.33.0"
    fleet = Fleet(engines(blocks, dialect=dialect))
    choose = random.Random(seed)
    computed: Counter[Rank] = Counter()
    for number, request in enumerate(workload(seed, loras=["x"], salts=["s"])):
        rank = choose.choice(RANKS)
        computed[rank] += fleet.serve(rank, request, reported_only=sglang)
        reported, held = fleet.model.ranks[rank].held(), contents(fleet.engines[rank])
        # SGLang keeps one copy: a block may be stored after the one before it was removed.
        assert reported <= held if sglang else reported == held
        if number % 13 == 12:
            fleet.restart(rank)
    tokens = fleet.check()
    if not sglang:  # which stores no second copy of a block that it computed again
        assert computed == {r: c["computed"] for r, c in fleet.model.tokens.items() if c}
    assert sums_up(tokens)


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**32), offload=st.sampled_from(["store", "evict"]), reported=st.booleans()
)
def test_copies_to_the_host_are_no_computation(seed: int, offload: str, reported: bool) -> None:
    options = CacheOptions(offload=offload, placeholders=not reported)  # type: ignore[arg-type]
    fleet = Fleet(engines(24, cpu_blocks=30, options=options))
    choose = random.Random(seed)
    computed: Counter[Rank] = Counter()
    for request in workload(seed, resend=0.0):
        rank = choose.choice(RANKS)
        computed[rank] += fleet.serve(rank, request)
        assert fleet.model.ranks[rank].held() == contents(fleet.engines[rank])
    assert sums_up(fleet.check())
    # A prompt that fills its last block exactly has that block computed again, or loaded: events
    # do not tell which, and the audit counts none of it.
    for rank, tokens in fleet.model.tokens.items():
        assert tokens["computed"] <= computed[rank]
        assert computed[rank] - tokens["computed"] <= tokens["returned"]


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_a_token_of_a_hybrid_model_counts_once(seed: int) -> None:
    options = CacheOptions(groups=(Group(), Group.window(2 * SIZE)))
    fleet = Fleet(engines(70, options=options))
    choose = random.Random(seed)
    computed: Counter[Rank] = Counter()
    for request in workload(seed):
        rank = choose.choice(RANKS)
        computed[rank] += fleet.serve(rank, request)
    report = fleet.auditor.report(fleet.now)
    assert {rank.rank: rank.tokens.computed for rank in report.ranks} == {
        str(rank): tokens for rank, tokens in computed.items()
    }
    assert sums_up(report.tokens)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_after_losses_nothing_counts_as_held_that_may_be_gone(seed: int) -> None:
    fleet = Fleet(engines(24))
    choose = random.Random(seed)
    for request in workload(seed):
        rank = choose.choice(RANKS)
        lost = choose.random() < 0.15
        if lost:  # the engine serves, and nobody hears of it
            fleet.engines[rank].serve(request.token_ids, new_tokens=request.new_tokens)
            fleet.auditor.receive(RankLost(rank, 0, "test", 0, 0, True), fleet.now)
            fleet.model.ranks[rank].forget()
        else:
            fleet.serve(rank, request, reported_only=True)
            held = fleet.model.ranks[rank].held()
            assert held <= contents(fleet.engines[rank])
    assert sums_up(fleet.check())


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 4), st.booleans()),
        max_size=60,
    )
)
def test_holders_of_whole_prefixes_are_exact(steps: list[tuple[int, int, int, bool]]) -> None:
    tree = PrefixTree()
    start = tree.start(b"")
    held: set[tuple[int, str]] = set()  # rank, and the path of a block
    nodes: dict[str, Prefix] = {}
    for rank, branch, depth, gone in steps:
        path = "xxyyy"[:depth] + "abc"[branch]  # branches share what comes before them
        prefix = start
        for end in range(1, len(path) + 1):
            prefix = tree.after(prefix, path[end - 1].encode(), SIZE)
            nodes[path[:end]] = prefix
        if gone and (rank, path) in held:
            held.discard((rank, path))
            tree.release(prefix, 1 << rank)
        elif not gone:
            held.add((rank, path))
            tree.hold(prefix, 1 << rank)
        tree.prune(prefix)
        for one_rank, one_path in held:
            whole = all((one_rank, one_path[:end]) in held for end in range(1, len(one_path) + 1))
            assert bool(nodes[one_path].whole >> one_rank & 1) == whole
    for rank, path in held:
        tree.release(nodes[path], 1 << rank)
    assert len(tree) == 0


def test_what_larger_caches_would_have_held_is_what_larger_caches_save() -> None:
    requests = Workload(
        300,
        seed=2,
        system_prompts=12,
        system_tokens=384,
        turn_tokens=160,
        new_tokens=8,
        max_tokens=2400,
    )

    def audited(blocks: int) -> AuditReport:
        auditor = Auditor()
        auditor.begin(0.0)
        engine = FakeEngine("a", num_blocks=blocks, publish=False)
        for second, request in enumerate(requests):
            engine.serve(request.token_ids, new_tokens=request.new_tokens, flush=False)
            batch = engine.flush()
            if batch is not None:
                auditor.receive(RankBatch(engine.rank, 0, second, batch, False), float(second))
        return auditor.report(1000.0)

    small = audited(160)
    for saving in small.savings[1:3]:
        saved = small.tokens.computed - audited(int(160 * saving.factor)).tokens.computed
        assert abs(saved - saving.tokens) <= 0.02 * small.tokens.computed
    assert small.savings[-1].tokens > 0.2 * small.tokens.computed


def routed(policy: str) -> Tokens:
    """Serve the same requests on four engines, as a router of this policy sends them."""
    fleet = {Rank(f"vllm-{n}"): FakeEngine(f"vllm-{n}", publish=False) for n in range(4)}
    index, auditor = Index(), Auditor()
    for rank in fleet:
        index.add(rank)
    router = Router(index, policy=policy, seed=1)
    auditor.begin(0.0)
    for second, request in enumerate(Workload(150, seed=1, system_tokens=160, max_tokens=600)):
        with router.reserve(request.token_ids) as booking:
            engine = fleet[booking.rank]
            engine.serve(request.token_ids, new_tokens=request.new_tokens, flush=False)
        batch = engine.flush()
        if batch is not None:
            index.apply(booking.rank, batch)
            auditor.receive(RankBatch(booking.rank, 0, second, batch, False), float(second))
    return auditor.report(1000.0).tokens


def test_a_kv_aware_router_saves_most_of_the_audits_bound() -> None:
    in_turn, by_prefix = routed("round-robin"), routed("kvindex")
    saved = in_turn.computed - by_prefix.computed
    assert 0.7 * in_turn.elsewhere < saved <= in_turn.elsewhere
    assert by_prefix.elsewhere < 0.2 * in_turn.elsewhere


class Heard(Index):
    """An index whose batches an auditor hears, too."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(seed=1)
        self.auditor = Auditor()
        self.auditor.begin(0.0)
        self._clock = clock

    def apply(self, rank: Rank, payload: Any) -> None:  # type: ignore[override]
        super().apply(rank, payload)
        batch = RankBatch(rank, 0, 0, decode_batch(payload), False)
        self.auditor.receive(batch, self._clock.now)


def computed_by_one_cache(turns: Sequence[Turn], blocks: int) -> int:
    """Tokens that one engine computes, in whole blocks; what was used least recently goes first."""
    cache, computed = PrefixCache(blocks), 0
    for turn in turns:
        hit = cache.leading(turn.blocks[: (turn.prompt - 1) // BLOCK])
        pinned, own = list(turn.blocks[:hit]), -(-(turn.prompt + turn.output) // BLOCK) - hit
        assert cache.take(pinned, own)
        known = min(len(turn.blocks), (turn.prompt + turn.output - 1) // BLOCK)
        new = cache.store(turn.blocks[hit:known])
        computed += len(new) * BLOCK
        cache.release(pinned + new, own - len(new))
    return computed


@pytest.mark.parametrize("policy", ["round-robin", "kvindex"])
@pytest.mark.parametrize("kind", ["chat", "rag"])
def test_one_cache_computes_what_a_simulated_engine_with_all_memory_does(
    kind: str, policy: str
) -> None:
    clock, fleet = Clock(), SimulatedFleet(ranks=4, model=EngineModel(cache=BLOCK * 128))
    index = Heard(clock)
    router = Router(index, policy=make_policy(policy), clock=clock, seed=1)
    simulation = Simulation(index, [router], clock, ranks=fleet.ranks, model=fleet.model)
    requests = simulation.run(Traffic(kind, 1.5, 300).sessions(fleet, seed=1))
    report = index.auditor.report(clock.now)

    tokens, turns = report.tokens, [request.turn for request in requests]
    saved = {saving.factor: saving.tokens for saving in report.capacity.savings}
    assert tokens.elsewhere <= saved[1.0] <= saved[2.0] <= tokens.again
    assert tokens.computed - tokens.again == computed_by_one_cache(turns, 1 << 30)
    for factor in (1.0, 2.0):
        truth = computed_by_one_cache(turns, int(factor) * 4 * 128)
        assert abs(tokens.computed - saved[factor] - truth) <= 0.015 * truth
