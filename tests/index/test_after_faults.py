"""Any schedule of faults, from a fake engine's cache to the index: afterwards it equals the truth.

The world of `sequencer_world` with real contents: each batch is what a `FakeEngine` published for
a request, and what the sequencer delivers is applied to an `Index`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import EventBatch, Index, Rank
from kvindex.subscribe import ReplayPolicy
from kvindex.subscribe.sequencer import (
    Action,
    RankBatch,
    RankLost,
    RankRestarted,
    SequencerConfig,
)
from kvindex.testing import FakeEngine, Request, Workload
from tests.examples import examples
from tests.live import resident
from tests.live import truth as truth_of
from tests.subscribe.sequencer.sequencer_world import CoincidenceError, Faults, Step, World

pytestmark = pytest.mark.property

RANK = Rank("fake-0", 0)
REPLAY = ReplayPolicy(timeout=2.0, attempts=4, backoff=0.1, max_backoff=1.0)


def workload(requests: int, seed: int) -> Workload:
    return Workload(
        requests,
        seed=seed,
        system_tokens=8,
        align=4,
        turn_tokens=12,
        new_tokens=6,
        max_tokens=60,
    )


class CacheWorld(World):
    """A world whose batches have contents, and whose sink is an index."""

    def __init__(self, *, seed: int, faults: Faults, config: SequencerConfig, buffer_steps: int):
        self.fake = FakeEngine(num_blocks=24, block_size=4, cpu_blocks=8, seed=seed, publish=False)
        self.index = Index(seed=seed)
        self.index.add(RANK)
        self.contents: dict[object, EventBatch] = {}
        self.unsent = 0
        self.life = 0
        self.requests: Iterator[Request] = cycle(workload(60, seed))
        super().__init__(seed=seed, faults=faults, config=config, buffer_steps=buffer_steps)

    def serve_one(self) -> EventBatch:
        """Let the engine serve a request; an empty batch where that changes nothing."""
        if self.life != self.engine.life:
            self.life = self.engine.life
            self.fake.restart()
        request = next(self.requests)
        self.fake.serve(request.token_ids, new_tokens=request.new_tokens, flush=False)
        return self.fake.flush() or EventBatch(0.0, [])

    def publish(self) -> None:
        seq = len(self.engine.batches)
        self.contents[self.engine.life, seq] = self.serve_one()
        super().publish()

    def take(self, step: Step) -> None:
        if step.kind == "unencodable":
            self.serve_one()
            self.unsent += 1
        super().take(step)

    def obey(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, RankBatch):
                self.index.apply(RANK, self.contents[action.batch])
            elif isinstance(action, RankRestarted) or (
                isinstance(action, RankLost) and action.reset
            ):
                self.index.tree(RANK).clear()
        super().obey(actions)

    def compare(self) -> None:
        """The index holds what the engine holds; after losses at most that."""
        self.index.check()
        held = resident(self, RANK)  # type: ignore[arg-type]  # it has an index
        truth = truth_of(self.fake)
        if self.sequencer.applied.complete:
            assert held == truth
            for request in workload(5, seed=1):
                tokens = self.index.match(request.token_ids)[RANK].tokens
                assert tokens == self.fake.lookup(request.token_ids).tokens
        else:
            assert held.keys() <= truth.keys()
            assert all(copies <= truth[block] for block, copies in held.items())


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["publish"] * 6 + ["restart", "unseen_restart", "cut", "wait", "wait"]),
        st.integers(1, 12),
    ),
    max_size=25,
)
probability = st.sampled_from([0.0, 0.0, 0.05, 0.3])
faults = st.builds(
    Faults,
    drop=probability,
    duplicate=probability,
    reorder=probability,
    damage=probability,
    replay_hole=probability,
    end_lost=probability,
    replay_silent=st.sampled_from([0.0, 0.1]),
    replay_late=st.sampled_from([0.0, 0.2]),
)


def run(world: CacheWorld, schedule: list[Step]) -> bool:
    try:
        for step in schedule:
            world.take(step)
        world.settle()
        last = world.engine.batches[-1:]
        if last == [None] or (last and not world.config.has_replay):
            world.publish()  # only the next batch tells that the last one never came
            world.settle()
    except CoincidenceError:
        return False  # nobody could tell: the number of an unseen restart fitted exactly
    return True


@examples(120)
@given(seed=st.integers(0, 2**32), schedule=steps, faults=faults)
def test_when_replay_reaches_back_the_index_equals_the_engine(
    seed: int, schedule: list[Step], faults: Faults
) -> None:
    config = SequencerConfig(has_replay=True, replay_policy=REPLAY)
    world = CacheWorld(seed=seed, faults=faults, config=config, buffer_steps=10_000)
    if run(world, schedule):
        if not world.sequencer.counters["repairs_given_up"]:
            assert world.sequencer.applied.complete
        world.compare()


@examples(80)
@given(
    seed=st.integers(0, 2**32),
    schedule=st.lists(st.one_of(steps.map(tuple), st.just((Step("unencodable"),))), max_size=4),
    faults=faults,
    buffer_steps=st.integers(0, 30),
    has_replay=st.booleans(),
)
def test_when_batches_are_lost_the_index_never_holds_more_than_the_engine(
    seed: int,
    schedule: list[tuple[Step, ...]],
    faults: Faults,
    buffer_steps: int,
    has_replay: bool,
) -> None:
    config = SequencerConfig(has_replay=has_replay, replay_policy=REPLAY)
    world = CacheWorld(seed=seed, faults=faults, config=config, buffer_steps=buffer_steps)
    # A restart that no disconnect shows can be told only by a replay that reaches back far enough.
    flat = [step for part in schedule for step in part if step.kind != "unseen_restart"]
    if run(world, flat):
        world.compare()


def test_a_gap_that_waits_behind_a_repair_is_no_busy_loop() -> None:
    config = SequencerConfig(has_replay=True, replay_policy=REPLAY)
    bad = Faults(drop=0.05, damage=0.3, replay_late=0.2)
    world = CacheWorld(seed=168503, faults=bad, config=config, buffer_steps=0)
    assert run(world, [Step("publish", 1), Step("publish", 1), Step("publish", 9)])
    world.compare()


def test_the_comparison_can_fail() -> None:
    config = SequencerConfig(has_replay=True)
    world = CacheWorld(seed=1, faults=Faults(), config=config, buffer_steps=100)
    assert run(world, [Step("publish", 5)])
    world.compare()
    world.fake.clear()
    with pytest.raises(AssertionError):
        world.compare()
