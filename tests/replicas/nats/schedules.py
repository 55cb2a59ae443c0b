"""Random schedules of faults for one to three writers of a log, and what must hold in each."""

from __future__ import annotations

from random import Random

from kvindex.replicas.nats.log import Head
from kvindex.replicas.nats.log_writer import Append, LogWriter, Look, Make, Ready, Rest, WriterState

_ROUND_TRIP = 0.01  # seconds, after the faults
_WRITE_EVERY = 0.9
_SETTLED, _WATCHED = 8.0, 12.0  # seconds after the last fault
_MOST_STEPS = 30  # of each writer in each second after the last fault
_FOREIGN = "foreign"
_INTRUSION = "foreign message in the epoch"
_EVENTS = ("foreign message", _INTRUSION, "trim", "purge", "roll-back", "delete")
_WELL_FORMED = b"a replica takes this for the relay's"


class Stream:
    """A stream as JetStream keeps it, and all that was ever stored in it."""

    def __init__(self) -> None:
        self.exists = False
        self.first, self.last = 1, 0
        self.messages: dict[int, tuple[str, bytes]] = {}
        self.stored: set[tuple[str, int]] = set()  # epoch and number
        self.begins: dict[str, int] = {}  # number of each epoch's first message
        self.given: dict[str, list[bytes]] = {}  # to the writer, in order
        self.intruded: set[tuple[str, int]] = set()  # epoch and number of foreign messages

    def head(self) -> Head:
        message = self.messages.get(self.last)
        return Head(self.last, self.first, *(message or (None,)))

    def append(self, epoch: str, expected: int | None, body: bytes) -> int | None:
        """Store a message and return its number; None if the log does not end as expected."""
        before = self.messages.get(self.last)
        if expected is not None and expected != self.last:
            return None
        if expected is not None and body and (before is None or before[0] != epoch):
            return None
        self.last += 1
        self.messages[self.last] = (epoch, body)
        if epoch != _FOREIGN:
            self._check(epoch, body, before and before[0])
        return self.last

    def _check(self, epoch: str, body: bytes, epoch_before: str | None) -> None:
        """Fail if an epoch has a wrong body, a hole or a message twice."""
        seq = self.last
        self.stored.add((epoch, seq))
        begin = self.begins.setdefault(epoch, seq)
        if seq == begin:
            assert body == b"", f"{epoch} begins at {seq} with {body!r}"
            return
        place = seq - begin - 1
        bodies = self.given.get(epoch, [])
        assert 0 <= place < len(bodies), f"{seq} is no number of {epoch}"
        assert bodies[place] == body, f"{epoch} has {body!r} at {seq}, not {bodies[place]!r}"
        assert epoch_before == epoch, f"{epoch} goes on at {seq} after {epoch_before}"
        assert (epoch, seq - 1) in self.stored, f"{epoch} lacks {seq - 1}"

    # What can befall it

    def intrude(self, body: bytes, *, later: bool) -> None:
        """Store a foreign message in the last message's epoch, or in its writer's next one."""
        epoch, _ = self.messages.get(self.last, (_FOREIGN, b""))
        if epoch == _FOREIGN:
            return
        if later:
            writer, _, number = epoch.partition("-")
            epoch, body = f"{writer}-{int(number) + 1}", _WELL_FORMED
        if not body and epoch not in self.begins:
            return  # it would be the begin itself
        self.last += 1
        self.messages[self.last] = (epoch, body)
        self.intruded.add((epoch, self.last))

    def make(self) -> None:
        self.exists = True

    def delete(self) -> None:
        self.messages.clear()
        self.first, self.last = 1, 0
        self.exists = False

    def trim(self, count: int) -> None:
        """Remove the oldest messages, as a full stream does: never the newest."""
        for _ in range(min(count, len(self.messages) - 1)):
            self.messages.pop(self.first)
            self.first += 1

    def purge(self) -> None:
        self.messages.clear()
        self.first = self.last + 1

    def roll_back(self, count: int) -> None:
        """Forget the newest messages, as a server does that lost power."""
        for _ in range(min(count, self.last)):
            self.messages.pop(self.last, None)
            self.last -= 1
        self.first = min(self.first, self.last + 1)


class Reader:
    """A reader as a replica is: it goes on by number within an epoch, or needs a snapshot."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._epoch: str | None = None
        self._position = 0
        self.is_misled = False

    @property
    def is_joined(self) -> bool:
        return self._epoch is not None

    def is_misled_in(self, epoch: str) -> bool:
        """Return whether it still follows this epoch, and has applied a foreign message."""
        return self.is_misled and self._epoch == epoch

    def join(self, writer: LogWriter) -> None:
        """Start from a snapshot of all that this writer's log holds."""
        if writer.state is WriterState.WRITING:
            self._epoch, self._position = writer.epoch, writer.position
            self.is_misled = False

    def read(self) -> None:
        """Apply what follows, or notice that it does not; fail if a wrong body is applied."""
        stream = self._stream
        while self._epoch is not None and self._position < stream.last:
            seq = self._position + 1
            message = stream.messages.get(seq)
            if message is None or message[0] != self._epoch:
                self._epoch = None
                return
            if (self._epoch, seq) in stream.intruded:
                if message[1] != _WELL_FORMED:
                    self._epoch = None
                    return
                self.is_misled = True
            else:
                place = seq - stream.begins[self._epoch] - 1
                assert message[1] == stream.given[self._epoch][place], f"read {message} at {seq}"
                assert not self.is_misled, f"{self._epoch} goes on at {seq} after what was foreign"
            self._position = seq


class Owner:
    """Who carries out the steps of one writer."""

    def __init__(self, name: str, stream: Stream, kept_bytes: int) -> None:
        self.writer = LogWriter(name, kept_bytes=kept_bytes)
        self.step: Look | Make | Append | None = None  # in flight
        self.outcome: Head | int | str | None = None  # of the step: the answer on its way
        self.wakes_at = 0.0
        self.wrote_at = 0.0
        self._stream = stream

    def write(self) -> None:
        bodies = self._stream.given.setdefault(self.writer.epoch, [])
        bodies.append(b"%d" % len(bodies))
        self.writer.write(bodies[-1])

    def carry_out(self) -> None:
        """Do what the step says, and keep the answer."""
        stream, step = self._stream, self.step
        if isinstance(step, Make):
            stream.make()
            self.outcome = "made"
        elif not stream.exists:
            self.outcome = "no stream"
        elif isinstance(step, Append):
            self.outcome = stream.append(*step) or "refused"
        else:
            self.outcome = stream.head()

    def report(self, now: float) -> None:
        """Report the answer to the writer, and check what the writer claims then."""
        writer, step, outcome = self.writer, self.step, self.outcome
        self.step = self.outcome = None
        if isinstance(outcome, Head):
            writer.saw(outcome, now)
        elif isinstance(outcome, int):
            writer.acked(outcome)
        elif outcome == "made":
            writer.made()
        elif outcome == "refused":
            writer.refused()
        elif outcome == "no stream" and isinstance(step, Look):
            writer.saw_no_stream()
        else:
            writer.failed("no answer", now)
        if writer.state in (WriterState.WRITING, WriterState.UNSURE):
            place = (writer.epoch, writer.position)
            assert place in self._stream.stored, f"the log never had {place}"


class World:
    """Writers, readers and late appends around one stream, driven by random numbers."""

    def __init__(self, random: Random) -> None:
        self.now = 100.0
        self.stream = Stream()
        self._random = random
        self._events = [event for event in _EVENTS if random.randrange(2)]
        if "roll-back" in self._events and _INTRUSION in self._events:
            self._events.remove(random.choice(("roll-back", _INTRUSION)))  # no promise for both
        self._faults = random.choice((1, 6))  # of 20 steps
        kept = random.choice((0, 3, 1000))
        self.owners = [Owner(name, self.stream, kept) for name in "ABC"[: random.randint(1, 3)]]
        self._reader = Reader(self.stream)
        self._late: list[Append] = []

    def act(self) -> None:
        """Let anything happen once."""
        draw = self._random.randrange(100)
        if draw < 70:
            owner = self._random.choice(self.owners)
            for _ in range(self._random.choice((1, 1, 4, 10))):
                if not self._go_on(owner):
                    break
        elif draw < 80:
            self.now += self._random.choice((0.1, 0.5, 1.0, 4.0))
        elif draw < 86:
            self._deliver_late()
        elif draw < 92:
            if draw == 86:
                self._reader.join(self._random.choice(self.owners).writer)
            self._reader.read()
        elif not self.stream.exists:
            self.stream.make()
        elif self._events:
            self._befall(self._random.choice(self._events))

    def _befall(self, event: str) -> None:
        stream = self.stream
        if event == "foreign message":
            stream.append(_FOREIGN, None, b"nonsense")
        elif event == _INTRUSION:
            body = self._random.choice((b"\xff" * 40, b"", _WELL_FORMED))
            for _ in range(self._random.choice((1, 1, 2, 3))):
                stream.intrude(body, later=not self._random.randrange(4))
        elif event == "trim":
            stream.trim(self._random.randint(1, 4))
        elif event == "purge":
            stream.purge()
        elif event == "roll-back":
            stream.roll_back(self._random.randint(1, 5))
        else:
            stream.delete()

    def _go_on(self, owner: Owner) -> bool:
        """Ask for the owner's step, carry it out, or report its outcome; False if it rests."""
        if owner.step is None:
            return self._ask(owner)
        if owner.outcome is None:
            self._carry_out(owner)
        else:
            owner.report(self.now)
        return True

    def _ask(self, owner: Owner) -> bool:
        step = owner.writer.step(self.now)
        if isinstance(step, Rest):
            return False
        if not isinstance(step, Ready):
            owner.step = step
            if self._random.randrange(3):
                self._carry_out(owner)
        elif self._random.randrange(40):
            owner.write()
        else:
            owner.writer.abandon("its queue was full")
        return True

    def _carry_out(self, owner: Owner) -> None:
        if self._random.randrange(20) >= self._faults:
            owner.carry_out()
        elif self._random.randrange(2):
            owner.carry_out()
            owner.outcome = "the answer was lost"
        else:
            if isinstance(owner.step, Append) and self._random.randrange(4):
                self._late.append(owner.step)
            owner.outcome = "nothing was done"
        if not self._random.randrange(40):
            owner.writer.abandon("its queue was full")

    def _deliver_late(self) -> None:
        if not self._late or not self.stream.exists:
            return
        number = self._random.randrange(len(self._late))
        self.stream.append(*self._late[number])
        if self._random.randrange(3):
            self._late.pop(number)

    def settle(self) -> None:
        """End all faults, let time pass, and check that one writer writes all it is given."""
        while self._late:
            self._deliver_late()
            if not self.stream.exists:
                break
        for owner in self.owners:
            if owner.step is not None:
                if owner.outcome is None:
                    owner.carry_out()
                owner.report(self.now)
            owner.wakes_at = owner.wrote_at = self.now
        start = self.now
        self._let_pass(start + _SETTLED)
        epochs = {owner.writer.epoch for owner in self._writing()}
        self._let_pass(start + _WATCHED)
        writing = self._writing()
        assert len(writing) == 1, f"{len(writing)} writers write"
        writer = writing[0].writer
        assert epochs == {writer.epoch}, f"{epochs} wrote before, now {writer.epoch}"
        place = self.stream.begins[writer.epoch] + len(self.stream.given[writer.epoch])
        assert self.stream.last == writer.position == place, "the newest body is not in the log"
        self._reader.read()
        assert not self._reader.is_misled_in(writer.epoch), "a reader stays misled"
        self._reader.join(writer)
        self._reader.read()

    def _writing(self) -> list[Owner]:
        standing_by = WriterState.STANDING_BY
        return [owner for owner in self.owners if owner.writer.state is not standing_by]

    def _let_pass(self, until: float) -> None:
        steps = 0
        most = int(_MOST_STEPS * len(self.owners) * (until - self.now))
        while True:
            owner = min(self.owners, key=lambda owner: owner.wakes_at)
            if owner.wakes_at >= until:
                break
            self.now = now = owner.wakes_at
            step = owner.writer.step(now)
            steps += 1
            assert steps <= most, f"{most} steps are not enough"
            if isinstance(step, Rest):
                assert step.until > now
                owner.wakes_at = step.until
            elif not isinstance(step, Ready):
                owner.step = step
                owner.carry_out()
                owner.report(now)
                owner.wakes_at = now + _ROUND_TRIP
            elif now >= owner.wrote_at:
                owner.wrote_at = now + _WRITE_EVERY
                owner.write()
            else:
                owner.wakes_at = owner.wrote_at
        self.now = until


def run(random: Random) -> None:
    """Run one schedule; AssertionError if a promise is broken."""
    world = World(random)
    for _ in range(random.choice((20, 60, 120))):
        world.act()
    world.settle()
