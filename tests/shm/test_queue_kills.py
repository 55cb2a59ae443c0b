"""Parties of a queue are killed with SIGKILL, and stopped, at points that a seed chooses.

What must hold: whoever survives is told, reads on without a hole or damage, and no shared memory
is left behind.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from kvindex.shm import Handle, MessageQueue, Waiting
from kvindex.shm.ring.segment import sweep
from kvindex.wire.errors import QueueTimeoutError, ReaderDiedError, WriterDiedError
from tests.live import PATIENCE, until
from tests.native_ring import needs_ring
from tests.shm.conftest import Party
from tests.shm.queue_peers import Peer, ProcessPeer, check, is_left, numbered

pytestmark = [
    pytest.mark.faults,
    needs_ring,
    pytest.mark.parametrize("party", ["processes"], indirect=True),
]
READERS_KILLED, WRITERS_KILLED, ROUNDS_OF_ALL = 60, 40, 34
PARTIES = 3
assert READERS_KILLED + WRITERS_KILLED + ROUNDS_OF_ALL * PARTIES >= 200
QUICK = Waiting(look=0.01)
RING = (64, 8)
KNOBS = {"max_chunks": 8, "waiting": QUICK}


def attached(party: Party, writer: MessageQueue, rank: int) -> Peer:
    return party.reader(writer, rank, waiting=QUICK)


def made(party: Party, n_reader: int) -> tuple[Peer, bytes]:
    """A writer in a process, and its handle."""
    writer = party.peer()
    return writer, writer.call("make", n_reader, n_reader, None, *RING, waiting=QUICK)


def send_numbered(writer: MessageQueue, first: int, count: int) -> int:
    """Send so many messages; return the number of the next one."""
    for number in range(first, first + count):
        writer.enqueue(numbered(number), PATIENCE)
    return first + count


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
    party: Party,
) -> None:
    dice = random.Random("readers")
    writer = party.writer(4, **KNOBS)
    readers = [attached(party, writer, rank) for rank in range(4)]
    for reader in readers:
        reader.start("follow")
    starts = [0] * 4
    sent = 0
    for _ in range(READERS_KILLED):
        victim = dice.randrange(3)  # of rank 3 nobody dies
        sent = send_numbered(writer, sent, dice.randrange(20))
        readers[victim].end()
        sent = send_numbered(writer, sent, dice.choice([0, 1, 30]))
        readers[victim] = attached(party, writer, victim)
        starts[victim] = sent
        readers[victim].start("follow")
    send_numbered(writer, sent, 1)
    removed = writer.statistics()["local"]["readers_removed"]
    writer.close()
    for start, reader in zip(starts, readers, strict=True):
        assert reader.result() == (start, sent, "QueueClosedError")
    assert 0 < removed <= READERS_KILLED


def test_writers_killed_at_random_leave_readers_with_the_same_whole_messages(party: Party) -> None:
    dice = random.Random("writers")
    for _ in range(WRITERS_KILLED):
        writer, data = made(party, 2)
        other = party.peer()
        other.call("attach", data, 1, waiting=QUICK)
        other.start("follow")
        handle = Handle.from_bytes(data)
        with MessageQueue.create_from_handle(handle, 0, waiting=QUICK) as reader:
            writer.start("write_on")
            last = None
            for _ in range(dice.randrange(1, 60)):
                last = check(reader.dequeue(PATIENCE), last)
            writer.end()
            last = read_to_the_end(reader, last)
        assert other.result() == (0, last, "WriterDiedError")
        assert not is_left(handle)  # the survivors removed it
        other.end()


def test_what_parties_that_were_all_killed_leave_is_removed_by_the_next_to_start(
    party: Party,
) -> None:
    dice = random.Random("all")
    for _ in range(ROUNDS_OF_ALL):
        writer, data = made(party, 2)
        party.handles.append(Handle.from_bytes(data))
        readers = [party.peer() for _ in range(PARTIES - 1)]
        for rank, reader in enumerate(readers):
            reader.call("attach", data, rank, waiting=Waiting(look=5.0))
            reader.start("follow")
        writer.start("write_on")
        parties = [writer, *readers]
        dice.shuffle(parties)
        for victim in parties:
            assert isinstance(victim, ProcessPeer)
            victim.signal(signal.SIGKILL)
        for victim in parties:
            victim.end()
    with MessageQueue(1, 1, None, *RING):
        assert not any(map(is_left, party.handles))


def test_sweeping_spares_a_ring_that_one_party_still_holds(party: Party) -> None:
    writer, data = made(party, 1)
    reader = party.peer()
    reader.call("attach", data, 0)
    for holder in (writer, reader):
        sweep()
        assert is_left(Handle.from_bytes(data))
        holder.end()
    sweep()
    assert not is_left(Handle.from_bytes(data))


@pytest.mark.parametrize("policy", ["remove", "raise"])
@pytest.mark.parametrize("way", ["enqueue", "acquire_write"])
@pytest.mark.parametrize(
    ("n_local", "killed"), [(3, [0]), (3, [0, 2]), (2, [0]), (2, [2]), (2, [1, 2]), (0, [1])]
)
def test_what_is_not_sent_again_after_a_death_reaches_all_others_once(
    party: Party,
    n_local: int,
    killed: list[int],
    way: str,
    policy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunk = 64 if way == "enqueue" else 512
    knobs = {**KNOBS, "on_dead_reader": policy, "remote_window": 2, "max_chunk_bytes": chunk}
    writer, readers = party.ready(3, n_local=n_local, **knobs)
    for rank, reader in enumerate(readers):
        if rank in killed:
            reader.end()
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
    assert sorted(raised) == (killed if policy == "raise" else [])
    assert writer.statistics()["messages"] == len(sent)
    counts = writer.statistics()
    local = [rank for rank in killed if rank < n_local]
    assert n_local == 0 or counts["local"]["readers_removed"] == len(local)
    assert n_local == 3 or counts["remote"]["died"] == len(killed) - len(local)
    assert all(f"{rank}" in caplog.text for rank in killed)
    writer.close()
    for rank, reader in enumerate(readers):
        if rank not in killed:
            assert reader.result() == (0, len(sent) - 1, "QueueClosedError")


def test_a_dead_reader_costs_no_time_out(party: Party) -> None:
    writer = party.writer(1, **KNOBS)
    reader = attached(party, writer, 0)
    for number in range(8):
        writer.enqueue(number, PATIENCE)
    reader.end()
    writer.enqueue("no one is there", timeout=0.0)


def test_a_stopped_reader_is_not_taken_for_dead_and_goes_on_where_it_was(party: Party) -> None:
    writer = party.writer(1, **KNOBS)
    reader = attached(party, writer, 0)
    assert isinstance(reader, ProcessPeer)
    writer.wait_until_ready(PATIENCE)  # it does nothing now: under no lock will it be stopped
    reader.signal(signal.SIGSTOP)
    until(lambda: stopped(reader))
    for number in range(8):
        writer.enqueue(number, PATIENCE)
    for _ in range(3):
        with pytest.raises(QueueTimeoutError, match="readers \\[0\\], which are 8 chunks behind"):
            writer.enqueue(b"never seen", timeout=0.05)
    assert writer.statistics()["local"]["readers_removed"] == 0
    reader.signal(signal.SIGCONT)
    assert reader.call("take", 8) == list(range(8))
    writer.enqueue("on", PATIENCE)
    assert reader.call("take", 1) == ["on"]


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_the_death_of_the_writer_is_reported_before_any_sleep(
    party: Party, timeout: float | None
) -> None:
    writer, data = made(party, 1)
    writer.call("send", ["last"])
    with MessageQueue.create_from_handle(Handle.from_bytes(data), 0) as reader:
        writer.end()
        assert reader.dequeue(timeout) == "last"
        for _ in range(3):
            with pytest.raises(WriterDiedError):
                reader.wait_until_ready(timeout)
            with pytest.raises(WriterDiedError):
                reader.dequeue(timeout)
        assert reader.statistics()["local"]["sleeps"] == 0
