"""Who writes the log, and what to append next: decisions without I/O and clocks.

An *epoch* is one writer's unbroken run of messages. A writer begins an epoch with an empty message,
and sends one append at a time, each with the number that it expects to be the log's last. So every
message stands where its writer put it, or nowhere, and any other message in between is noticed.

```
              silence                     acked
STANDING_BY ──────────► BEGINNING ────────────────────► WRITING ◄──────────┐
     ▲                      │ refused, or no answer         │ refused, or   │ the head is ours:
     │                      ▼                               ▼ no answer     │ append the rest again
     └───────────────── UNSURE ◄────────────────────────────┴───────────────┘
       the head is another's     the head is ours, but older than what is kept: BEGINNING
```

There is no lease and no clock of others: a writer that was stopped for an hour is *fenced* by the
refusal of its next append. Nothing depends on NATS's message ids: servers that store a stream once
and those that replicate it answer a repeated append differently.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from typing import NamedTuple, TypeAlias

from kvindex.index.nats.log import Head

KEPT_BYTES = 64 << 20
SILENCE = 3.0  # seconds; a writer appends at least once a second
_LOOK_EVERY = 0.5  # seconds between two looks at the head while standing by
_BACKOFF, _MAX_BACKOFF = 0.1, 2.0  # seconds between two attempts after a failure


class WriterState(str, enum.Enum):
    """What a writer is doing.

    Attributes:
        STANDING_BY: it watches another writer.
        BEGINNING: it claims the log for a new epoch of its own.
        WRITING: it appends.
        UNSURE: it does not know where the log ends, and has to look.
    """

    STANDING_BY = "standing by"
    BEGINNING = "beginning"
    WRITING = "writing"
    UNSURE = "unsure"

    def __str__(self) -> str:
        return self.value


class Look(NamedTuple):
    """Look at the head; then call `saw`, `saw_no_stream` or `failed`."""


class Make(NamedTuple):
    """Make the stream; then call `made` or `failed`."""


class Append(NamedTuple):
    """Append a body; then call `acked`, `refused` or `failed`."""

    epoch: str
    expected: int
    body: bytes


class Ready(NamedTuple):
    """Nothing is in flight: `write` may be called."""


class Rest(NamedTuple):
    """Nothing is to be done until then."""

    until: float


Step: TypeAlias = Look | Make | Append | Ready | Rest


class LogWriter:
    """One of any number of writers of a log, of which one writes.

    Its owner carries out `step`, reports what came of it, and asks for the next one.

    Args:
        name: different for each writer, of letters and digits; part of its epochs.
        kept_bytes: bytes kept of the bodies that were acknowledged, to append them again if the
            log forgets them; at least the newest body is kept.
        silence: seconds without a new message after which the writer that stands by takes over.

    Attributes:
        state: what it is doing.
        epoch: the newest of its epochs; "" before the first.
        position: number of the last message of its epoch that was acknowledged.
        reason: why it is not writing, or the last trouble while it does.
        counters: how often what happened.

    Owner: one thread.
    """

    def __init__(
        self, name: str, *, kept_bytes: int = KEPT_BYTES, silence: float = SILENCE
    ) -> None:
        self.state = WriterState.STANDING_BY
        self.epoch = ""
        self.position = 0
        self.reason = "it has not looked at the log yet"
        self.counters: Counter[str] = Counter()
        self._name = name
        self._most_kept = kept_bytes
        self._silence = silence
        self._epochs = 0
        self._kept: deque[tuple[int, bytes]] = deque()  # by number; those in flight are the last
        self._kept_bytes = 0
        self._unsent: deque[bytes] = deque()  # to be appended after `position`, in order
        self._expected = 0  # of the append in flight, or to be sent
        self._seen: tuple[int, str | None, float] | None = None  # head, and since when it is so
        self._looking = True  # a look is due; otherwise an append
        self._making = False
        self._begins_anew = False  # BEGINNING after an epoch of its own
        self._not_before = 0.0
        self._failures = 0

    # What to do -------------------------------------------------------------------------------

    def step(self, now: float) -> Step:
        """Return what is to be done now; the same until its result is reported."""
        if now < self._not_before:
            return Rest(self._not_before)
        if self._making:
            return Make()
        if self._looking:
            return Look()
        if self.state is WriterState.BEGINNING:
            return Append(self.epoch, self._expected, b"")
        if not self._unsent:
            return Ready()
        return Append(self.epoch, self.position, self._unsent[0])

    def write(self, body: bytes) -> None:
        """Append this next; only after `Ready`."""
        assert self.state is WriterState.WRITING and not self._unsent
        self._unsent.append(body)
        self._kept.append((self.position + 1, body))
        self._kept_bytes += len(body)
        while self._kept_bytes > self._most_kept and self._kept[0][0] <= self.position:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def abandon(self, reason: str) -> None:
        """Begin a new epoch, since this one lacks something."""
        if self.state in (WriterState.WRITING, WriterState.UNSURE):
            self._begin_anew(reason)

    # What came of it --------------------------------------------------------------------------

    def acked(self, seq: int) -> None:
        """Note that the append in flight got this number."""
        if self.state is WriterState.BEGINNING:
            if seq != self._expected + 1:
                self._be_unsure(f"the epoch began at {seq}, not at {self._expected + 1}")
                return
            self._start(seq)
        elif seq != self.position + 1:
            self._be_unsure(f"a body was stored at {seq}, not at {self.position + 1}")
        else:
            self._accept(seq)
        self._succeed()

    def refused(self) -> None:
        """Note that another message has the number of the append in flight."""
        self.counters["refused"] += 1
        self._be_unsure("another message is where the next one should be")

    def failed(self, reason: str, now: float) -> None:
        """Note that a step failed, or was not answered: an append may have been stored."""
        self.counters["failures"] += 1
        self.reason = reason
        if not (self._looking or self._making):
            self._be_unsure(reason)
        pause = min(_MAX_BACKOFF, _BACKOFF * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._not_before = now + pause

    def made(self) -> None:
        """Note that there is a stream now."""
        self._making = False

    def saw_no_stream(self) -> None:
        """Note that there is no stream: it is to be made, and holds nothing of ours."""
        self._making = self._looking = True
        if self.state is not WriterState.STANDING_BY:
            self._begin_anew("the stream was deleted")

    def saw(self, head: Head, now: float) -> None:
        """Note the end of the log."""
        if self.state is WriterState.UNSURE:
            self._resume(head, now)
        elif self.state is WriterState.BEGINNING:
            self._claim(head, now)
        else:
            self._watch(head, now)

    # Standing by, and beginning ---------------------------------------------------------------

    def _watch(self, head: Head, now: float) -> None:
        """Begin an epoch if the log is new, or was silent for long enough."""
        if self._seen is None or self._seen[:2] != (head.seq, head.epoch):
            self._seen = (head.seq, head.epoch, now)
            self.reason = f"another relay writes epoch {head.epoch}"
        if head.seq == 0 or now - self._seen[2] >= self._silence:
            self.state = WriterState.BEGINNING
            self._new_epoch(head.seq)
        else:
            self._not_before = now + _LOOK_EVERY

    def _new_epoch(self, expected: int) -> None:
        self._epochs += 1
        self.epoch = f"{self._name}-{self._epochs}"
        self._expected = expected
        self._begins_anew = False
        self._looking = False

    def _claim(self, head: Head, now: float) -> None:
        """Go on beginning: the last attempt's answer is missing, or an own epoch has ended."""
        if head.epoch == self.epoch and not self._begins_anew:
            self._start(head.seq)  # it was stored, and nothing else was sent
        elif head.epoch is None or head.epoch.startswith(f"{self._name}-"):
            self._new_epoch(head.seq)
        elif not self._begins_anew and head.seq == self._expected:
            self._looking = False  # it was not stored
        else:
            self._stand_by(head, now)

    def _start(self, seq: int) -> None:
        self.state = WriterState.WRITING
        self.position = seq
        self.reason = ""
        self._looking = False
        self.counters["epochs"] += 1

    def _stand_by(self, head: Head, now: float) -> None:
        self.counters["fenced"] += 1
        self.state = WriterState.STANDING_BY
        self.reason = f"another relay writes epoch {head.epoch}"
        self._forget()
        self._seen = (head.seq, head.epoch, now)
        self._not_before = now + _LOOK_EVERY

    def _begin_anew(self, reason: str) -> None:
        self.state = WriterState.BEGINNING
        self.reason = reason
        self._begins_anew = True
        self._forget()

    def _forget(self) -> None:
        self._looking = True
        self._unsent.clear()
        self._kept.clear()
        self._kept_bytes = 0

    # Writing, and finding out where the log ends ----------------------------------------------

    def _accept(self, seq: int) -> None:
        self.position = seq
        self._unsent.popleft()
        self.counters["appends"] += 1

    def _succeed(self) -> None:
        self._failures = 0
        if self.state is WriterState.WRITING:
            self.reason = ""

    def _be_unsure(self, reason: str) -> None:
        self.reason = reason
        self._looking = True
        if self.state is WriterState.WRITING:
            self.state = WriterState.UNSURE

    def _resume(self, head: Head, now: float) -> None:
        """Go on after what the log has of this epoch, or give the epoch up."""
        sent = self.position + bool(self._unsent)
        if head.epoch is None:
            # The last message was purged, and may have been another's, unless it was ours before.
            if head.seq != self.position:
                self._begin_anew(f"the log was purged, and its head is {head.seq}")
                return
        elif head.epoch != self.epoch:
            self._stand_by(head, now)
            return
        first = self._kept[0][0] if self._kept else self.position + 1
        if not first - 1 <= head.seq <= max(sent, self._last_kept()):
            self._begin_anew(f"the log ends at {head.seq}, and bodies are kept from {first} on")
            return
        forgotten = self.position - head.seq
        if forgotten > 0:
            self.counters["forgotten"] += forgotten
        self.state = WriterState.WRITING
        self.position = head.seq
        self._unsent = deque(body for seq, body in self._kept if seq > head.seq)
        self.counters["appended_again"] += len(self._unsent)
        self._looking = False

    def _last_kept(self) -> int:
        return self._kept[-1][0] if self._kept else self.position
