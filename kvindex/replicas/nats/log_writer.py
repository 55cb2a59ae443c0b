"""Who writes the log, and what to append next: decisions without I/O and clocks.

An *epoch* is one writer's unbroken run of messages. A writer begins an epoch with an empty message,
and sends one append at a time, each with the number that it expects to be the log's last, and of
its own epoch. So whatever happens, each epoch in the log is a run without holes. The body of a
number never changes within an epoch: an append that is stored late, after it was given up, is
either refused or puts the right body in its place.

```
             the log is new, or silent           acked
STANDING_BY ──────────────────────────► BEGINNING ────► WRITING ◄────────────┐
     ▲                                   │   ▲            │ refused, or      │ the head is ours:
     │ the head is another's             │   │            ▼ no answer        │ append what it lacks
     ├───────────────────────────────────┘   └───────── UNSURE ──────────────┘
     │                          the epoch cannot go on    │
     └────────────────────────────────────────────────────┘
                    the head is another's
```

BEGINNING and UNSURE look at the head before each append, after a pause. An epoch cannot go on if
the log forgot more than is kept, if its stream is new, if its last message was purged, if the log
refuses what should fit, or if its last message is *foreign*: in the epoch's subject, but not what
was sent with this number. Whoever may write to the log can do that, so the bodies are compared.

There is no lease and no clock of others: a writer that was stopped for an hour is *fenced* by the
refusal of its next append.

Nothing depends on NATS's message ids: servers that store a stream once and those that replicate it
answer a repeated append differently.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from typing import NamedTuple, TypeAlias

from kvindex.replicas.nats.log import Head

KEPT_BYTES = 64 << 20
SILENCE = 3.0  # seconds; a writer appends at least once a second
_LOOK_EVERY = 0.5  # seconds between two looks at the head while standing by
_MOST_REFUSALS = 8  # since the last body was stored
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds after a trouble, doubled while they repeat


class WriterState(str, enum.Enum):
    """What a writer is doing."""

    STANDING_BY = "standing by"  # it watches another writer
    BEGINNING = "beginning"  # it claims the log for a new epoch of its own
    WRITING = "writing"  # it appends
    UNSURE = "unsure"  # it does not know where the log ends, and has to look

    def __str__(self) -> str:
        return self.value


class Look(NamedTuple):
    """Look at the head; then call `saw`, `saw_no_stream` or `failed`."""


class Make(NamedTuple):
    """Make the stream; then call `made` or `failed`."""


class Append(NamedTuple):
    """Append a body; then call `acked`, `refused` or `failed`."""

    epoch: str
    # Number of the log's last message, without which it must not be stored; of the same epoch,
    # unless the body is empty.
    expected: int
    body: bytes  # empty if it begins the epoch


class Ready(NamedTuple):
    """Nothing is in flight: `write` may be called."""


class Rest(NamedTuple):
    """Nothing is to be done until then."""

    until: float


Step: TypeAlias = Look | Make | Append | Ready | Rest


class LogWriter:
    """One of any number of writers of a log, of which one writes.

    Its owner carries out `step`, reports what came of it, and asks for the next one. All times are
    seconds of the owner's monotonic clock. Each call is O(1), but the one that goes on after
    trouble is O(bodies that are kept). `name` is part of its epochs: letters and digits, different
    for each writer and each of its processes. Owner: one thread.
    """

    def __init__(
        self, name: str, *, kept_bytes: int = KEPT_BYTES, silence: float = SILENCE
    ) -> None:
        self.state = WriterState.STANDING_BY
        self.epoch = ""  # the newest of its epochs
        # Number of the newest message of its epoch that the log is known to have, all before it
        # included; it goes back if the log forgets some.
        self.position = 0
        self.reason = "it has not looked at the log yet"  # or the last trouble while it writes
        self.counters: Counter[str] = Counter()  # `Relay.statistics` says what they count
        self._own = f"{name}-"
        self._most_kept = kept_bytes
        self._silence = silence
        self._epochs = 0
        self._begin_after: int | None = None  # number that the begin of `epoch` expects
        # By number, without holes. The first is what the log ends with if it forgot all others; its
        # bytes do not count.
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._unsent: deque[bytes] = deque()  # the last of those kept: what follows `position`
        self._seen: tuple[int, str | None, float] | None = None  # head, and since when it is so
        self._looking = True  # a look is due; otherwise an append
        self._making = False  # the stream is to be made before the look
        self._asked_at = 0.0  # time of the last step
        self._not_before = 0.0
        self._troubles = 0  # since the log made progress
        self._refusals = 0  # since a body was stored

    # What to do -------------------------------------------------------------------------------

    def step(self, now: float) -> Step:
        """Return what is to be done now; the same until its result is reported."""
        self._asked_at = now
        if now < self._not_before:
            return Rest(self._not_before)
        if self._making:
            return Make()
        if self._looking:
            return Look()
        if self.state is WriterState.BEGINNING:
            assert self._begin_after is not None
            return Append(self.epoch, self._begin_after, b"")
        if not self._unsent:
            return Ready()
        return Append(self.epoch, self.position, self._unsent[0])

    def write(self, body: bytes) -> None:
        """Append this next, which must not be empty; only after `Ready`."""
        assert self.state is WriterState.WRITING
        assert not self._unsent
        assert body
        self._unsent.append(body)
        self._kept.append((self.position + 1, body))
        self._kept_bytes += len(body)
        # What the log has not acknowledged stays, however much it is: it is to be sent again.
        while self._kept_bytes > self._most_kept and self._kept[1][0] <= self.position:
            self._kept.popleft()
            self._kept_bytes -= len(self._kept[0][1])

    def abandon(self, reason: str) -> None:
        """Begin a new epoch, since this one lacks something; nothing if there is none."""
        # What comes of a step in flight is reported all the same, and is of no account.
        if self.state in (WriterState.WRITING, WriterState.UNSURE):
            self._begin_anew(reason)
            self._pause(self._asked_at)

    # What came of it --------------------------------------------------------------------------

    def acked(self, seq: int) -> None:
        """Note that the append in flight got this number."""
        if self._looking:  # its epoch was abandoned meanwhile
            return
        begins = self.state is WriterState.BEGINNING
        place = (self._begin_after or 0) + 1 if begins else self.position + 1
        if seq != place:
            self._doubt(f"a message was stored at {seq} instead of {place}", self._asked_at)
        elif begins:
            self._start(seq)
        else:
            self.position = seq
            self._unsent.popleft()
            self.counters["appends"] += 1
            self._troubles = self._refusals = 0
            self.reason = ""

    def refused(self) -> None:
        """Note that the log does not end where the append in flight expected it."""
        self.counters["refused"] += 1
        self._refusals += 1
        self._doubt("the log does not end where it should", self._asked_at)

    def failed(self, reason: str, now: float) -> None:
        """Note that a step failed, or was not answered: an append may have been stored, or be."""
        self.counters["failures"] += 1
        self._doubt(reason, now)

    def made(self) -> None:
        """Note that there is a stream now."""
        self._making = False

    def saw_no_stream(self) -> None:
        """Note that there is no stream: it is to be made, and holds nothing of ours."""
        self._making = True
        self._pause(self._asked_at)
        if self.state is not WriterState.STANDING_BY:
            self._begin_anew("the stream was deleted")

    def saw(self, head: Head, now: float) -> None:
        """Note the end of the log, as it is or was since the step was returned."""
        if self.state is WriterState.UNSURE:
            self._resume(head, now)
        elif self.state is WriterState.BEGINNING:
            self._claim(head, now)
        else:
            self._watch(head, now)

    def _doubt(self, reason: str, now: float) -> None:
        """Look at the head before anything else is sent, and not at once."""
        self.reason = reason
        self._looking = True
        if self.state is WriterState.WRITING:
            self.state = WriterState.UNSURE
        self._pause(now)

    def _pause(self, now: float) -> None:
        """Do nothing for a while, twice as long if nothing was stored since the last trouble."""
        pause = _SHORTEST_PAUSE * 2.0 ** min(self._troubles, 10)
        self._not_before = now + min(pause, _LONGEST_PAUSE)
        self._troubles += 1

    # Standing by, and beginning ---------------------------------------------------------------

    def _watch(self, head: Head, now: float) -> None:
        """Begin an epoch if the log is new, or was silent for long enough."""
        if self._seen is None or self._seen[:2] != (head.seq, head.epoch):
            self._observe(head, now)
        if head.seq == 0 or (self._seen and now - self._seen[2] >= self._silence):
            self.state = WriterState.BEGINNING
            self._new_epoch(head.seq)
        else:
            self._troubles = 0
            self._not_before = now + _LOOK_EVERY

    def _observe(self, head: Head, now: float) -> None:
        self._seen = (head.seq, head.epoch, now)
        self.reason = (
            f"the log ends at {head.seq}, which was purged"
            if head.epoch is None
            else f"another relay writes epoch {head.epoch}"
        )

    def _new_epoch(self, after: int) -> None:
        self._epochs += 1
        self.epoch = f"{self._own}{self._epochs}"
        self._begin_after = after
        self._looking = False

    def _claim(self, head: Head, now: float) -> None:
        """Begin, or see what came of it: the answer is missing, or the last epoch has ended."""
        after = self._begin_after
        if after is not None and (head.seq, head.epoch, head.body) == (after + 1, self.epoch, b""):
            self._start(head.seq)
        elif head.epoch is None or head.epoch.startswith(self._own):
            # Each attempt has a name of its own: an old begin that is stored late is not this one.
            self._new_epoch(head.seq)
        elif head.seq == after:
            self._looking = False  # it was not stored
        else:
            self.counters["outrun"] += 1
            self._stand_by(head, now)

    def _start(self, seq: int) -> None:
        self.state = WriterState.WRITING
        self.position = seq
        self._kept.append((seq, b""))
        self.reason = ""
        self._looking = False
        self.counters["epochs"] += 1

    def _stand_by(self, head: Head, now: float) -> None:
        self.state = WriterState.STANDING_BY
        self._forget()
        self._observe(head, now)
        self._not_before = now + _LOOK_EVERY

    def _begin_anew(self, reason: str) -> None:
        self.state = WriterState.BEGINNING
        self.reason = reason
        self._begin_after = None
        self._forget()

    def _forget(self) -> None:
        self._looking = True
        self._unsent.clear()
        self._kept.clear()
        self._kept_bytes = 0

    # Finding out where the log ends -----------------------------------------------------------

    def _resume(self, head: Head, now: float) -> None:
        """Go on after what the log has of this epoch, or give the epoch up."""
        if head.epoch is not None and not head.epoch.startswith(self._own):
            self.counters["fenced"] += 1
            self._stand_by(head, now)
            return
        first = self._kept[0][0]
        last = self.position + len(self._unsent)
        # Whoever may write to the log can do so in our epoch, and replicas would read it.
        is_foreign = head.seq > last or (
            head.seq >= first and self._kept[head.seq - first][1] != head.body
        )
        if head.epoch == self.epoch and is_foreign:
            self.counters["foreign"] += 1
            self._begin_anew(f"message {head.seq} of {self.epoch} is another client's")
            return
        # A log that ends where it should, and refuses all the same, would be asked for ever.
        is_ours = head.epoch == self.epoch and self._refusals <= _MOST_REFUSALS
        if not (is_ours and head.seq >= first):
            self._begin_anew(
                f"the log ends at {head.seq} of epoch {head.epoch}; "
                f"{self.epoch} can go on from {first} to {last}; {self._refusals} refusals"
            )
            return
        self.counters["forgotten"] += max(0, self.position - head.seq)
        self.state = WriterState.WRITING
        self.position = head.seq
        self._unsent = deque(body for seq, body in self._kept if seq > head.seq)
        self.counters["appended_again"] += len(self._unsent)
        self._looking = False
