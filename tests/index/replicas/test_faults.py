"""Replicas and servers that are killed, stopped or hostile: nobody else notices, all recover."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvindex.index.replicas import FanOut, join
from kvindex.index.replicas.joining import Link
from kvindex.index.replicas.messages import PROTOCOL, Attached, End, JoinRequest, encode_frame
from kvindex.testing import FakeEngine, Workload
from tests.index.replicas.fanout_peers import (
    BEFORE,
    MEANWHILE,
    PROMPTS,
    assert_equal,
    ended,
    fan_out,
    go_on,
    mark,
    nursery,
    stop,
)
from tests.live import PATIENCE, caught_up, worker_of
from tests.native_ring import needs_ring
from tests.shm.queue_peers import Nursery, ProcessPeer

pytestmark = [pytest.mark.faults, needs_ring]

SMALL = {"chunk_bytes": 2048, "chunks": 4}  # a ring that is full at once
HELD = 0.4  # seconds of patience in these tests


@pytest.fixture(scope="module")
def processes() -> Iterator[Nursery]:
    started = nursery()
    yield started
    started.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kvindex.sock")


def joined(processes: Nursery, path: str, count: int) -> list[ProcessPeer]:
    peers = [processes.fork() for _ in range(count)]
    for peer in peers:
        peer.call("join", path)
    return peers


def counted(fanout: FanOut, **counts: int) -> None:
    def reached(_: Any) -> bool:
        found = fanout.statistics()
        return all(found[name] == value for name, value in counts.items())

    assert fanout.client.wait_for(reached, PATIENCE), fanout.statistics()


def test_a_killed_replica_is_noted_and_the_others_and_the_subscriber_go_on(
    processes: Nursery, path: str
) -> None:
    with FakeEngine("a") as a, fan_out(path, worker_of(a), **SMALL) as fanout:
        with ended(joined(processes, path, 3)) as peers:
            peers[0].kill()
            counted(fanout, died=1, replicas=2)
            a.run(BEFORE)
            caught_up(fanout.client, a)
            assert_equal(fanout.client, *peers[1:], prompts=PROMPTS)
            with ended(joined(processes, path, 1)) as late:  # in the place of the dead one
                assert_equal(fanout.client, *late, prompts=PROMPTS)


def test_a_forked_child_that_lives_on_hides_neither_a_dead_server_nor_a_dead_replica(
    processes: Nursery, path: str
) -> None:
    children = []
    try:
        with ended([processes.fork(), processes.fork()]) as peers:
            server, replica = peers
            server.call("serve", path, [])
            replica.call("join", path)
            children = [peer.call("fork") for peer in peers]
            server.kill()
            with fan_out(path) as fanout:  # "a living server listens", were it not so
                assert replica.call("rejoined", 2)
                counted(fanout, replicas=1)
                children.append(replica.call("fork"))
                replica.kill()
                counted(fanout, replicas=0, died=1)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_all_replicas_killed_at_once_hold_nothing_up(processes: Nursery, path: str) -> None:
    with FakeEngine("a") as a, fan_out(path, worker_of(a), **SMALL) as fanout:
        with ended(joined(processes, path, 3)) as peers:
            for peer in peers:
                peer.signal(signal.SIGKILL)
            a.run(BEFORE)
            caught_up(fanout.client, a)
            counted(fanout, died=3, replicas=0)


def test_a_killed_server_makes_replicas_stale_and_a_new_one_makes_them_equal(
    processes: Nursery, path: str
) -> None:
    with FakeEngine("a", cpu_blocks=64) as a:
        a.run(BEFORE)
        with ended([processes.fork() for _ in range(2)]) as servers:
            servers[0].call("serve", path, [worker_of(a)])
            servers[0].call("server_mark", {a.rank: a.published - 1})
            with ended(joined(processes, path, 2)) as peers:
                servers[0].kill()
                for peer in peers:
                    reasons = peer.call("stale", "no_server")
                    assert list(reasons) == [a.rank]
                    assert "server_died" in reasons[a.rank]
                    assert peer.call("answers", PROMPTS[:1])[0][a.rank][3] == "stale"
                assert Path(path).exists()  # which stops nobody
                a.run(MEANWHILE)
                servers[1].call("serve", path, [worker_of(a)])
                wanted = servers[1].call("server_mark", {a.rank: a.published - 1})
                truth = servers[1].call("server_held")
                for peer in peers:
                    assert peer.call("reached", wanted) is None
                    assert peer.call("held") == truth
                    found = peer.call("statistics")["replica"]
                    assert (found["joins"], found["rejoins"]) == (2, {"server_died": 1})


def test_a_stopped_server_makes_replicas_stale_until_it_goes_on(
    processes: Nursery, path: str
) -> None:
    with FakeEngine("a") as a:
        a.run(BEFORE)
        with ended([processes.fork()]) as servers:
            servers[0].call("serve", path, [worker_of(a)])
            wanted = servers[0].call("server_mark", {a.rank: a.published - 1})
            with ended([processes.fork()]) as peers:
                peers[0].call("join", path, stale_after=1.5)
                assert peers[0].call("reached", wanted) is None
                servers[0].signal(signal.SIGSTOP)
                assert peers[0].call("stale", "is silent")
                servers[0].signal(signal.SIGCONT)
                assert peers[0].call("reached", wanted) is None
                found = peers[0].call("statistics")["replica"]
                assert (found["joins"], found["silences"], found["trouble"]) == (1, 1, "")


def test_a_stopped_replica_is_taken_off_within_patience_and_joins_anew_when_it_goes_on(
    processes: Nursery, path: str
) -> None:
    with FakeEngine("a") as a, fan_out(path, worker_of(a), patience=HELD, **SMALL) as fanout:
        with ended(joined(processes, path, 3)) as peers:
            stopped, *others = peers
            stop(stopped)
            a.run(BEFORE)
            caught_up(fanout.client, a)
            assert fanout.statistics()["evicted"] >= 1
            assert fanout.statistics()["blocked_seconds"] > HELD / 2
            assert_equal(fanout.client, *others, prompts=PROMPTS)
            go_on(stopped)
            assert stopped.call("rejoined", 2)
            a.run(MEANWHILE)
            caught_up(fanout.client, a)
            assert_equal(fanout.client, *peers, prompts=PROMPTS)
            assert list(stopped.call("statistics")["replica"]["rejoins"]) == ["evicted"]
            counted(fanout, replicas=3, died=0)


def test_a_replica_that_is_stopped_again_and_again_uses_its_patience_up(
    processes: Nursery, path: str
) -> None:
    with FakeEngine("a") as a, fan_out(path, worker_of(a), patience=HELD, **SMALL) as fanout:
        with ended(joined(processes, path, 1)) as peers:
            evicted = 0
            for number in range(3):
                stop(peers[0])
                a.run(Workload(30, seed=number))
                caught_up(fanout.client, a)
                # On a busy machine more than once: nothing is left to wait for its first steps.
                assert fanout.statistics()["evicted"] > evicted
                go_on(peers[0])
                assert peers[0].call("rejoined", number + 2)
                evicted = fanout.statistics()["evicted"]
            assert_equal(fanout.client, *peers, prompts=PROMPTS)


def test_a_silent_half_joined_process_holds_nobody_up(path: str) -> None:
    with FakeEngine("a") as a, fan_out(path, worker_of(a), patience=HELD, **SMALL) as fanout:
        link = Link(path)
        link.send(JoinRequest(PROTOCOL, fanout.client.index.backend, 1))
        link.receive()
        link.send(Attached())  # but it never was
        while not isinstance(frame := link.receive(), End):
            if hasattr(frame, "section_bytes"):
                link.read(frame.section_bytes)
        a.run(BEFORE)
        caught_up(fanout.client, a)
        with join(path) as replica:
            wanted = mark(fanout.client.subscriber.statuses())
            assert replica.wait_for(lambda statuses: mark(statuses) == wanted, PATIENCE)
        link.close()


HOSTILE = {
    "noise": b"\xff" * 64,
    "a length that nobody has": struct.pack(">I", 2**32 - 1),
    "no msgpack": struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
    "another type": struct.pack(">I", 1) + b"\x01",
    "out of turn": encode_frame(Attached()),
    "twice": encode_frame(JoinRequest(PROTOCOL, "native", 1))
    + encode_frame(JoinRequest(PROTOCOL, "python", 1)),
    "deep": struct.pack(">I", 3000) + b"\x91" * 3000,
}


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_nonsense_on_the_socket_ends_that_connection_only(path: str, words: bytes) -> None:
    with fan_out(path, max_replicas=2) as fanout, join(path) as replica:
        with socket.socket(socket.AF_UNIX) as hostile:
            hostile.settimeout(PATIENCE)
            hostile.connect(path)
            hostile.sendall(words)
            while hostile.recv(4096):
                pass  # until the server has had enough
        assert sum(fanout.statistics()["turned_away"].values()) >= 1
        with join(path) as late:
            assert late.ranks == replica.ranks == ()
        assert replica.statistics()["replica"]["joins"] == 1


def test_an_unknown_protocol_is_refused_with_a_reason(path: str) -> None:
    with fan_out(path), socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(PATIENCE)
        stranger.connect(path)
        stranger.sendall(encode_frame(JoinRequest(PROTOCOL + 1, "native", 1)))
        (length,) = struct.unpack(">I", stranger.recv(4, socket.MSG_WAITALL))
        answer = msgspec.msgpack.decode(stranger.recv(length, socket.MSG_WAITALL))
        assert "run the same kvindex" in answer["reason"]
        assert stranger.recv(1) == b""


def test_connections_that_say_nothing_are_bounded(path: str) -> None:
    with fan_out(path, max_replicas=1) as fanout:
        idle = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        try:
            for one in idle:
                one.connect(path)
            assert fanout.client.wait_for(
                lambda _: fanout.statistics()["turned_away"].get("crowded", 0) == 23, PATIENCE
            )
        finally:
            for one in idle:
                one.close()
        with join(path):
            pass


def test_a_server_that_accepts_and_says_nothing_is_given_up(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        with pytest.raises(TimeoutError):
            join(path, timeout=0.2)


def test_a_sink_failure_at_the_server_ends_the_fan_out_and_says_so(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeEngine("a") as a, fan_out(path, worker_of(a)) as fanout, join(path) as replica:
        a.run(BEFORE)
        caught_up(fanout.client, a)

        def broken(body: bytes) -> None:
            raise OSError("no such memory")

        monkeypatch.setattr(fanout._outflow, "send", broken)
        a.run(MEANWHILE)
        caught_up(fanout.client, a)  # the client goes on
        with pytest.raises(Exception, match="no such memory"):
            fanout.wait(PATIENCE)
        assert replica.wait_for(lambda s: "no such memory" in s[a.rank].reason, PATIENCE)
        assert replica.statistics()["replica"]["rejoins"] == {"server_closed": 1}
