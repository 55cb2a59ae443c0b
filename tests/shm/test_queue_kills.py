"""Parties of a queue are killed with SIGKILL, and stopped, at points that a seed chooses.

What must hold: whoever survives is told, reads on without a hole or damage, and no shared memory
is left behind.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvindex.shm import Handle, MessageQueue, Waiting
from kvindex.shm.ring.segment import sweep
from kvindex.wire.errors import QueueTimeoutError, ReaderDiedError, WriterDiedError
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.shm.queue_peers import (
    Nursery,
    Peer,
    ProcessPeer,
    check,
    ended,
    is_left,
    numbered,
)

pytestmark = [pytest.mark.faults, needs_ring]
READERS_KILLED, WRITERS_KILLED, ROUNDS_OF_ALL = 60, 40, 34
PARTIES = 3
assert READERS_KILLED + WRITERS_KILLED + ROUNDS_OF_ALL * PARTIES >= 200
QUICK = Waiting(look=0.01)
RING = (64, 8)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    with ended([]) as peers:
        yield peers


@pytest.fixture
def fork(nursery: Nursery, peers: list[Peer]) -> Callable[[], ProcessPeer]:
    def fork() -> ProcessPeer:
        peer = nursery.fork()
        peers.append(peer)
        return peer

    return fork


@pytest.fixture
def stack(peers: list[Peer]) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


Fork = Callable[[], ProcessPeer]


def attached(fork: Fork, handle: bytes, rank: int, **knobs: Any) -> ProcessPeer:
    reader = fork()
    reader.call("attach", handle, rank, waiting=QUICK, **knobs)
    return reader


def read_to_the_end(reader: MessageQueue, last: int | None) -> int | None:
    try:
        while True:
            last = check(reader.dequeue(PATIENCE), last)
    except WriterDiedError:
        return last


def stopped(reader: ProcessPeer) -> bool:
    stat = Path("/proc", str(reader.pid), "stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def test_readers_killed_at_random_cost_the_others_nothing_and_are_replaced_exactly(
    fork: Fork, stack: ExitStack
) -> None:
    dice = random.Random("readers")
    writer = stack.enter_context(MessageQueue(4, 4, None, *RING, waiting=QUICK))
    handle = writer.export_handle()
    readers = [attached(fork, handle.to_bytes(), rank) for rank in range(4)]
    for reader in readers:
        reader.start("follow")
    starts = [0] * 4
    sent = 0
    for _ in range(READERS_KILLED):
        victim = dice.randrange(3)  # of rank 3 nobody dies
        for _ in range(dice.randrange(20)):
            writer.enqueue(numbered(sent), PATIENCE)
            sent += 1
        readers[victim].kill()
        for _ in range(dice.choice([0, 1, 30])):
            writer.enqueue(numbered(sent), PATIENCE)
            sent += 1
        readers[victim] = attached(fork, handle.to_bytes(), victim)
        starts[victim] = sent
        readers[victim].start("follow")
    writer.enqueue(numbered(sent), PATIENCE)
    removed = writer.statistics()["local"]["readers_removed"]
    writer.close()
    for start, reader in zip(starts, readers, strict=True):
        assert reader.result() == (start, sent, "QueueClosedError")
    assert 0 < removed <= READERS_KILLED
    assert not is_left(handle)


def test_writers_killed_at_random_leave_readers_with_the_same_whole_messages(fork: Fork) -> None:
    dice = random.Random("writers")
    for _ in range(WRITERS_KILLED):
        writer = fork()
        knobs = {"waiting": QUICK}
        handle = Handle.from_bytes(writer.call("make", 2, 2, None, *RING, **knobs))
        other = attached(fork, handle.to_bytes(), 1)
        other.start("follow")
        with MessageQueue.create_from_handle(handle, 0, waiting=QUICK) as reader:
            writer.start("write_on")
            last = None
            for _ in range(dice.randrange(1, 60)):
                last = check(reader.dequeue(PATIENCE), last)
            writer.signal(signal.SIGKILL)
            last = read_to_the_end(reader, last)
        assert other.result() == (0, last, "WriterDiedError")
        assert not is_left(handle)  # the survivors saw to it
        for peer in (writer, other):
            peer.kill()


def test_what_parties_that_were_all_killed_leave_is_removed_by_the_next_to_start(
    fork: Fork,
) -> None:
    dice = random.Random("all")
    handles = []
    for _ in range(ROUNDS_OF_ALL):
        parties = [fork() for _ in range(PARTIES)]
        data = parties[0].call("make", 2, 2, None, *RING, waiting=QUICK)
        handles.append(Handle.from_bytes(data))
        for rank, reader in enumerate(parties[1:]):
            reader.call("attach", data, rank, waiting=Waiting(look=5.0))
            reader.start("follow")
        parties[0].start("write_on")
        dice.shuffle(parties)
        for party in parties:
            party.signal(signal.SIGKILL)
        for party in parties:
            party.kill()
    with MessageQueue(1, 1, None, *RING):
        assert not any(map(is_left, handles))


def test_sweeping_spares_a_ring_that_one_party_still_holds(fork: Fork) -> None:
    writer, reader = fork(), fork()
    data = writer.call("make", 1, 1, None, *RING)
    handle = Handle.from_bytes(data)
    reader.call("attach", data, 0)
    sweep()
    assert is_left(handle)
    writer.kill()
    sweep()
    assert is_left(handle)
    reader.kill()
    sweep()
    assert not is_left(handle)


def test_a_killed_reader_is_removed_and_counted_so_that_the_writer_goes_on(
    fork: Fork, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    writer = stack.enter_context(MessageQueue(2, 2, None, *RING, waiting=QUICK))
    handle = writer.export_handle().to_bytes()
    killed, living = (attached(fork, handle, rank) for rank in range(2))
    living.start("follow")
    killed.kill()
    for number in range(20):
        writer.enqueue(numbered(number), PATIENCE)
    assert writer.statistics()["local"]["readers_removed"] == 1
    assert "the readers [0] are gone" in caplog.text
    writer.close()
    assert living.result() == (0, 19, "QueueClosedError")


def test_a_killed_reader_is_raised_once_where_that_is_asked_for_and_the_message_is_sent(
    fork: Fork, stack: ExitStack
) -> None:
    knobs: dict[str, Any] = {"waiting": QUICK, "on_dead_reader": "raise"}
    writer = stack.enter_context(MessageQueue(2, 2, [5, 7], *RING, **knobs))
    handle = writer.export_handle().to_bytes()
    killed, living = (attached(fork, handle, rank) for rank in (5, 7))
    killed.kill()
    for number in range(8):
        writer.enqueue(number, PATIENCE)
    living.start("drain")
    with pytest.raises(ReaderDiedError, match=r"\[5\]") as raised:
        writer.enqueue(8, PATIENCE)
    assert raised.value.ranks == (5,)
    for number in range(9, 40):
        writer.enqueue(number, PATIENCE)
    assert writer.statistics()["messages"] == 40
    writer.close()
    assert living.result() == (list(range(40)), "QueueClosedError")


@pytest.mark.parametrize("way", ["enqueue", "acquire_write"])
@pytest.mark.parametrize(
    ("n_local", "killed"), [(3, [0]), (3, [0, 2]), (2, [0]), (2, [2]), (2, [1, 2]), (0, [1])]
)
def test_what_is_not_sent_again_after_a_death_reaches_all_others_once(
    fork: Fork, stack: ExitStack, n_local: int, killed: list[int], way: str
) -> None:
    knobs: dict[str, Any] = {"waiting": QUICK, "on_dead_reader": "raise", "remote_window": 2}
    ring = RING if way == "enqueue" else (512, 8)
    writer = stack.enter_context(MessageQueue(3, n_local, None, *ring, "127.0.0.1", **knobs))
    handle = writer.export_handle().to_bytes()
    readers = [attached(fork, handle, rank) for rank in range(3)]
    for reader in readers:
        reader.start("ready")
    writer.wait_until_ready(PATIENCE)
    for rank, reader in enumerate(readers):
        reader.result()
        if rank in killed:
            reader.kill()
        else:
            reader.start("follow")
    sent = [numbered(number) for number in range(60)]  # most of them longer than a chunk
    raised: list[int] = []
    for message in sent:
        try:
            if way == "enqueue":
                writer.enqueue(message, PATIENCE)
            else:
                with writer.acquire_write(PATIENCE, length=len(message)) as view:
                    view[:] = message
        except ReaderDiedError as error:
            raised += error.ranks
    assert sorted(raised) == killed
    assert writer.statistics()["messages"] == len(sent)
    writer.close()
    for rank, reader in enumerate(readers):
        if rank not in killed:
            assert reader.result() == (0, len(sent) - 1, "QueueClosedError")


def test_a_dead_reader_costs_no_time_out(fork: Fork, stack: ExitStack) -> None:
    writer = stack.enter_context(MessageQueue(1, 1, None, *RING, waiting=QUICK))
    reader = attached(fork, writer.export_handle().to_bytes(), 0)
    for number in range(8):
        writer.enqueue(number, PATIENCE)
    reader.kill()
    writer.enqueue("no one is there", timeout=0.0)


@pytest.mark.parametrize("policy", ["remove", "raise"])
def test_a_killed_remote_reader_is_treated_by_the_same_policy(
    fork: Fork, stack: ExitStack, policy: str
) -> None:
    knobs: dict[str, Any] = {"waiting": QUICK, "on_dead_reader": policy, "remote_window": 8}
    writer = stack.enter_context(MessageQueue(3, 1, [0], *RING, "127.0.0.1", **knobs))
    handle = writer.export_handle().to_bytes()
    local, remote, killed = (attached(fork, handle, rank) for rank in range(3))
    for reader in (local, remote, killed):
        reader.start("ready")
    writer.wait_until_ready(PATIENCE)
    for reader in (local, remote, killed):
        reader.result()
    for reader in (local, remote):
        reader.start("follow")
    killed.kill()
    raised: list[ReaderDiedError] = []
    for number in range(40):
        try:
            writer.enqueue(numbered(number), PATIENCE)
        except ReaderDiedError as error:
            raised.append(error)
    writer.close()
    assert [error.ranks for error in raised] == ([(2,)] if policy == "raise" else [])
    assert writer.statistics()["remote"]["died"] == 1
    # The message at which it was noticed has reached all others.
    assert local.result() == remote.result() == (0, 39, "QueueClosedError")


def test_a_stopped_reader_is_not_taken_for_dead_and_goes_on_where_it_was(
    fork: Fork, stack: ExitStack
) -> None:
    writer = stack.enter_context(MessageQueue(1, 1, None, *RING, waiting=QUICK))
    reader = attached(fork, writer.export_handle().to_bytes(), 0)
    writer.wait_until_ready(PATIENCE)  # it does nothing now: under no lock will it be stopped
    reader.signal(signal.SIGSTOP)
    until(lambda: stopped(reader))
    for number in range(8):
        writer.enqueue(number.to_bytes(8, "big"), PATIENCE)
    for _ in range(3):
        with pytest.raises(QueueTimeoutError, match="readers \\[0\\] are 8 chunks behind"):
            writer.enqueue(b"never seen", timeout=0.05)
    assert writer.statistics()["local"]["readers_removed"] == 0
    reader.signal(signal.SIGCONT)
    assert reader.call("take", 8) == [number.to_bytes(8, "big") for number in range(8)]
    writer.enqueue("on", PATIENCE)
    assert reader.call("take", 1) == ["on"]


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_that_the_writer_was_killed_is_told_before_any_sleep(
    fork: Fork, timeout: float | None
) -> None:
    writer = fork()
    handle = Handle.from_bytes(writer.call("make", 1, 1, None, *RING))
    writer.call("send", ["last"])
    with MessageQueue.create_from_handle(handle, 0) as reader:
        writer.kill()
        assert reader.dequeue(timeout) == "last"
        with pytest.raises(WriterDiedError):
            reader.wait_until_ready(timeout)
        for _ in range(3):
            with pytest.raises(WriterDiedError):
                reader.dequeue(timeout)
        assert reader.statistics()["local"]["sleeps"] == 0


def test_a_killed_writer_is_told_to_who_waits_for_the_queue_to_be_ready(fork: Fork) -> None:
    writer = fork()
    handle = Handle.from_bytes(writer.call("make", 2, 2, None, *RING))
    with MessageQueue.create_from_handle(handle, 0, waiting=QUICK) as reader:
        writer.kill()
        with pytest.raises(WriterDiedError):
            reader.wait_until_ready(PATIENCE)
