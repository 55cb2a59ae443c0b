"""Waiting on ZeroMQ's descriptors: whoever keeps the rule of `watch` misses nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvindex.subscribe.watch import Deadlines, Watch
from tests.live import PATIENCE
from tests.publish.publish_peers import Context

pytestmark = pytest.mark.e2e


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


Pipe: TypeAlias = "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]"
Connect: TypeAlias = Callable[[str], Pipe]


@pytest.fixture
def connect(context: Context) -> Iterator[Connect]:
    """Make connections: a receiving and a sending socket each."""
    pipes: list[Pipe] = []

    def connected(transport: str) -> Pipe:
        receiver, sender = pipe = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pipes.append(pipe)
        endpoint = f"inproc://{len(pipes)}" if transport == "inproc" else "tcp://127.0.0.1:*"
        receiver.bind(endpoint)
        sender.connect(receiver.get_string(zmq.LAST_ENDPOINT))
        return pipe

    yield connected
    for pipe in pipes:
        for end in pipe:
            end.close(0)


def take(receiver: zmq.Socket[bytes], at_most: int) -> tuple[int, bool]:
    """Take some messages; return how many, and whether none is left."""
    for count in range(at_most):
        try:
            receiver.recv(zmq.NOBLOCK)
        except zmq.Again:
            return count, True
    return at_most, False


@contextmanager
def sending(
    senders: list[zmq.Socket[bytes]], each: int, room: threading.Semaphore
) -> Iterator[None]:
    """Send so many messages on each socket, from a thread, no more at a time than there is room."""

    def send() -> None:
        for _ in range(each):
            for sender in senders:
                if not room.acquire(timeout=PATIENCE):
                    return
                sender.send(b"")

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("transport", ["tcp", "inproc"])
@pytest.mark.parametrize("window", [1, 7, 300], ids="window {}".format)
@pytest.mark.parametrize("at_most", [1, 3, 64], ids="take {}".format)
def test_no_message_is_missed_however_few_are_taken_at_a_time(
    connect: Connect, watch: Watch, transport: str, window: int, at_most: int
) -> None:
    pipes = [connect(transport) for _ in range(3)]
    for receiver, _ in pipes:
        watch.add(receiver, receiver)
    room, left = threading.Semaphore(window), 3 * 200
    with sending([sender for _, sender in pipes], 200, room):
        while left:
            owners = watch.wait(PATIENCE)
            assert owners, f"{left} messages were never told of"
            for receiver in owners:
                count, drained = take(receiver, at_most)
                if not drained:
                    watch.look_again(receiver)
                left -= count
                for _ in range(count):
                    room.release()


def test_what_came_before_the_socket_was_watched_is_told(connect: Connect, watch: Watch) -> None:
    receiver, sender = connect("inproc")
    sender.send(b"")
    assert receiver.poll(int(PATIENCE * 1000))  # the descriptor's sign is used up
    watch.add(receiver, "owner")
    assert watch.wait(PATIENCE) == {"owner": None}


def test_an_owner_to_be_looked_at_again_does_not_wait_and_is_returned_once(watch: Watch) -> None:
    watch.look_again("owner")
    watch.look_again("owner")
    assert watch.wait(PATIENCE) == {"owner": None}
    assert watch.wait(0.0) == {}


def test_a_removed_socket_is_told_of_no_more(connect: Connect, watch: Watch) -> None:
    receiver, sender = connect("inproc")
    watch.add(receiver, "owner")
    watch.wait(0.0)
    watch.remove(receiver)
    watch.remove(receiver)
    sender.send(b"")
    assert watch.wait(0.0) == {}


def test_waking_ends_a_wait_however_often_it_was_asked_for(watch: Watch) -> None:
    def wake_often() -> None:
        for _ in range(10_000):
            watch.wake()

    waker = threading.Thread(target=wake_often)
    waker.start()
    assert watch.wait(PATIENCE) == {}
    waker.join(PATIENCE)
    watch.wait(0.0)  # the rest of the calls
    assert watch.wait(0.0) == {}


# Timers, against a plain model of them

owners = st.sampled_from("abc")
times = st.integers(0, 20).map(float)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("set"), owners, st.one_of(times, st.none())),
        st.tuples(st.just("forget"), owners, st.none()),
        st.tuples(st.just("due"), st.none(), times),
    ),
    max_size=40,
)


@given(actions=actions)
def test_each_owner_is_called_at_its_earliest_deadline_once(
    actions: list[tuple[str, str | None, float | None]],
) -> None:
    deadlines: Deadlines[str | None] = Deadlines()
    earliest: dict[str | None, float] = {}
    now = 0.0
    for kind, owner, when in actions:
        if kind == "set":
            deadlines.set(owner, when)
            if when is not None:
                earliest[owner] = min(when, earliest.get(owner, when))
        elif kind == "forget":
            deadlines.forget(owner)
            earliest.pop(owner, None)
        else:
            assert when is not None
            now = max(now, when)
            called = deadlines.due(now)
            assert len(called) == len(set(called))
            assert set(called) == {o for o, t in earliest.items() if t <= now}
            earliest = {o: t for o, t in earliest.items() if t > now}
        if earliest:
            assert deadlines.nearest is not None
            assert deadlines.nearest <= min(earliest.values())


def test_putting_off_costs_no_room() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for when in range(5, 10_000):
        deadlines.set("a", float(when))
    assert deadlines.due(5.0) == ["a"]
    assert deadlines.nearest is None
