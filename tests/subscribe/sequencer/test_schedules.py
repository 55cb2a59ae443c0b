"""Any schedule of faults: the sequencer's invariant holds, and everything heals that can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvindex.subscribe.sequencer import ReplayPolicy, SequencerConfig, State
from kvindex.subscribe.sequencer.stream_state import MAX_DISPUTES
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

often = st.sampled_from([0.0, 0.05, 0.2, 0.5])
sometimes = st.sampled_from([0.0, 0.0, 0.1, 0.3])
live_faults = {"drop": often, "duplicate": often, "reorder": often, "damage": sometimes}
repairable = {**live_faults, "replay_hole": sometimes, "replay_sure": st.just(2)}
stragglers = {"stragglers": st.booleans()}
unanswered = {"replay_silent": often, "replay_late": sometimes, "end_lost": sometimes}
rough = {**live_faults, **unanswered, "replay_hole": sometimes, "replay_damage": sometimes}

configs = st.builds(
    SequencerConfig,
    has_replay=st.just(True),
    on_loss=st.sampled_from(["reset", "keep"]),
    max_held=st.sampled_from([1, 3, 10_000]),
    recent=st.sampled_from([1, 4, 256]),
    replay_policy=st.builds(ReplayPolicy, attempts=st.integers(1, 4)),
)
without_replay = configs.map(
    lambda config: SequencerConfig(
        has_replay=False, on_loss=config.on_loss, max_held=config.max_held, recent=config.recent
    )
)


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
    return parts.map(lambda parts: [step for part in parts for step in part])


@dataclass(frozen=True)
class Play:
    """A schedule, and the world that it happens in."""

    seed: int
    faults: Faults
    schedule: list[Step]
    config: SequencerConfig
    buffer_steps: int

    def world(self, kind: type[World] = World) -> World:
        return kind(
            seed=self.seed,
            faults=self.faults,
            config=self.config,
            buffer_steps=self.buffer_steps,
        )

    def run(self, kind: type[World] = World, *, then_publish: int = 0) -> World | None:
        """Run to rest, publish further batches and rest again; return the world.

        None if it met what no subscriber could tell.
        """
        world = self.world(kind)
        try:
            for step in self.schedule:
                world.take(step)
            if then_publish:
                world.settle_and_publish(then_publish)
            world.settle()
        except CoincidenceError:
            event("coincidence")
            return None
        return world


def plays(
    faults: dict[str, st.SearchStrategy[Any]],
    schedule: st.SearchStrategy[list[Step]],
    *,
    configs: st.SearchStrategy[SequencerConfig] = configs,
    buffer_steps: Sequence[int] = (AMPLE,),
) -> st.SearchStrategy[Play]:
    return st.builds(
        Play,
        seed=st.integers(min_value=0, max_value=2**32),
        faults=st.builds(Faults, **faults),
        schedule=schedule,
        config=configs,
        buffer_steps=st.sampled_from(buffer_steps),
    )


def check_at_rest(world: World) -> None:
    sequencer, engine = world.sequencer, world.engine
    assert sequencer.state in (State.LIVE, State.STALE)
    assert not sequencer.reason or sequencer.state is State.STALE
    assert sequencer.lag == 0
    if len(world.unseen_lives) < MAX_DISPUTES:
        assert sequencer.counters["foreign_replay"] == 0
    published = [batch for batch in engine.batches if batch is not None]
    held = world.sink.unbroken
    assert held == published[len(published) - len(held) :]
    assert held or not published or world.sink.losses
    if sequencer.applied.complete:
        assert held == published == engine.batches[: len(published)]


def check_nothing_lost(world: World) -> None:
    check_at_rest(world)
    assert world.sink.delivered == world.engine.batches
    assert world.sink.losses == []
    assert world.sequencer.applied.complete


@schedules
@given(plays({**repairable, **stragglers}, steps("restart", "unseen_restart", "cut")))
def test_whatever_replay_can_repair_is_repaired_without_loss(play: Play) -> None:
    if world := play.run():
        check_nothing_lost(world)


@schedules
@given(plays({**repairable, **stragglers}, resumptions("restart", "unseen_restart", "cut")))
def test_a_process_that_goes_on_from_what_another_saved_loses_nothing(play: Play) -> None:
    if world := play.run():
        check_nothing_lost(world)
        event(f"resumed {min(world.resumed, 2)}")


@schedules
@given(
    plays(rough, steps("restart", "cut", "unencodable"), buffer_steps=[1, 2, 5, 20, AMPLE]),
)
def test_whatever_happens_the_rank_holds_a_true_suffix(play: Play) -> None:
    if world := play.run():
        check_at_rest(world)


@schedules
@given(
    plays(rough, resumptions("restart", "cut", "unencodable"), buffer_steps=[0, 1, 2, 5, 20, AMPLE])
)
def test_whatever_happens_around_a_resumption_the_rank_holds_a_true_suffix(play: Play) -> None:
    if world := play.run(then_publish=0 if play.buffer_steps else 3):
        check_at_rest(world)


@schedules
@given(
    plays(
        live_faults,
        steps("restart", "cut", "unencodable"),
        configs=without_replay,
        buffer_steps=[0],
    )
)
def test_without_replay_each_gap_is_declared(play: Play) -> None:
    if world := play.run(then_publish=3):  # a lost tail shows only when something follows it
        check_at_rest(world)


@schedules
@given(plays(live_faults, steps("cut"), buffer_steps=[0]))
def test_a_publisher_that_keeps_nothing_for_replay_still_goes_live(play: Play) -> None:
    if world := play.run(then_publish=3):
        check_at_rest(world)
        assert world.sink.unbroken[-3:] == world.engine.batches[-3:]


@schedules
@given(
    plays(
        {**live_faults, "replay_silent": sometimes, "end_lost": sometimes},
        steps("cut", "neighbour", "neighbour", "restart"),
    ),
    st.booleans(),
)
def test_nothing_of_another_publisher_stays_when_its_replay_endpoint_was_given_by_mistake(
    play: Play, neighbour_rests: bool
) -> None:
    world = play.world(Mispaired)
    assert isinstance(world, Mispaired)
    for step in play.schedule:
        world.take(step)
    world.faults = Faults()
    for _ in range(60):  # three probes, which silence may have made as rare as 40 s
        world.publish()
        if not neighbour_rests:
            world.publish_neighbour()
        world.run(3.0)
    assert world.sequencer.state is State.LIVE
    assert world.sequencer.lag == 0
    assert {batch.content[0] for batch in world.sink.delivered} == {world.engine.life}
    held = world.sink.unbroken
    assert held == world.engine.batches[-len(held) :]
    if world.sequencer.applied.complete:
        assert held == world.engine.batches
    event(f"foreign {world.sequencer.counters['foreign_replay'] > 0}")
