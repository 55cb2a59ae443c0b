"""Replicas and servers that are killed, stopped or hostile: nobody else notices, all recover."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import termios
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

from kvindex.replicas import join, server
from kvindex.replicas.messages import (
    PROTOCOL,
    Admission,
    Attached,
    End,
    JoinersFrame,
    JoinRequest,
    Leave,
    RankSection,
    decode_frame,
    encode_frame,
)
from kvindex.replicas.replica import JoinerConnection
from kvindex.testing import Workload
from tests.live import PATIENCE, caught_up, until, worker_of
from tests.native_ring import needs_ring
from tests.replicas.fanout_peers import (
    BEFORE,
    MEANWHILE,
    PROMPTS,
    Site,
    assert_equal,
    assert_same,
    counted,
)

pytestmark = [pytest.mark.faults, needs_ring]

SMALL = {"chunk_bytes": 2048, "chunks": 4}  # a ring that is full at once
HELD = 0.4  # seconds of patience in these tests


def test_a_killed_replica_is_noted_and_the_others_and_the_subscriber_go_on(site: Site) -> None:
    a = site.engine()
    fanout = site.serve(worker_of(a), **SMALL)
    killed, *others = site.peers(3)
    killed.kill()
    counted(fanout, died=1, replicas=2)
    a.run(BEFORE)
    caught_up(fanout.client, a)
    assert_equal(fanout.client, *others, *site.peers(1))  # the last in the place of the dead one


def test_a_forked_child_that_lives_on_hides_neither_a_dead_server_nor_a_dead_replica(
    site: Site,
) -> None:
    children = []
    server, replica = site.peer(), site.peer()
    try:
        server.call("serve", site.path, [])
        replica.call("join", site.path)
        children = [peer.call("fork") for peer in (server, replica)]
        server.kill()
        fanout = site.serve()  # "a living server listens", were it not so
        assert replica.call("rejoined", 2)
        counted(fanout, replicas=1)
        children.append(replica.call("fork"))
        replica.kill()
        counted(fanout, replicas=0, died=1)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_all_replicas_killed_at_once_hold_nothing_up(site: Site) -> None:
    a = site.engine()
    fanout = site.serve(worker_of(a), **SMALL)
    for peer in site.peers(3):
        peer.signal(signal.SIGKILL)
    a.run(BEFORE)
    caught_up(fanout.client, a)
    counted(fanout, died=3, replicas=0)


def test_a_killed_server_makes_replicas_stale_and_a_new_one_makes_them_equal(site: Site) -> None:
    a = site.engine(cpu_blocks=64)
    a.run(BEFORE)
    servers = [site.peer() for _ in range(2)]
    servers[0].call("serve", site.path, [worker_of(a)])
    servers[0].call("server_mark", {a.rank: a.published - 1})
    peers = site.peers(2)
    servers[0].kill()
    for peer in peers:
        reasons = peer.call("stale", "no_server")
        assert list(reasons) == [a.rank]
        assert "server_died" in reasons[a.rank]
        assert peer.call("answers", PROMPTS[:1])[0][a.rank][3] == "stale"
    assert Path(site.path).exists()  # which stops nobody
    a.run(MEANWHILE)
    servers[1].call("serve", site.path, [worker_of(a)])
    wanted = servers[1].call("server_mark", {a.rank: a.published - 1})
    truth = servers[1].call("server_held")
    for peer in peers:
        assert peer.call("reached", wanted) is None
        assert peer.call("held") == truth
        counts = peer.call("statistics")["replica"]
        assert (counts["joins"], counts["rejoins"]) == (2, {"server_died": 1})


def test_a_stopped_server_makes_replicas_stale_until_it_goes_on(site: Site) -> None:
    a, server = site.engine(), site.peer()
    a.run(BEFORE)
    server.call("serve", site.path, [worker_of(a)])
    wanted = server.call("server_mark", {a.rank: a.published - 1})
    (replica,) = site.peers(1, stale_after=1.5)
    assert replica.call("reached", wanted) is None
    server.signal(signal.SIGSTOP)
    assert replica.call("stale", "is silent")
    server.signal(signal.SIGCONT)
    assert replica.call("reached", wanted) is None
    counts = replica.call("statistics")["replica"]
    assert (counts["joins"], counts["silences"], counts["trouble"]) == (1, 1, "")


def test_a_stopped_replica_is_taken_off_within_patience_and_joins_anew_when_it_goes_on(
    site: Site,
) -> None:
    a = site.engine()
    fanout = site.serve(worker_of(a), patience=HELD, **SMALL)
    peers = stopped, *others = site.peers(3)
    stopped.signal(signal.SIGSTOP)
    a.run(BEFORE)
    caught_up(fanout.client, a)
    assert fanout.statistics()["evicted"] >= 1
    assert fanout.statistics()["blocked_seconds"] > HELD / 2
    assert_equal(fanout.client, *others)
    stopped.signal(signal.SIGCONT)
    assert stopped.call("rejoined", 2)
    a.run(MEANWHILE)
    caught_up(fanout.client, a)
    assert_equal(fanout.client, *peers)
    assert list(stopped.call("statistics")["replica"]["rejoins"]) == ["evicted"]
    counted(fanout, replicas=3, died=0)


def test_a_replica_that_is_stopped_again_and_again_uses_its_patience_up(site: Site) -> None:
    a = site.engine()
    fanout = site.serve(worker_of(a), patience=HELD, **SMALL)
    (peer,) = site.peers(1)
    evicted = 0
    for number in range(3):
        peer.signal(signal.SIGSTOP)
        a.run(Workload(30, seed=number))
        caught_up(fanout.client, a)
        # On a busy machine more than once: nothing is left to wait for its first steps.
        assert fanout.statistics()["evicted"] > evicted
        peer.signal(signal.SIGCONT)
        assert peer.call("rejoined", number + 2)
        evicted = fanout.statistics()["evicted"]
    assert_equal(fanout.client, peer)


def test_a_silent_half_joined_process_holds_nobody_up(site: Site) -> None:
    a = site.engine()
    fanout = site.serve(worker_of(a), patience=HELD, **SMALL)
    with closing(JoinerConnection(site.path)) as link:
        link.send(JoinRequest(PROTOCOL, fanout.client.index.backend, 1))
        link.receive()
        link.send(Attached())  # but it never was
        while not isinstance(frame := link.receive(), End):
            if isinstance(frame, RankSection):
                link.read(frame.section_bytes)
        a.run(BEFORE)
        caught_up(fanout.client, a)
        assert_same(fanout.client, site.join())


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


def connected(site: Site) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(PATIENCE)
    stranger.connect(site.path)
    return stranger


@pytest.mark.parametrize("words", HOSTILE.values(), ids=HOSTILE)
def test_nonsense_on_the_socket_ends_that_connection_only(site: Site, words: bytes) -> None:
    fanout = site.serve(max_replicas=2)
    replica = site.join()
    with connected(site) as hostile:
        hostile.sendall(words)
        while hostile.recv(4096):
            pass  # until the server has had enough
    assert sum(fanout.statistics()["turned_away"].values()) >= 1
    assert site.join().ranks == replica.ranks == ()
    assert replica.statistics()["replica"]["joins"] == 1


def test_a_joiner_whose_words_come_byte_by_byte_is_served(site: Site) -> None:
    fanout = site.serve()
    with connected(site) as joiner:
        for byte in encode_frame(JoinRequest(PROTOCOL, fanout.client.index.backend, 1)):
            joiner.sendall(bytes([byte]))
            until(lambda: fcntl.ioctl(joiner, termios.TIOCOUTQ, bytes(4)) == bytes(4))  # it is read
        (length,) = struct.unpack(">I", joiner.recv(4, socket.MSG_WAITALL))
        answer = decode_frame(joiner.recv(length, socket.MSG_WAITALL))
        assert isinstance(answer, Admission)
        joiner.sendall(encode_frame(Leave()))
        assert joiner.recv(1) == b""
    counted(fanout, turned_away={"gave_up": 1})


@pytest.mark.parametrize(
    "frames", [[], [JoinRequest(PROTOCOL, "native", 1)]], ids=["silent", "admitted"]
)
def test_a_joiner_that_takes_too_long_for_a_step_is_given_up(
    site: Site, monkeypatch: pytest.MonkeyPatch, frames: list[JoinersFrame]
) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 0.05)
    fanout = site.serve()
    with connected(site) as joiner:
        joiner.sendall(b"".join(map(encode_frame, frames)))
        counted(fanout, turned_away={"too_slow": 1}, joining=0)


def test_an_unknown_protocol_is_refused_with_a_reason(site: Site) -> None:
    site.serve()
    with connected(site) as stranger:
        stranger.sendall(encode_frame(JoinRequest(PROTOCOL + 1, "native", 1)))
        (length,) = struct.unpack(">I", stranger.recv(4, socket.MSG_WAITALL))
        answer = msgspec.msgpack.decode(stranger.recv(length, socket.MSG_WAITALL))
        assert "run the same kvindex" in answer["reason"]
        assert stranger.recv(1) == b""


def test_connections_that_say_nothing_are_bounded(site: Site) -> None:
    fanout = site.serve(max_replicas=1)
    with ExitStack() as idle:
        for _ in range(40):
            idle.enter_context(connected(site))
        until(
            fanout.client.statuses,
            lambda _: fanout.statistics()["turned_away"].get("crowded", 0) == 23,
        )
    site.join()


def test_a_server_that_accepts_and_says_nothing_is_given_up(site: Site) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(site.path)
        server.listen()
        with pytest.raises(TimeoutError):
            join(site.path, timeout=0.2)


def test_a_sink_failure_at_the_server_ends_the_fan_out_and_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = site.engine()
    fanout = site.serve(worker_of(a))
    replica = site.join()
    a.run(BEFORE)
    caught_up(fanout.client, a)

    def broken(body: bytes) -> None:
        raise OSError("no such memory")

    monkeypatch.setattr(fanout._outflow, "send", broken)
    a.run(MEANWHILE)
    caught_up(fanout.client, a)  # the client goes on
    with pytest.raises(Exception, match="no such memory"):
        fanout.wait(PATIENCE)
    until(replica.statuses, lambda s: "no such memory" in s[a.rank].reason)
    assert replica.statistics()["replica"]["rejoins"] == {"server_closed": 1}
