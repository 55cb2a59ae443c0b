"""Drive a sequencer by hand, in few words."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from random import Random
from typing import Any

from kvindex.subscribe.sequencer import (
    Action,
    AskReplay,
    Batch,
    Cursor,
    RankBatch,
    RankLost,
    RankRestarted,
    ReplayPolicy,
    Sequencer,
    SequencerConfig,
    State,
)
from kvindex.subscribe.sequencer.batches import AppliedBatches
from kvindex.wire.rank import Rank

TIMEOUT = 2.0
START_TS = 1_000.0
RANK = Rank("engine", 0)


def batch(seq: int, life: int = 0, *, ts: float | None = None, size: int = 10) -> Batch:
    """Make batch `seq` of one life of a publisher; later lives have later timestamps."""
    when = START_TS + 1000 * life + seq if ts is None else ts
    return Batch(seq, when, (life, seq), hash((life, seq)), size)


class Actions(list[Action]):
    """Actions in order, and what they amount to."""

    @property
    def delivered(self) -> list[Any]:
        """The seqs delivered; batches of later lives as (life, seq)."""
        contents = [action.batch for action in self if isinstance(action, RankBatch)]
        return [seq if life == 0 else (life, seq) for life, seq in contents]

    @property
    def asked(self) -> list[int]:
        """The seqs from which replay was asked."""
        return [action.start_seq for action in self if isinstance(action, AskReplay)]

    @property
    def lost(self) -> list[tuple[str, int, int | None]]:
        return [(a.reason, a.first_seq, a.last_seq) for a in self if isinstance(a, RankLost)]

    @property
    def holes(self) -> list[tuple[int, int | None]]:
        """The first and the last seq of each loss."""
        return [(first, last) for _, first, last in self.lost]

    @property
    def restarts(self) -> list[str]:
        return [action.reason for action in self if isinstance(action, RankRestarted)]


class Script:
    """A sequencer, its time, and all actions that it has returned so far."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("has_replay", True)
        options.setdefault("replay_policy", ReplayPolicy(timeout=TIMEOUT, attempts=3, backoff=0.1))
        self.now = 0.0
        self.sequencer = Sequencer(RANK, SequencerConfig(**options), now=0.0, random=Random(1))
        self.actions = Actions()

    def _note(self, actions: Iterable[Action]) -> Actions:
        new = Actions(actions)
        self.actions += new
        return new

    # -- what happens

    def resume(self, cursor: Cursor | None, *, refused: str = "") -> Actions:
        return self._note(self.sequencer.resume(cursor, self.now, refused=refused))

    def connect(self) -> Actions:
        return self._note(self.sequencer.connected(self.now))

    def disconnect(self) -> Actions:
        return self._note(self.sequencer.disconnected(self.now))

    def reconnect(self) -> Actions:
        return Actions([*self.disconnect(), *self.connect()])

    def live(self, *batches: Batch | int) -> Actions:
        events = (self.sequencer.live(as_batch(item), self.now) for item in batches)
        return self._note(chain.from_iterable(events))

    def damaged(self, seq: int | None) -> Actions:
        return self._note(self.sequencer.damaged(seq, self.now))

    def reply(self, *batches: Batch | int, end: bool = False) -> Actions:
        """Reply to the latest request."""
        request = self.request
        events = (self.sequencer.replayed(request, as_batch(b), self.now) for b in batches)
        ended = self._note(chain.from_iterable(events))
        return Actions([*ended, *self._end(request)]) if end else ended

    def reply_damaged(self, seq: int) -> Actions:
        return self._note(self.sequencer.replayed_damaged(self.request, seq, self.now))

    def end(self) -> Actions:
        return self._end(self.request)

    def _end(self, request: int) -> Actions:
        return self._note(self.sequencer.replay_ended(request, self.now))

    def fail(self) -> Actions:
        return self._note(self.sequencer.replay_failed(self.request, self.now))

    def answer_next(self, *batches: Batch | int) -> Actions:
        """Wait for the next request; answer with these replies and the end."""
        before = self.request
        for _ in range(200):
            if self.request != before:
                break
            self.pass_time(0.05)
        return self.reply(*batches, end=True)

    def pass_time(self, seconds: float) -> Actions:
        """Let time pass, ticking at each deadline."""
        out = []
        end = self.now + seconds
        while (due := self.sequencer.deadline) is not None and due <= end:
            self.now = max(self.now, due)
            out += self.sequencer.tick(self.now)
        self.now = end
        return self._note(out)

    def close(self) -> Actions:
        return self._note(self.sequencer.close(self.now))

    def joined(self, *batches: Batch | int, live: Iterable[Batch | int] = ()) -> Script:
        """Connect and join by a replay of `batches`; then receive the batches in `live`."""
        self.connect()
        self.reply(*batches, end=True)
        self.live(*live)
        return self

    # -- what came of it

    @property
    def request(self) -> int:
        """The latest request; 0 before the first."""
        requests = (a.request for a in reversed(self.actions) if isinstance(a, AskReplay))
        return next(requests, 0)

    @property
    def applied(self) -> AppliedBatches:
        return self.sequencer.applied

    def is_in(self, state: State) -> bool:
        return self.sequencer.state is state

    @property
    def count(self) -> dict[str, int]:
        return self.sequencer.counters


def without_replay(*live: int, **options: Any) -> Script:
    """Connect to a publisher that has no replay endpoint, and receive these batches."""
    script = Script(has_replay=False, **options)
    script.connect()
    script.live(*live)
    return script


def as_batch(item: Batch | int) -> Batch:
    return batch(item) if isinstance(item, int) else item
