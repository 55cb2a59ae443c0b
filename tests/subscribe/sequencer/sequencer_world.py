"""A simulated publisher, a faulty network and a sequencer, over a discrete-event loop.

Nothing here sleeps or reads a clock: a schedule is a list of steps (publish, restart, cut, wait)
and a description of the faults; everything else follows from a seed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from kvindex.subscribe.resumption import SavedCursor
from kvindex.subscribe.sequencer import (
    Action,
    AskReplay,
    Batch,
    CloseReplay,
    RankBatch,
    RankLost,
    RankRestarted,
    Sequencer,
    SequencerConfig,
    State,
)
from tests.subscribe.sequencer.sequencer_script import RANK
from tests.subscribe.sequencer.sequencer_script import batch as make_batch

CONNECT_DELAY = 0.05


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, and what replay does."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    damage: float = 0.0
    far_damage: float = 0.0
    """The part of damaged messages whose number is damaged, too."""
    replay_hole: float = 0.0
    replay_sure: int = 1
    """So many first replies are never dropped: a ROUTER drops only when its queue is full."""
    end_lost: float = 0.0
    replay_silent: float = 0.0
    replay_late: float = 0.0
    replay_damage: float = 0.0
    stragglers: bool = False
    """Whether live messages still arrive after the connection that carried them broke."""
    live_delay: float = 0.5
    """Longest extra delay of a reordered or doubled message, in seconds."""


@dataclass(frozen=True)
class Step:
    """One step, and how much of it.

    publish / unencodable / restart / unseen_restart / cut / wait / save / resume
    """

    kind: str
    amount: int = 1


@dataclass
class Engine:
    """One life of the publisher."""

    life: int
    buffer_steps: int
    batches: list[Batch | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer: deque[Batch] = deque(maxlen=self.buffer_steps)

    def publish(self, ts: float) -> Batch:
        seq = len(self.batches)
        batch = make_batch(seq, self.life, ts=ts)
        self.batches.append(batch)
        self.buffer.append(batch)
        return batch


@dataclass
class Sink:
    """What a subscribing process holds: batches since the last restart or reset, and losses."""

    delivered: list[Batch] = field(default_factory=list)
    unbroken: list[Batch] = field(default_factory=list)
    """The batches since the last loss of any kind."""
    expected: int | None = None
    epoch: int = 0
    highest_life: int = 0
    losses: list[RankLost] = field(default_factory=list)

    def restart(self) -> None:
        self.epoch += 1
        self.expected = None
        self.delivered.clear()
        self.unbroken.clear()
        self.losses.clear()

    def lose(self, lost: RankLost, last_seq: int) -> None:
        self.expected = last_seq + 1
        self.losses.append(lost)
        self.unbroken.clear()
        if lost.reset:
            self.delivered.clear()

    def receive(self, batch: Batch) -> None:
        self.expected = batch.seq + 1
        self.delivered.append(batch)
        self.unbroken.append(batch)


class CoincidenceError(Exception):
    """An unseen restart that no subscriber could tell: the number fits exactly, on a live batch."""


class World:
    """Runs a schedule and checks the invariant at every action."""

    def __init__(
        self, *, seed: int, faults: Faults, config: SequencerConfig, buffer_steps: int
    ) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.now = 0.0
        self.buffer_steps = buffer_steps
        self.engine = Engine(0, buffer_steps)
        self.sequencer = Sequencer(RANK, config, now=0.0, random=Random(seed + 1))
        self.config = config
        self.connected = False
        self.cut_off = False  # the live stream only, and nobody notices
        self.connection = 0
        self.unseen_lives: set[int] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._open_request: int | None = None
        self.sent: dict[tuple[int, int], Batch] = {}
        self.sink = Sink()
        self.process = 0
        self.saved: tuple[bytes | None, Sink] = (None, Sink())
        self.resumed = 0
        self.connect()

    # -- the discrete-event loop

    def at(self, delay: float, event: Callable[[], None]) -> None:
        """Let something reach the subscribing process after a while, if that still lives then."""
        self._order += 1
        heapq.heappush(self._events, (self.now + delay, self._order, event))

    def run(self, seconds: float) -> None:
        """Let time pass, serving events and the sequencer's deadline in order."""
        end = self.now + seconds
        for _ in range(100_000):
            deadline = self.sequencer.deadline
            next_event = self._events[0][0] if self._events else end
            due = min(next_event, end if deadline is None else max(deadline, self.now))
            if due >= end:
                self.now = end
                return
            self.now = due
            if self._events and next_event <= due:
                heapq.heappop(self._events)[2]()
            else:
                self.obey(self.sequencer.tick(self.now))
        raise AssertionError("the sequencer never comes to rest")

    # -- the link

    def connect(self) -> None:
        self.connection += 1
        self.connected = True
        self.obey(self.sequencer.connected(self.now))

    def disconnect(self) -> None:
        self.connected = False
        self.connection += 1
        self.obey(self.sequencer.disconnected(self.now))

    def send_live(self, batch: Batch) -> None:
        faults, random = self.faults, self.random
        if not self.connected or self.cut_off or random.random() < faults.drop:
            return
        copies = 2 if random.random() < faults.duplicate else 1
        connection = self.connection
        for copy in range(copies):
            late = copy > 0 or random.random() < faults.reorder
            delay = 0.001 + (random.random() * faults.live_delay if late else 0.0)
            damaged = random.random() < faults.damage
            self.at(delay, partial(self._arrive, batch, damaged, connection))

    def _arrive(self, batch: Batch, damaged: bool, connection: int) -> None:
        if connection != self.connection and not self.faults.stragglers:
            return
        if damaged:
            seq = batch.seq if self.random.random() < 0.5 else None
            if self.random.random() < self.faults.far_damage:
                seq = batch.seq + self.random.choice([1, 5, 1_000, 10**9, 10**15])
            self.obey(self.sequencer.damaged(seq, self.now))
        else:
            self.obey(self.sequencer.live(batch, self.now))

    # -- the replay endpoint

    @property
    def replayer(self) -> Engine:
        """Whose replay endpoint it is."""
        return self.engine

    def serve(self, ask: AskReplay) -> None:
        """Answer as the engines' ROUTER does."""
        faults, random = self.faults, self.random
        if not self.connected or random.random() < faults.replay_silent:
            return
        delay = 0.01 + (random.random() * 6 if random.random() < faults.replay_late else 0.0)
        replies = [batch for batch in self.replayer.buffer if batch.seq >= ask.start_seq]
        for number, batch in enumerate(replies):
            delay += 0.0001
            if number >= faults.replay_sure and random.random() < faults.replay_hole:
                continue
            damaged = random.random() < faults.replay_damage
            self.at(delay, partial(self._reply, ask.request, batch, damaged))
        if random.random() >= faults.end_lost:
            self.at(delay + 0.0001, partial(self._end, ask.request))

    def _reply(self, request: int, batch: Batch, damaged: bool) -> None:
        if damaged:
            self.obey(self.sequencer.replayed_damaged(request, batch.seq, self.now))
        else:
            self.obey(self.sequencer.replayed(request, batch, self.now))

    def _end(self, request: int) -> None:
        self.obey(self.sequencer.replay_ended(request, self.now))

    # -- steps

    def take(self, step: Step) -> None:
        getattr(self, f"_{step.kind}")(step.amount)

    def _publish(self, count: int) -> None:
        for _ in range(count):
            self.publish()

    def _unencodable(self, _: int) -> None:
        self.engine.batches.append(None)

    def _wait(self, ticks: int) -> None:
        self.run(ticks * 0.05)

    def publish(self) -> None:
        batch = self.engine.publish(1_000.0 + self.now)
        self.sent[batch.content] = batch
        self.send_live(batch)
        self.run(0.002)

    def _cut(self, published_meanwhile: int) -> None:
        self.disconnect()
        self._publish(published_meanwhile)
        self.run(CONNECT_DELAY)
        self.connect()

    def _save(self, _: int) -> None:
        """Save cursor and contents, at one point between two actions."""
        cursor = self.sequencer.cursor()
        self.saved = (None, Sink())
        if cursor is not None:
            saved = SavedCursor(cursor=cursor, dp_rank=0, named=None, fingerprints="")
            self.saved = (saved.encode(), deepcopy(self.sink))

    def _resume(self, published_meanwhile: int) -> None:
        """Kill the subscribing process; a new one goes on from what was saved last."""
        self.process += 1
        self._events.clear()  # all of them were on their way to the old one's sockets
        self.connection += 1
        self.connected = False
        self._open_request = None
        self.sequencer = Sequencer(RANK, self.config, now=self.now, random=Random(self.process))
        self._publish(published_meanwhile)
        saved, sink = self.saved
        self.sink = deepcopy(sink)
        if saved is not None:
            cursor = SavedCursor.decode(saved).cursor
            self.resumed += 1
            self.obey(self.sequencer.resume(cursor, self.now))
        self.connect()

    def _restart(self, published_meanwhile: int) -> None:
        """Start the engine anew; it publishes some batches before anyone is connected again."""
        self._begin_life()
        self._cut(published_meanwhile)

    def _unseen_restart(self, published_meanwhile: int) -> None:
        """Start the engine anew behind a connection that stays up."""
        self._begin_life()
        self.unseen_lives.add(self.engine.life)
        self.cut_off = True
        # An empty one cannot be told from one that keeps nothing for replay.
        self._publish(max(1, published_meanwhile))
        self.cut_off = False

    def _begin_life(self) -> None:
        self.run(0.01)
        self.engine = Engine(self.engine.life + 1, self.buffer_steps)

    def settle(self) -> None:
        """Let the faults stop and everything come to rest, probes included."""
        self.faults = Faults()
        self.run(200.0)
        if not self.engine.buffer:
            # Nobody can tell an engine that has published nothing from one that keeps nothing.
            self.publish()
            self.run(200.0)

    def settle_and_publish(self, count: int) -> None:
        """Come to rest and publish more."""
        self.settle()
        self._publish(count)

    # -- obeying, and the invariant

    def obey(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, AskReplay):
                self._open_request = action.request
                self.serve(action)
            elif isinstance(action, CloseReplay):
                assert action.request == self._open_request
                self._open_request = None
            elif isinstance(action, RankLost):
                self._check_lost(action)
            elif isinstance(action, RankRestarted):
                assert (action.rank, action.epoch) == (RANK, self.sink.epoch + 1)
                self.sink.restart()
            elif isinstance(action, RankBatch):
                self._check_delivered(action)
        deadline = self.sequencer.deadline
        assert deadline is None or self.sequencer.state is not State.CLOSED
        assert len(self.sequencer.held) <= self.config.max_held
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Without replay no batch waits behind holes for longer than one time-out."""
        oldest = self.sequencer.held.waiting_since
        if self.config.has_replay or oldest is None or not self.connected:
            return
        assert self.now - oldest <= self.config.replay_policy.timeout + 0.001

    def _check_lost(self, lost: RankLost) -> None:
        sink = self.sink
        assert (lost.rank, lost.epoch) == (RANK, sink.epoch)
        assert lost.last_seq is not None
        assert lost.first_seq <= lost.last_seq
        assert sink.expected in (None, lost.first_seq), "a loss names the hole from where we stand"
        assert lost.reset == (self.config.on_loss == "reset")
        sink.lose(lost, lost.last_seq)

    def _check_delivered(self, action: RankBatch[Any]) -> None:
        sink = self.sink
        assert (action.rank, action.epoch) == (RANK, sink.epoch)
        batch = self.sent[action.batch]
        assert batch.seq == action.seq
        life = batch.content[0]
        if sink.expected is not None:
            assert batch.seq == sink.expected, f"{batch.seq} delivered, {sink.expected} expected"
        elif batch.seq > 0:
            assert not self.sequencer.applied.complete
        if sink.delivered and sink.delivered[-1].content[0] != life:
            self._check_mixture(action)
        if life < sink.highest_life:
            assert not sink.delivered
        sink.highest_life = max(life, sink.highest_life)
        sink.receive(batch)

    def _check_mixture(self, action: RankBatch[Any]) -> None:
        """Two lives stand together: an error unless no subscriber could have told."""
        life = action.batch[0]
        if not action.replayed and (not self.config.has_replay or life in self.unseen_lives):
            raise CoincidenceError
        # While replay proves to be empty, batches are taken on trust, until it has something.
        on_trust = not action.replayed and self.sequencer.counters["replay_empty"] > 0
        assert on_trust, f"{action.batch} follows {self.sink.delivered[-1].content}"


class Mispaired(World):
    """A world in which the replay endpoint is another engine's, by a slip of whoever configured it.

    Until that shows, batches of both may stand together.
    """

    def __init__(self, **options: Any) -> None:
        self.neighbour = Engine(-1, options["buffer_steps"])
        super().__init__(**options)

    @property
    def replayer(self) -> Engine:
        return self.neighbour

    def _neighbour(self, count: int) -> None:
        for _ in range(count):
            self.publish_neighbour()

    def publish_neighbour(self) -> None:
        batch = self.neighbour.publish(1_000.0 + self.now)
        self.sent[batch.content] = batch
        self.run(0.002)

    def _check_delivered(self, action: RankBatch[Any]) -> None:
        batch = self.sent[action.batch]
        assert batch.seq == action.seq
        assert self.sink.expected in (None, batch.seq)
        self.sink.receive(batch)
