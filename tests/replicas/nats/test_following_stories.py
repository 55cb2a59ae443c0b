"""Whatever falls together, a replica's place at a log ends or holds what the relay holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import DecodeError, SnapshotError
from kvindex.replicas.nats import following
from kvindex.replicas.nats.following import LogMembership
from kvindex.wire.errors import NatsError, QueueTimeoutError
from tests.examples import examples
from tests.native_ring import needs_ring
from tests.replicas.nats.hand_relay import B, Scene, damaged, receive

pytestmark = [pytest.mark.property, needs_ring]

HAPPENINGS = [
    *("store", "store", "store", "add", "remove", "snapshot", "step", "step", "step"),
    *("skip", "repeat", "trim", "epoch", "forget", "foreign", "damage", "renew", "refuse"),
]


class Story(Scene):
    """A scene whose place joins anew whenever it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.current: LogMembership | None = None
        self.epochs = 1

    def step(self) -> None:
        """Let the place go on by one message."""
        place = self.current
        try:
            if place is None:
                place = self.place()
                place.join()
                self.current = place
            else:
                receive(place)
        except QueueTimeoutError:
            pass
        except (NatsError, DecodeError, SnapshotError):
            self.current = None

    def happen(self, what: str) -> None:
        if what == "add" and B not in self.relay.index.ranks:
            self.relay.add(B)
        elif what == "remove" and B in self.relay.index.ranks:
            self.relay.remove(B)
        elif what == "skip":
            self.log.skipped.add(self.log.last)
        elif what == "repeat":
            self.log.repeated.add(self.log.last)
        elif what == "trim":
            self.log.trim(self.log.last)
        elif what == "epoch":
            self.begin_epoch()
        elif what == "forget" and self.log.last > self.log.first:  # and the relay dies
            del self.log.messages[self.log.last]
            self.log.last -= 1
            self.begin_epoch()
        elif what == "foreign":
            self.log.add("nonsense", b"\xff")
            self.begin_epoch()
        elif what == "damage":
            for name, data in self.log.objects.items():
                self.log.objects[name] = damaged(data) if isinstance(data, bytes) else data
        elif what == "renew":
            if self.current is not None:
                self.log.on_change("")
        elif what == "refuse":
            self.log.failure = None if self.log.failure else NatsError("not now")
        elif what in ("store", "step", "snapshot"):
            getattr(self, what)()

    def begin_epoch(self) -> None:
        self.turn()
        self.epochs += 1
        self.epoch = f"e-{self.epochs}"
        self.log.add(self.epoch, b"")


@examples(100)
@given(st.lists(st.sampled_from(HAPPENINGS), max_size=60))
def test_whatever_happens_the_copy_becomes_the_relays_index(happenings: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "_SNAPSHOT_SECONDS", 0.0)
        patch.setattr(following, "_RETRY_SECONDS", 0.0)
        story = Story()
        try:
            story.step()
            for what in happenings:
                story.happen(what)
            story.log.failure = None
            story.snapshot()
            story.store()
            for _ in range(story.log.last + 5):
                story.step()
            assert story.current is not None
            story.assert_same(story.current)
        finally:
            story.close()
