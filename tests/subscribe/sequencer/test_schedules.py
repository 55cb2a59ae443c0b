"""Any schedule of faults: the sequencer's invariant holds, and everything heals that can."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvindex.subscribe.sequencer import ReplayPolicy, SequencerConfig, State
from kvindex.subscribe.sequencer.repair import MAX_DISPUTES
from tests.examples import examples
from tests.subscribe.sequencer.sequencer_world import (
    CoincidenceError,
    Faults,
    Mispaired,
    Step,
    World,
)

pytestmark = pytest.mark.property

schedules = examples(150)

AMPLE = 10_000

seeds = st.integers(min_value=0, max_value=2**32)
often = st.sampled_from([0.0, 0.05, 0.2, 0.5])
sometimes = st.sampled_from([0.0, 0.0, 0.1, 0.3])


def steps(*kinds: str) -> st.SearchStrategy[list[Step]]:
    step = st.one_of(
        st.builds(Step, st.just("publish"), st.integers(1, 8)),
        st.builds(Step, st.just("wait"), st.sampled_from([1, 10, 60, 150])),
        *(st.builds(Step, st.just(kind), st.integers(0, 6)) for kind in kinds),
    )
    return st.lists(step, min_size=1, max_size=16)


def resumptions(*kinds: str) -> st.SearchStrategy[list[Step]]:
    """Schedules in which what was saved between two parts is gone on from before a third."""
    resume = st.builds(Step, st.just("resume"), st.integers(0, 6))
    save = st.just([Step("save")])
    parts = st.tuples(
        steps(*kinds), save, steps(*kinds), resume.map(lambda step: [step]), steps(*kinds, "resume")
    )
    return parts.map(lambda found: [step for part in found for step in part])


configs = st.builds(
    SequencerConfig,
    has_replay=st.just(True),
    on_loss=st.sampled_from(["reset", "keep"]),
    max_held=st.sampled_from([1, 3, 10_000]),
    recent=st.sampled_from([1, 4, 256]),
    replay_policy=st.builds(ReplayPolicy, attempts=st.integers(1, 4)),
)

live_faults = {"drop": often, "duplicate": often, "reorder": often, "damage": sometimes}


def without_replay(config: SequencerConfig) -> SequencerConfig:
    return SequencerConfig(
        has_replay=False, on_loss=config.on_loss, max_held=config.max_held, recent=config.recent
    )


def run(world: World, schedule: list[Step]) -> bool:
    """Run a schedule to rest; return False if it met what no subscriber could tell."""
    try:
        for step in schedule:
            world.take(step)
        world.settle()
    except CoincidenceError:
        event("coincidence")
        return False
    return True


def check_at_rest(world: World) -> None:
    sequencer, engine = world.sequencer, world.engine
    assert sequencer.state in (State.LIVE, State.STALE)
    assert not sequencer.reason or sequencer.state is State.STALE
    assert sequencer.lag == 0
    if len(world.unseen_lives) < MAX_DISPUTES:
        assert sequencer.counters["foreign_replay"] == 0
    published = [batch for batch in engine.batches if batch is not None]
    held = world.unbroken
    assert held == published[len(published) - len(held) :]
    assert held or not published or world.losses
    if sequencer.applied.complete:
        assert held == published == engine.batches[: len(published)]


@schedules
@given(
    seed=seeds,
    faults=st.builds(
        Faults,
        **live_faults,
        replay_hole=sometimes,
        replay_sure=st.just(2),
        stragglers=st.booleans(),
    ),
    schedule=steps("restart", "unseen_restart", "cut"),
    config=configs,
)
def test_whatever_replay_can_repair_is_repaired_without_loss(
    seed: int, faults: Faults, schedule: list[Step], config: SequencerConfig
) -> None:
    world = World(seed=seed, faults=faults, config=config, buffer_steps=AMPLE)
    if run(world, schedule):
        check_at_rest(world)
        assert world.delivered == world.engine.batches
        assert world.losses == []
        assert world.sequencer.applied.complete


@schedules
@given(
    seed=seeds,
    faults=st.builds(
        Faults,
        **live_faults,
        replay_hole=sometimes,
        replay_silent=often,
        replay_late=sometimes,
        replay_damage=sometimes,
        end_lost=sometimes,
    ),
    schedule=steps("restart", "cut", "unencodable"),
    config=configs,
    buffer_steps=st.sampled_from([1, 2, 5, 20, AMPLE]),
)
def test_whatever_happens_the_rank_holds_a_true_suffix(
    seed: int, faults: Faults, schedule: list[Step], config: SequencerConfig, buffer_steps: int
) -> None:
    world = World(seed=seed, faults=faults, config=config, buffer_steps=buffer_steps)
    if run(world, schedule):
        check_at_rest(world)


@schedules
@given(
    seed=seeds,
    faults=st.builds(
        Faults,
        **live_faults,
        replay_hole=sometimes,
        replay_sure=st.just(2),
        stragglers=st.booleans(),
    ),
    schedule=resumptions("restart", "unseen_restart", "cut"),
    config=configs,
)
def test_a_process_that_goes_on_from_what_another_saved_loses_nothing(
    seed: int, faults: Faults, schedule: list[Step], config: SequencerConfig
) -> None:
    world = World(seed=seed, faults=faults, config=config, buffer_steps=AMPLE)
    if run(world, schedule):
        check_at_rest(world)
        assert world.delivered == world.engine.batches
        assert world.losses == []
        assert world.sequencer.applied.complete
        event(f"resumed {min(world.resumed, 2)}")


@schedules
@given(
    seed=seeds,
    faults=st.builds(
        Faults,
        **live_faults,
        replay_hole=sometimes,
        replay_silent=often,
        replay_late=sometimes,
        replay_damage=sometimes,
        end_lost=sometimes,
    ),
    schedule=resumptions("restart", "cut", "unencodable"),
    config=configs,
    buffer_steps=st.sampled_from([0, 1, 2, 5, 20, AMPLE]),
)
def test_whatever_happens_around_a_resumption_the_rank_holds_a_true_suffix(
    seed: int, faults: Faults, schedule: list[Step], config: SequencerConfig, buffer_steps: int
) -> None:
    world = World(seed=seed, faults=faults, config=config, buffer_steps=buffer_steps)
    if run(world, schedule):
        if buffer_steps == 0:
            for _ in range(3):
                world.publish()
            world.settle()
        check_at_rest(world)


@schedules
@given(
    seed=seeds,
    faults=st.builds(Faults, **live_faults),
    schedule=steps("restart", "cut", "unencodable"),
    config=configs.map(without_replay),
)
def test_without_replay_each_gap_is_declared(
    seed: int, faults: Faults, schedule: list[Step], config: SequencerConfig
) -> None:
    world = World(seed=seed, faults=faults, config=config, buffer_steps=0)
    try:
        for step in schedule:
            world.take(step)
        world.faults = Faults()
        world.run(10.0)
        # A lost tail shows only when something follows it.
        for _ in range(3):
            world.publish()
        world.settle()
    except CoincidenceError:
        event("coincidence")
        return
    check_at_rest(world)


@schedules
@given(
    seed=seeds,
    faults=st.builds(Faults, **live_faults),
    schedule=steps("cut"),
    config=configs,
)
def test_a_publisher_that_keeps_nothing_for_replay_still_goes_live(
    seed: int, faults: Faults, schedule: list[Step], config: SequencerConfig
) -> None:
    world = World(seed=seed, faults=faults, config=config, buffer_steps=0)
    if not run(world, schedule):
        return
    for _ in range(3):
        world.publish()
    world.settle()
    check_at_rest(world)
    assert world.unbroken[-3:] == world.engine.batches[-3:]


@schedules
@given(
    seed=seeds,
    faults=st.builds(Faults, **live_faults, replay_silent=sometimes, end_lost=sometimes),
    schedule=steps("cut", "neighbour", "neighbour", "restart"),
    config=configs,
    neighbour_rests=st.booleans(),
)
def test_nothing_of_another_publisher_stays_when_its_replay_endpoint_was_given_by_mistake(
    seed: int,
    faults: Faults,
    schedule: list[Step],
    config: SequencerConfig,
    neighbour_rests: bool,
) -> None:
    world = Mispaired(seed=seed, faults=faults, config=config, buffer_steps=AMPLE)
    for step in schedule:
        world.take(step)
    world.faults = Faults()
    for _ in range(60):  # three probes, which silence may have made as rare as 40 s
        world.publish()
        if not neighbour_rests:
            world.publish_neighbour()
        world.run(3.0)
    engine = world.engine.life
    assert world.sequencer.state is State.LIVE
    assert world.sequencer.lag == 0
    assert {batch.content[0] for batch in world.delivered} == {engine}
    held = world.unbroken
    assert held == world.engine.batches[-len(held) :]
    if world.sequencer.applied.complete:
        assert held == world.engine.batches
    event(f"foreign {world.sequencer.counters['foreign_replay'] > 0}")
