"""TCP groups of real processes; what may go wrong while they meet, with ranks that are threads."""

from __future__ import annotations

import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvindex.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    PeerDiedError,
    QueueTimeoutError,
)
from kvindex.shm.groups import tcp_reception as tcp_reception
from kvindex.shm.groups import tcp_star
from kvindex.shm.groups.objects import MAX_OBJECT_BYTES
from kvindex.shm.groups.tcp_address import connect, parse_address
from kvindex.shm.groups.tcp_frames import Connection
from kvindex.shm.groups.tcp_group import TcpProcessGroup
from kvindex.shm.groups.tcp_handshake import Applicant
from tests.e2e.group_ranks import (
    PATIENCE,
    barrier_when_told,
    check_everything,
    everything,
    leaves_nothing,
    tcp_ranks,
)

TOKEN = secrets.token_bytes(32)
LOOPBACK = "127.0.0.1:0"


def group_of(rank: int, world_size: int, address: str, **options: Any) -> TcpProcessGroup:
    return TcpProcessGroup(
        rank, world_size, address, **{"token": TOKEN, "timeout": PATIENCE, **options}
    )


@pytest.fixture
def hub() -> Iterator[TcpProcessGroup]:
    """Rank 0 of two."""
    with group_of(0, 2, LOOPBACK) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, f"not reached: {what}"
        pause.wait(0.002)


def in_threads(
    pool: ThreadPoolExecutor, groups: list[TcpProcessGroup], call: Callable[[TcpProcessGroup], Any]
) -> list[Any]:
    """What each group's call returns, or the error that it raises."""
    futures = [pool.submit(call, group) for group in groups]
    return [future.exception(PATIENCE * 2) or future.result() for future in futures]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def stranger(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def is_sent_away(visitor: socket.socket) -> bool:
    """Whether the other side ends the connection, whatever it says before."""
    try:
        while visitor.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# Processes


def test_processes_exchange_values_and_know_who_shares_memory() -> None:
    with tcp_ranks(3, everything, TOKEN, PATIENCE) as ranks:
        check_everything(ranks)
    assert leaves_nothing()


@pytest.mark.parametrize("victim", [0, 2])
def test_ranks_are_told_which_rank_was_killed(victim: int) -> None:
    with tcp_ranks(3, barrier_when_told, TOKEN, 60.0) as ranks:
        ranks.receive_all()
        ranks.kill(victim)
        for rank in {0, 1, 2} - {victim}:
            ranks.pipes[rank].send("go on")
        for rank in {0, 1, 2} - {victim}:
            name, text = ranks.receive(rank)
            assert name == "PeerDiedError"
            assert f"rank {victim} is gone" in text
            assert "during barrier" in text


# Meeting


def test_ranks_may_come_before_rank_0_listens(pool: ThreadPoolExecutor) -> None:
    with group_of(0, 2, LOOPBACK) as placeholder:
        address = placeholder.address
    early = group_of(1, 2, address)
    waiting = pool.submit(early.broadcast_object, None, 0)
    with group_of(0, 2, address) as hub, early:
        assert hub.broadcast_object("hello", 0) == "hello"
        assert waiting.result(PATIENCE) == "hello"


@pytest.mark.parametrize("address", [LOOPBACK, "localhost:0", *(["[::1]:0"] if has_ipv6() else [])])
def test_rank_0_listens_at_its_address_only_and_till_all_have_come(
    address: str, pool: ThreadPoolExecutor
) -> None:
    with group_of(0, 2, address) as hub, group_of(1, 2, hub.address) as spoke:
        host, _, port = hub.address.rpartition(":")
        assert int(port) > 0
        assert host in ("127.0.0.1", "[::1]")
        elsewhere = "127.0.0.2" if host == "127.0.0.1" else "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            stranger(f"{elsewhere}:{port}")
        assert in_threads(pool, [hub, spoke], lambda group: group.same_node(0)) == [[True] * 2] * 2
        with pytest.raises(ConnectionRefusedError):
            stranger(f"{host.strip('[]')}:{port}")


def test_an_address_in_use_is_refused(hub: TcpProcessGroup) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen at .* Address already in use"):
        group_of(0, 2, hub.address)


def test_strangers_neither_get_in_nor_stop_the_meeting(
    hub: TcpProcessGroup, pool: ThreadPoolExecutor
) -> None:
    ready = pool.submit(hub.wait_until_ready)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(100), struct.pack(">I", 2**31)):
        with stranger(hub.address) as visitor:
            visitor.sendall(words)
            assert is_sent_away(visitor)
    silent = stranger(hub.address)
    with silent, group_of(1, 2, hub.address) as spoke:
        spoke.wait_until_ready()
        ready.result(PATIENCE)
        assert is_sent_away(silent)
    assert hub.statistics() == {"stranger": 4, "late": 1}


def test_a_silent_stranger_is_sent_away_and_so_is_the_first_of_a_crowd(
    hub: TcpProcessGroup, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_reception, "MAX_GUESTS", 2)
    ready = pool.submit(hub.wait_until_ready)
    crowd = [stranger(hub.address) for _ in range(3)]
    assert is_sent_away(crowd[0])
    monkeypatch.setattr(tcp_reception, "HANDSHAKE_SECONDS", 0.02)
    crowd.append(stranger(hub.address))
    assert is_sent_away(crowd[1])
    assert is_sent_away(crowd[3])
    with group_of(1, 2, hub.address) as spoke:
        spoke.wait_until_ready()
        ready.result(PATIENCE)
    for visitor in crowd:
        visitor.close()
    assert hub.statistics() == {"crowded": 2, "silent": 1, "late": 1}


@pytest.mark.parametrize(
    ("world_size", "options", "said"),
    [
        (2, {"token": b"another secret!!"}, "its token is not that of rank 0"),
        (3, {}, "world_size=3"),
        (2, {"max_object_bytes": 10}, "max_object_bytes=10"),
    ],
)
def test_a_rank_that_does_not_fit_is_told_at_once_and_the_right_one_comes_in(
    hub: TcpProcessGroup,
    pool: ThreadPoolExecutor,
    world_size: int,
    options: dict[str, Any],
    said: str,
) -> None:
    ready = pool.submit(hub.wait_until_ready)
    with group_of(1, world_size, hub.address, **options) as wrong:
        with pytest.raises(ConfigurationError, match=f"rank 0 refused rank 1: .*{said}"):
            wrong.wait_until_ready()
    with group_of(1, 2, hub.address) as right:
        right.wait_until_ready()
        ready.result(PATIENCE)
    assert sum(hub.statistics().values()) == 1


def test_a_second_process_of_one_rank_is_refused_and_the_first_stays(
    pool: ThreadPoolExecutor,
) -> None:
    with group_of(0, 3, LOOPBACK) as hub:
        first, second = group_of(1, 3, hub.address), group_of(1, 3, hub.address)
        third = group_of(2, 3, hub.address)
        with first, second, third:
            ready = pool.submit(hub.wait_until_ready)
            rivals = [pool.submit(group.wait_until_ready) for group in (first, second)]
            wait_until(lambda: any(rival.done() for rival in rivals), "one is refused")
            refused = next(rival for rival in rivals if rival.done())
            assert isinstance(refused.exception(), ConfigurationError)
            assert "rank 1 is connected already" in str(refused.exception())
            third.wait_until_ready()
            ready.result(PATIENCE)
            for rival in rivals:
                if rival is not refused:
                    rival.result(PATIENCE)
            assert hub.statistics() == {"duplicate": 1}


def test_a_rank_that_fails_while_others_are_awaited_may_come_again(
    pool: ThreadPoolExecutor,
) -> None:
    with group_of(0, 3, LOOPBACK) as hub:
        ready = pool.submit(hub.wait_until_ready)
        with group_of(1, 3, hub.address, timeout=0.3) as hasty:
            with pytest.raises(
                QueueTimeoutError, match=r"rank 1 waited 0.3 s .*: rank 2 was awaited$"
            ):
                hasty.wait_until_ready()
        with group_of(1, 3, hub.address) as again, group_of(2, 3, hub.address) as last:
            in_threads(pool, [again, last], TcpProcessGroup.wait_until_ready)
            ready.result(PATIENCE)
        assert hub.statistics() == {"ended": 1}


def test_a_rank_that_speaks_before_all_have_come_loses_its_seat(pool: ThreadPoolExecutor) -> None:
    with group_of(0, 3, LOOPBACK) as hub:
        ready = pool.submit(hub.wait_until_ready)
        with stranger(hub.address) as visitor:
            hasty = Connection(visitor, 1024)
            applicant = Applicant(TOKEN, 1, 3, MAX_OBJECT_BYTES)
            until = time.monotonic() + PATIENCE
            hasty.send(applicant.join(hasty.receive(until)), until)
            applicant.seated(hasty.receive(until))
            hasty.send(b"already?", until)
            wait_until(lambda: hub.statistics() == {"stranger": 1}, "the seat is lost")
        with group_of(1, 3, hub.address) as again, group_of(2, 3, hub.address) as last:
            in_threads(pool, [again, last], TcpProcessGroup.wait_until_ready)
            ready.result(PATIENCE)


def test_rank_0_names_who_has_not_come_and_goes_on_when_asked(pool: ThreadPoolExecutor) -> None:
    with group_of(0, 3, LOOPBACK) as hub, group_of(1, 3, hub.address) as first:
        waiting = pool.submit(first.wait_until_ready)
        while len(hub._reception.seated) == 0:  # type: ignore[union-attr]
            with pytest.raises(QueueTimeoutError, match=r"ranks? .*2 did not come to 127.0.0.1"):
                hub.wait_until_ready(0.05)
        with pytest.raises(QueueTimeoutError, match=r"^rank 2 did not come"):
            hub.wait_until_ready(0.01)
        with group_of(2, 3, hub.address) as second:
            in_threads(pool, [hub, second], TcpProcessGroup.wait_until_ready)
            waiting.result(PATIENCE)


class SelfMade(socket.socket):
    """Gets, as by chance, the very port that it connects to."""

    def connect(self, address: Any) -> None:
        self.bind(address)
        super().connect(address)


def test_a_rank_does_not_take_itself_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(0, 2, LOOPBACK) as placeholder:
        address = placeholder.address
    monkeypatch.setattr(socket, "socket", SelfMade)
    with pytest.raises(ConnectionRefusedError, match="nobody listens there"):
        connect(parse_address(address), time.monotonic() + PATIENCE)


def test_a_rank_whose_rank_0_never_listens_says_so() -> None:
    with group_of(0, 2, LOOPBACK) as placeholder:
        address = placeholder.address
    with group_of(1, 2, address, timeout=0.1) as lonely:
        with pytest.raises(QueueTimeoutError, match=f"{address}: .*refused.*rank 0's port"):
            lonely.barrier()


def test_what_listens_there_but_is_no_group_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                visitor, _ = server.accept()
                visitor.sendall(b"\0\0\0\4SSH-")
                visitor.close()

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with group_of(1, 2, address, timeout=0.5) as lost:
            with pytest.raises(QueueTimeoutError, match="not a kvindex process group"):
                lost.wait_until_ready()
        thread.join(PATIENCE)


# Collectives that fail


def test_closing_with_something_unread_does_not_take_back_what_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(PATIENCE)
        peer.connect(server.getsockname())
        ours, _ = server.accept()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        connection = Connection(ours, 1024)
        connection.send(bytes(500_000), 0.0)  # far more than the peer has room for
        peer.sendall(b"unread")
        assert select.select([ours], [], [], PATIENCE)[0]
        connection.close()
        received = 0
        while data := peer.recv(1 << 20):
            received += len(data)
    assert received == 500_004


@pytest.fixture
def trio(pool: ThreadPoolExecutor) -> Iterator[list[TcpProcessGroup]]:
    """A group of three that have met, and lose patience after 0.2 seconds."""
    hub = group_of(0, 3, LOOPBACK)
    groups = [hub, *(group_of(rank, 3, hub.address) for rank in (1, 2))]
    assert in_threads(pool, groups, TcpProcessGroup.wait_until_ready) == [None] * 3
    for group in groups:
        group._timeout = 0.2
    yield groups
    for group in groups:
        group.close()


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_all_name_the_rank_that_does_not_take_part(
    trio: list[TcpProcessGroup],
    pool: ThreadPoolExecutor,
    missing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_star, "VERDICT_SECONDS", 0.3 if missing == 0 else PATIENCE)
    present = [group for group in trio if group.rank != missing]
    for error in in_threads(pool, present, TcpProcessGroup.barrier):
        assert isinstance(error, QueueTimeoutError)
        assert error.timeout == 0.2
        assert str(error).startswith(f"rank {missing} did not take part within 0.2 s in barrier")
    for group in present:
        with pytest.raises(QueueTimeoutError, match="did not take part"):
            group.gather_object(None, group.rank)


def test_ranks_that_call_different_things_are_all_told(
    trio: list[TcpProcessGroup], pool: ThreadPoolExecutor
) -> None:
    def call(group: TcpProcessGroup) -> Any:
        return group.barrier() if group.rank == 2 else group.gather_object(1, 1)

    for error in in_threads(pool, trio, call):
        assert isinstance(error, ConfigurationError)
        assert "every rank must make the same calls" in str(error)


def test_a_rank_that_has_left_is_gone_for_the_others_and_closed_for_itself(
    trio: list[TcpProcessGroup], pool: ThreadPoolExecutor
) -> None:
    trio[1].close()
    trio[1].close()
    with pytest.raises(ClosedError):
        trio[1].barrier()
    for error in in_threads(pool, [trio[0], trio[2]], TcpProcessGroup.barrier):
        assert isinstance(error, PeerDiedError)
        assert "rank 1 is gone" in str(error)


def test_a_value_that_cannot_cross_is_refused_at_its_rank_and_the_group_goes_on(
    trio: list[TcpProcessGroup], pool: ThreadPoolExecutor
) -> None:
    for group in trio:
        with pytest.raises(ConfigurationError, match="cannot carry"):
            group.gather_object(object(), 0)
    gathered: list[Future[Any]] = [pool.submit(group.gather_object, 1, 0) for group in trio]
    assert [future.result(PATIENCE) for future in gathered] == [[1, 1, 1], None, None]


def test_garbage_after_the_handshake_ends_the_group_with_a_decode_error(
    trio: list[TcpProcessGroup],
) -> None:
    trio[2]._star._connection.send(b"\xc1", time.monotonic() + PATIENCE)  # type: ignore[union-attr]
    with pytest.raises(DecodeError, match="rank 2 sent 1 bytes that are no part"):
        trio[0].barrier()
