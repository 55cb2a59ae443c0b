"""A replica's place at a log, over a log in memory that loses, repeats and forgets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvindex import DecodeError
from kvindex.replicas.nats import following
from kvindex.replicas.nats.following import NewEpochError, NoSnapshotError, TrimmedError
from kvindex.replicas.nats.log import NoStreamError
from kvindex.replicas.nats.snapshots import encode_snapshot, name_of
from kvindex.wire.errors import NatsError, QueueTimeoutError, WaitCancelledError
from tests.native_ring import needs_ring
from tests.replicas.hand_server import held
from tests.replicas.nats.hand_relay import STOP, A, B, Scene, damaged, follow, receive

pytestmark = [pytest.mark.unit, needs_ring]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for a snapshot once, and ask a refusing server again at once."""
    monkeypatch.setattr(following, "_SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(following, "_RETRY_SECONDS", 0.0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_it_joins_with_all_that_the_log_has_and_follows(scene: Scene) -> None:
    scene.store()
    scene.store()
    place = scene.joined()
    scene.assert_same(place)
    assert place.messages == 4
    scene.relay.add(B)
    scene.store(B)
    scene.relay.remove(A)
    scene.relay.show(B)
    scene.turn()
    follow(scene, place)
    assert held(place.copy.index).keys() == {B}


def test_a_snapshot_goes_on_from_its_position_whatever_came_while_it_was_taken(
    scene: Scene,
) -> None:
    position = scene.log.last + 1
    parts = scene.relay.snapshots.parts()
    taken = []
    for _ in range(2):
        taken.append(next(parts))
        scene.store()
    data = encode_snapshot([*taken, *parts], scene.relay.index, scene.epoch, position)
    scene.log.put(name_of(position, scene.epoch), data)
    scene.turn()
    scene.log.trim(position)
    scene.assert_same(scene.joined())


def test_a_message_that_is_delivered_twice_counts_once(scene: Scene) -> None:
    place = scene.joined()
    for _ in range(3):
        scene.store()
    scene.log.repeated = {scene.log.last - 1}
    follow(scene, place)


def test_a_message_that_was_not_delivered_is_asked_for_again(scene: Scene) -> None:
    place = scene.joined()
    for _ in range(3):
        scene.store()
    missing = scene.log.last - 1
    scene.log.skipped = {missing}
    follow(scene, place)
    assert scene.log.reads[-1] == missing


def test_a_message_that_is_gone_is_noticed(scene: Scene) -> None:
    place = scene.joined()
    for _ in range(3):
        scene.store()
    scene.log.trim(scene.log.last)
    with pytest.raises(TrimmedError, match="came where 3 should follow"):
        receive(place)


def test_a_new_epoch_ends_it(scene: Scene) -> None:
    place = scene.joined()
    scene.log.add("e-2", b"")
    with pytest.raises(NewEpochError, match=f"e-2 begins at message {scene.log.last}"):
        receive(place)


def test_an_epoch_that_began_below_the_expected_number_is_seen_in_the_silence(
    scene: Scene,
) -> None:
    scene.store()
    place = scene.joined()
    scene.log.last -= 1  # the server has forgotten it
    scene.log.add("e-2", b"")
    with pytest.raises(NewEpochError, match="e-2"):
        receive(place)


def test_messages_that_the_server_forgot_and_got_again_count_once(scene: Scene) -> None:
    scene.store()
    place = scene.joined()
    lost = scene.log.last
    kept = scene.log.messages.pop(scene.log.last)
    scene.log.last -= 1
    with pytest.raises(QueueTimeoutError, match=f"has lost its messages from {lost} on"):
        receive(place)
    scene.log.add(*kept)
    scene.store()
    follow(scene, place)


def test_a_silent_log_is_asked_again_from_the_next_number(scene: Scene) -> None:
    place = scene.joined()
    with pytest.raises(QueueTimeoutError, match="nothing came for 3 s"):
        receive(place)
    assert scene.log.reads[-1] == scene.log.last + 1
    scene.store()
    follow(scene, place)


def test_a_log_that_cannot_be_reached_is_silent_with_the_reason(scene: Scene) -> None:
    place = scene.joined()
    scene.log.failure = NatsError("no servers")
    for _ in range(2):
        with pytest.raises(QueueTimeoutError, match="no servers"):
            receive(place)
    scene.log.on_change("disconnected")
    scene.log.failure, scene.log.is_connected = None, False
    with pytest.raises(QueueTimeoutError, match="disconnected"):
        receive(place)
    scene.log.is_connected = True
    scene.log.on_change("")
    scene.store()
    follow(scene, place)
    assert scene.log.readers == 1, "what cannot be reached is asked again, not twice"


def test_an_error_that_did_not_end_the_connection_does_not_keep_it_from_asking_again(
    scene: Scene,
) -> None:
    place = scene.joined()
    scene.log.on_change("SlowConsumerError")
    with pytest.raises(QueueTimeoutError, match="nothing came for 3 s"):
        receive(place)
    assert scene.log.reads[-1] == scene.log.last + 1


def test_once_connected_again_the_log_is_asked_again_at_once(scene: Scene) -> None:
    place = scene.joined()
    scene.store()
    follow(scene, place)
    scene.log.on_change("disconnected")
    scene.log.on_change("")
    reads = len(scene.log.reads)
    scene.store()
    follow(scene, place)
    assert scene.log.reads[reads:] == [scene.log.last]


def test_a_connection_that_breaks_each_second_does_not_hide_a_log_that_began_anew(
    scene: Scene,
) -> None:
    """No wait is long enough for a silence, and no message has the expected number for long."""
    place = scene.joined()
    scene.log.messages.clear()
    scene.log.last = 0
    scene.log.add("e-2", b"")
    reads = len(scene.log.reads)

    def connect_again() -> None:
        assert len(scene.log.reads) < reads + 5, "it reads what does not go on"
        scene.log.on_change("")

    scene.log.on_silence = connect_again
    with pytest.raises(NewEpochError, match="e-2"):
        receive(place)


@pytest.mark.parametrize("request_name", ["head", "names", "get", "read"])
def test_a_join_asks_again_once_connected_again_what_the_old_connection_did_not_answer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, request_name: str
) -> None:
    answer = getattr(scene.log, request_name)
    lost = [True]

    async def request(*args: Any) -> Any:
        if lost:
            lost.clear()
            scene.log.on_change("disconnected")
            scene.log.on_change("")
            await asyncio.Event().wait()  # no answer ever comes
        return await answer(*args)

    monkeypatch.setattr(scene.log, request_name, request)
    scene.assert_same(scene.joined())


BODIES = b"", b"\xff" * 40, b"\x00", b"\x00\x00\x00\x09short", b"\x00\x00\x00\x01\xc1"


@pytest.mark.parametrize("body", BODIES)
def test_a_foreign_message_in_its_epoch_ends_it_until_there_is_another_epoch(
    scene: Scene, body: bytes
) -> None:
    place = scene.joined()
    scene.log.add(scene.epoch, body)
    with pytest.raises(DecodeError):
        receive(place)
    with pytest.raises(DecodeError):  # amid a join
        scene.joined()
    scene.epoch = "e-2"
    scene.log.add(scene.epoch, b"")
    scene.snapshot()
    scene.store()
    scene.assert_same(scene.joined())


def test_a_stream_that_is_gone_ends_it(scene: Scene) -> None:
    place = scene.joined()
    scene.log.failure = NoStreamError("no stream")
    with pytest.raises(NoStreamError):
        receive(place)


def test_who_joins_shows_as_live_only_what_came_since(scene: Scene) -> None:
    now = 100.0
    place = scene.joined(clock=lambda: now)
    assert place.copy.sent_at == 97.0, "stale at once: the relay may have died long ago"
    scene.store()
    now = 101.0
    assert receive(place).sent_at == 101.0


def test_a_copy_that_is_far_behind_does_not_count_as_current(scene: Scene) -> None:
    now = 100.0
    place = scene.joined(clock=lambda: now)
    for expected, pending in ((100.0, 100), (100.0, 101), (102.0, 100)):
        scene.store()
        scene.log.pending = pending
        assert receive(place).sent_at == expected, pending
        assert place.backlog == pending
        now += 1.0
    scene.assert_same(place)


def test_times_of_the_relay_become_times_of_this_machine(scene: Scene) -> None:
    now = 100.0
    scene.relay.now = 9000.0
    scene.relay.show(A)
    scene.turn()
    place = scene.joined(clock=lambda: now)
    assert place.copy.statuses[A].last_event_age == 100.0
    for later in (1.0, 2.0):
        now = 100.0 + later + 0.5  # this message took half a second longer
        scene.relay.now = 9000.0 + later
        scene.relay.show(A)
        scene.turn()
        follow(scene, place)
        age = place.copy.statuses[A].last_event_age
        assert age == pytest.approx(100.0 + later, abs=0.01)
    progress = place._origin.statistics()
    assert progress["lag_seconds"] == pytest.approx(0.5, abs=0.01)
    assert (progress["epoch"], progress["number"]) == ("e-1", scene.log.last)


# Snapshots ------------------------------------------------------------------------------------


def test_there_is_no_snapshot_of_the_epoch_yet(scene: Scene) -> None:
    scene.log.add("e-2", b"")
    with pytest.raises(NoSnapshotError, match="epoch e-2"):
        scene.joined()


def test_a_snapshot_below_the_trimmed_log_is_of_no_use(scene: Scene) -> None:
    scene.store()
    scene.log.trim(scene.log.last)
    with pytest.raises(NoSnapshotError):
        scene.joined()
    scene.snapshot()
    scene.assert_same(scene.joined())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damaged, "checksum"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data + b"x", "format"),
        (lambda data: b"", "content"),
        (lambda data: b"nonsense", "format"),
        (lambda data: NatsError("it does not go on"), "download"),
    ],
)
def test_a_snapshot_that_cannot_be_used_is_counted_and_the_older_one_tried(
    scene: Scene, change: Any, reason: str
) -> None:
    scene.store()
    name = scene.snapshot()
    scene.store()
    scene.log.objects[name] = change(scene.log.objects[name])
    place = scene.joined()
    scene.assert_same(place)
    assert place._origin.statistics()["snapshots_refused"] == {reason: 1}


def test_a_body_with_another_message_than_the_next_ends_it(scene: Scene) -> None:
    place = scene.joined()
    scene.relay.tap.number += 1
    scene.store()
    with pytest.raises(DecodeError, match="should follow"):
        receive(place)


# Its life -------------------------------------------------------------------------------------


def test_an_interruption_ends_every_step_and_closing_twice_is_once(scene: Scene) -> None:
    place = scene.joined()
    place.interrupt()
    with pytest.raises(WaitCancelledError):
        place.receive(3.0, STOP)
    place.close()
    place.close()
    place.interrupt()
    assert scene.log.closed == 1
    place = scene.place()
    place.interrupt()
    with pytest.raises(WaitCancelledError):
        place.join()
