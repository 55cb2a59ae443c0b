"""Drive a sequencer by hand, in few words."""

from __future__ import annotations

from collections.abc import Sequence
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
from kvindex.wire.rank import Rank

TIMEOUT = 2.0
START_TS = 1_000.0
RANK = Rank("engine", 0)


def batch(seq: int, life: int = 0, *, ts: float | None = None, size: int = 10) -> Batch:
    """Make batch `seq` of one life of a publisher; later lives have later timestamps."""
    when = START_TS + 1000 * life + seq if ts is None else ts
    return Batch(seq, when, (life, seq), hash((life, seq)), size)


class Script:
    """A sequencer, its time, and everything that it has asked for so far."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("has_replay", True)
        options.setdefault("replay_policy", ReplayPolicy(timeout=TIMEOUT, attempts=3, backoff=0.1))
        self.now = 0.0
        self.sequencer = Sequencer(RANK, SequencerConfig(**options), now=0.0, random=Random(1))
        self.actions: list[Action] = []

    def _note(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        return actions

    # -- what happens

    def resume(self, cursor: Cursor | None, *, refused: str = "") -> list[Action]:
        return self._note(self.sequencer.resume(cursor, self.now, refused=refused))

    def connect(self) -> list[Action]:
        return self._note(self.sequencer.connected(self.now))

    def disconnect(self) -> list[Action]:
        return self._note(self.sequencer.disconnected(self.now))

    def live(self, *batches: Batch | int) -> list[Action]:
        out = []
        for item in batches:
            accepted = batch(item) if isinstance(item, int) else item
            out += self.sequencer.live(accepted, self.now)
        return self._note(out)

    def reply(self, *batches: Batch | int, end: bool = False) -> list[Action]:
        """Reply to the latest request."""
        request = self.request
        out = []
        for item in batches:
            accepted = batch(item) if isinstance(item, int) else item
            out += self.sequencer.replayed(request, accepted, self.now)
        if end:
            out += self.sequencer.replay_ended(request, self.now)
        return self._note(out)

    def end(self) -> list[Action]:
        return self.reply(end=True)

    def pass_time(self, seconds: float) -> list[Action]:
        """Let time pass, ticking at each deadline."""
        out = []
        end = self.now + seconds
        while (due := self.sequencer.deadline) is not None and due <= end:
            self.now = max(self.now, due)
            out += self.sequencer.tick(self.now)
        self.now = end
        return self._note(out)

    def joined(self, *batches: Batch | int) -> Script:
        """Connect and join by a replay of `batches`."""
        self.connect()
        self.reply(*batches, end=True)
        return self

    # -- what came of it

    @property
    def request(self) -> int:
        return [action for action in self.actions if isinstance(action, AskReplay)][-1].request

    def is_in(self, state: State) -> bool:
        return self.sequencer.state is state

    @property
    def count(self) -> dict[str, int]:
        return self.sequencer.counters


def delivered(actions: Sequence[Action]) -> list[Any]:
    """List the seqs delivered; batches of later lives as (life, seq)."""
    found = [action.batch for action in actions if isinstance(action, RankBatch)]
    return [seq if life == 0 else (life, seq) for life, seq in found]


def asked(actions: Sequence[Action]) -> list[int]:
    return [action.start_seq for action in actions if isinstance(action, AskReplay)]


def lost(actions: Sequence[Action]) -> list[tuple[str, int, int | None]]:
    return [(a.reason, a.first_seq, a.last_seq) for a in actions if isinstance(a, RankLost)]


def restarts(actions: Sequence[Action]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, RankRestarted)]
