"""A run of live batches does what the same batches do one by one, whatever has gone before."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvindex.subscribe.sequencer import (
    Action,
    Batch,
    RankBatch,
    ReplayPolicy,
    Sequencer,
    SequencerConfig,
)
from tests.examples import examples
from tests.subscribe.sequencer.sequencer_script import RANK, Script
from tests.subscribe.sequencer.sequencer_script import batch as sent
from tests.subscribe.sequencer.sequencer_world import World
from tests.subscribe.sequencer.test_schedules import (
    Play,
    check_at_rest,
    live_faults,
    plays,
    repairable,
    steps,
    without_replay,
)

pytestmark = pytest.mark.property


def one_by_one(sequencer: Sequencer, batches: Sequence[Batch], now: float) -> list[Action]:
    return [action for batch in batches for action in sequencer.live(batch, now)]


def by_runs(sequencer: Sequencer, batches: Sequence[Batch], now: float) -> list[Action]:
    """Take batches as a feed does: by the run where one begins, and each other one by itself."""
    actions: list[Action] = []
    position = 0
    while position < len(batches):
        taken = 0
        row = row_from(sequencer.run_start, batches[position:])
        if row:
            timestamps, fingerprints = [b.ts for b in row], [b.fingerprint for b in row]
            taken = sequencer.live_run(row[0].seq, timestamps, fingerprints, now)
            actions += [
                RankBatch(RANK, sequencer.applied.epoch, batch.seq, batch.content, False)
                for batch in row[:taken]
            ]
            event(f"runs of {'several' if taken > 1 else taken}")
        position += taken
        if position < len(batches):
            actions += sequencer.live(batches[position], now)
            position += 1
    return actions


def row_from(seq: int | None, batches: Sequence[Batch]) -> list[Batch]:
    row: list[Batch] = []
    if seq is not None:
        for batch in batches:
            if batch.seq != seq + len(row):
                break
            row.append(batch)
    return row


def everything(value: Any) -> Any:
    """All that a sequencer is made of, as plain values."""
    if isinstance(value, Random):
        return value.getstate()
    if isinstance(value, Counter):
        return {name: count for name, count in value.items() if count}
    if isinstance(value, Mapping):
        return [(key, everything(held)) for key, held in value.items()]
    if not type(value).__module__.startswith("kvindex") or isinstance(value, (Batch, str)):
        return value
    names: Iterable[str] = getattr(value, "__dict__", None) or value.__slots__
    return {name: everything(getattr(value, name)) for name in sorted(names)}


# -- any script, twice

Operation = tuple[str, Any]

regular = (1, 1.0, 0)
irregular = st.tuples(
    st.sampled_from([1, 1, 2, 0, -1, -3]),  # seq, counted from the batch before
    st.sampled_from([1.0, 1.0, 0.0, -2.0, -50.0, 50.0]),  # ts, likewise
    st.sampled_from([0, 0, 1]),  # which publisher's content
)
bursts = st.builds(
    lambda before, between, after: ("live", [regular] * before + between + [regular] * after),
    st.integers(0, 6),
    st.lists(irregular, max_size=1),
    st.integers(1, 6),
)
single: st.SearchStrategy[Operation] = st.one_of(
    st.tuples(st.just("connected"), st.none()),
    st.tuples(st.just("disconnected"), st.none()),
    st.tuples(st.just("damaged"), st.sampled_from([None, -1, 0, 1])),
    st.tuples(st.just("failed"), st.none()),
    st.tuples(st.just("pass"), st.sampled_from([0.1, 2.5, 6.0, 40.0])),
)
replayed = st.tuples(st.just("replayed"), st.integers(0, 4))
# What belongs together, so that streams come to life again and go on.
passages = st.one_of(
    bursts.map(lambda burst: [burst]),
    bursts.map(lambda burst: [("pass", 6.0), burst]),  # a probe is under way
    replayed.map(lambda replay: [replay, ("ended", None)]),
    replayed.map(
        lambda replay: [("disconnected", None), ("connected", None), replay, ("ended", None)]
    ),
    st.tuples(replayed, bursts).map(
        lambda both: [("disconnected", None), ("connected", None), both[0], both[1]]
    ),
    single.map(lambda operation: [operation]),
)
scripts = st.lists(passages, max_size=12).map(lambda script: list(chain(*script)))
small_configs = st.builds(
    SequencerConfig,
    has_replay=st.booleans(),
    on_loss=st.sampled_from(["reset", "keep"]),
    max_held=st.sampled_from([1, 4, 100]),
    recent=st.sampled_from([1, 3, 256]),
    replay_policy=st.builds(ReplayPolicy, attempts=st.integers(1, 2)),
)


class Puppet(Script):
    """A script whose live batches come several at a time, as changes from the batch before."""

    def __init__(self, config: SequencerConfig, give: Any, first_seq: int) -> None:
        super().__init__(**msgspec.structs.asdict(config))
        self._give = give
        self._last = sent(first_seq - 1, ts=1_000.0)

    def take(self, operation: Operation) -> list[Action]:
        kind, amount = operation
        done = len(self.actions)
        getattr(self, f"_{kind}")(amount)
        return self.actions[done:]

    def _live(self, changes: list[tuple[int, float, int]]) -> None:
        batches = [self._next(*change) for change in changes]
        self._note(self._give(self.sequencer, batches, self.now))

    def _next(self, seq: int, ts: float, life: int) -> Batch:
        before = self._last
        self._last = sent(max(0, before.seq + seq), life, ts=before.ts + ts)
        return self._last

    def _connected(self, _: None) -> None:
        self.connect()

    def _disconnected(self, _: None) -> None:
        self.disconnect()

    def _damaged(self, distance: int | None) -> None:
        self.damaged(None if distance is None else self._last.seq + distance)

    def _replayed(self, count: int) -> None:
        self.reply(*range(max(0, self._last.seq - count), self._last.seq + 1))

    def _ended(self, _: None) -> None:
        self.end()

    def _failed(self, _: None) -> None:
        self.fail()

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        self._note(self.sequencer.tick(self.now))


@examples(150)
@given(
    config=small_configs,
    first_seq=st.sampled_from([0, 0, 0, 7, 2**64 - 4]),
    joined=st.sampled_from([True, True, True, False]),
    script=scripts,
)
def test_any_script_ends_alike_by_runs_and_one_by_one(
    config: SequencerConfig, first_seq: int, joined: bool, script: list[Operation]
) -> None:
    slow = Puppet(config, one_by_one, first_seq)
    fast = Puppet(config, by_runs, first_seq)
    joining: list[Operation] = [("connected", None), ("live", [(1, 1.0, 0)]), ("ended", None)]
    for operation in [*(joining if joined else []), *script]:
        assert fast.take(operation) == slow.take(operation)
        assert everything(fast.sequencer) == everything(slow.sequencer)
        assert fast.sequencer.deadline == slow.sequencer.deadline


# -- the simulated network, its messages arriving several at a time


class BurstyWorld(World):
    """A world in which what arrives waits for the feed's next turn, and is taken by runs."""

    def __init__(self, **options: Any) -> None:
        self._waiting: list[Batch] = []
        super().__init__(**options)

    def _arrive(self, batch: Batch, damaged: bool, connection: int) -> None:
        if damaged:
            self._take_waiting()
            super()._arrive(batch, damaged, connection)
        elif connection == self.connection or self.faults.stragglers:
            if not self._waiting:
                self.at(0.02, self._take_waiting)
            self._waiting.append(batch)

    def _take_waiting(self) -> None:
        batches, self._waiting = self._waiting, []
        twin = copy.deepcopy(self.sequencer)
        expected = one_by_one(twin, batches, self.now)
        actions = by_runs(self.sequencer, batches, self.now)
        assert actions == expected
        assert everything(self.sequencer) == everything(twin)
        self.obey(actions)

    def disconnect(self) -> None:
        self._take_waiting()
        super().disconnect()


bursty = examples(40, nightly=2_000)


@bursty
@given(plays(repairable, steps("restart", "unseen_restart", "cut")))
def test_bursts_over_a_faulty_network_are_repaired_alike(play: Play) -> None:
    if world := play.run(BurstyWorld):
        check_at_rest(world)
        assert world.sink.delivered == world.engine.batches


@bursty
@given(
    plays(
        live_faults,
        steps("restart", "cut", "unencodable"),
        configs=without_replay,
        buffer_steps=[0],
    )
)
def test_bursts_without_replay_are_judged_alike(play: Play) -> None:
    if world := play.run(BurstyWorld):
        assert world.sequencer.lag == 0
