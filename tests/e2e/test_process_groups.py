"""TCP groups of real processes; what may go wrong while they meet, with ranks that are threads."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kvindex.curve import Curve
from kvindex.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    PeerDiedError,
    QueueTimeoutError,
)
from kvindex.shm.groups import star
from kvindex.shm.groups.joining import keys_from
from kvindex.shm.groups.objects import MAX_OBJECT_BYTES
from kvindex.shm.groups.star import ConnectionLost, Hub, Spoke
from kvindex.shm.groups.tcp_group import TcpProcessGroup
from kvindex.shm.groups.words import FRAME_BYTES, Call, Failure, Seats, Settings, cut
from kvindex.shm.remote.sockets import RemoteLink
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
MOST = 100_000  # bytes


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


def hub_of(group: TcpProcessGroup) -> Hub:
    assert isinstance(group._star, Hub)
    return group._star


def spoke_to(group: TcpProcessGroup, rank: int = 1, **settings: int) -> Spoke:
    """A bare spoke that knows the token, which a test lets say what it likes."""
    made = Settings(**{"world_size": 3, "max_object_bytes": MAX_OBJECT_BYTES, **settings})
    keys = Curve.generate(keys_from(TOKEN).public_key)
    return Spoke(f"tcp://{group.address}", keys, rank, made)


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
def test_rank_0_listens_at_its_address_only_and_until_it_is_closed(
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
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(star, "LINK", RemoteLink(handshake_timeout=0.2))
    with group_of(0, 2, LOOPBACK) as hub:
        ready = pool.submit(hub.wait_until_ready)
        too_long = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x06" + b"\xff" * 8
        greetings = (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(100), struct.pack(">I", 2**31))
        for words in (*greetings, too_long, b""):
            with stranger(hub.address) as visitor:
                visitor.sendall(words)
                assert is_sent_away(visitor)
        with group_of(1, 2, hub.address) as spoke:
            spoke.wait_until_ready()
            ready.result(PATIENCE)
        assert hub.statistics()["stranger"] == 6


@pytest.mark.parametrize(
    ("world_size", "options", "said"),
    [
        (2, {"token": b"another secret!!"}, "do not have the same token: .* not that of rank 0"),
        (3, {}, "rank 0 refused rank 1: it has world_size=3"),
        (2, {"max_object_bytes": 10}, "rank 0 refused rank 1: it has .*max_object_bytes=10"),
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
        with pytest.raises(ConfigurationError, match=said):
            wrong.wait_until_ready()
    with group_of(1, 2, hub.address) as right:
        right.wait_until_ready()
        ready.result(PATIENCE)
    assert set(hub.statistics()) == {"stranger" if "token" in options else "settings"}


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


def test_what_a_rank_says_before_all_have_come_is_refused(pool: ThreadPoolExecutor) -> None:
    with group_of(0, 3, LOOPBACK) as hub:
        ready = pool.submit(hub.wait_until_ready)
        hasty, mute = spoke_to(hub), spoke_to(hub, 2)
        with pytest.raises(ConnectionLost, match=r"^ranks? .*2 was awaited"):
            hasty.meet(time.monotonic() + 0.2)
        hasty.tell(Call(0, "barrier", 0))
        hasty._watched.socket.send(b"\xc1")
        mute.tell(Seats("of a rank without one"))
        mute._watched.socket.send(b"\xc1")
        wait_until(lambda: hub.statistics() == {"malformed": 3}, "all are refused")
        hasty.close()
        with group_of(1, 3, hub.address) as again, group_of(2, 3, hub.address) as last:
            in_threads(pool, [again, last], TcpProcessGroup.wait_until_ready)
            ready.result(PATIENCE)
        mute.close()


@pytest.mark.parametrize(
    ("rank", "settings", "said"),
    [
        *((rank, {}, rf"rank {rank} is not in \[1, 3\)") for rank in (-1, 0, 3)),
        (1, {"version": 9}, r"it has .*version=9, rank 0 has .*version=1"),
    ],
)
def test_a_seat_that_the_group_does_not_have_is_refused(
    rank: int, settings: dict[str, int], said: str, pool: ThreadPoolExecutor
) -> None:
    with group_of(0, 3, LOOPBACK) as hub:
        spoke = spoke_to(hub, rank, **settings)
        meeting = pool.submit(spoke.meet, time.monotonic() + PATIENCE)
        while not meeting.done():
            with pytest.raises(QueueTimeoutError):
                hub.wait_until_ready(0.02)
        with pytest.raises(ConfigurationError, match=f"rank 0 refused rank {rank}: {said}"):
            meeting.result()
        spoke.close()


def test_rank_0_names_who_has_not_come_and_goes_on_when_asked(pool: ThreadPoolExecutor) -> None:
    with group_of(0, 3, LOOPBACK) as hub, group_of(1, 3, hub.address) as first:
        waiting = pool.submit(first.wait_until_ready)
        while hub_of(hub).missing == {1, 2}:
            with pytest.raises(QueueTimeoutError, match=r"ranks? .*2 did not come to 127.0.0.1"):
                hub.wait_until_ready(0.05)
        with pytest.raises(QueueTimeoutError, match=r"^rank 2 did not come"):
            hub.wait_until_ready(0.01)
        with group_of(2, 3, hub.address) as second:
            in_threads(pool, [hub, second], TcpProcessGroup.wait_until_ready)
            waiting.result(PATIENCE)


def test_a_rank_whose_rank_0_never_listens_says_so() -> None:
    with group_of(0, 2, LOOPBACK) as placeholder:
        address = placeholder.address
    with group_of(1, 2, address, timeout=0.1) as lonely:
        with pytest.raises(QueueTimeoutError, match=f"{address}: rank 0's port, where nobody"):
            lonely.barrier()


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2p1\r\n", b""])
def test_what_listens_there_but_is_no_group_is_named(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                visitor, _ = server.accept()
                with visitor:
                    visitor.sendall(greeting)

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with group_of(1, 2, address, timeout=0.5) as lost:
            with pytest.raises(QueueTimeoutError, match="not a kvindex process group"):
                lost.wait_until_ready()


# Collectives that fail


def test_closing_does_not_take_back_what_was_sent(pool: ThreadPoolExecutor) -> None:
    value = bytes(32 << 20)  # far more than the kernel has room for
    with group_of(0, 2, LOOPBACK) as hub, group_of(1, 2, hub.address) as spoke:
        received = pool.submit(spoke.broadcast_object, None, 0)
        hub.broadcast_object(value, 0)
        hub.close()
        assert received.result(PATIENCE) == value
        with pytest.raises(PeerDiedError, match="rank 0 is gone during barrier"):
            spoke.barrier()


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 5, FRAME_BYTES, 3 * FRAME_BYTES])
def test_a_value_of_any_length_arrives_whole(size: int, pool: ThreadPoolExecutor) -> None:
    with group_of(0, 2, LOOPBACK) as hub, group_of(1, 2, hub.address) as spoke:
        for length in (size + extra for extra in range(-3, 4) if size + extra >= 0):
            value = secrets.token_bytes(length)
            gathered = pool.submit(spoke.gather_object, value, 1)
            assert hub.gather_object(value[::-1], 1) is None
            assert gathered.result(PATIENCE) == [value[::-1], value]


@pytest.fixture
def trio(pool: ThreadPoolExecutor) -> Iterator[list[TcpProcessGroup]]:
    """A group of three that have met, and lose patience after 0.2 seconds."""
    bound = {"max_object_bytes": MOST}
    hub = group_of(0, 3, LOOPBACK, **bound)
    groups = [hub, *(group_of(rank, 3, hub.address, **bound) for rank in (1, 2))]
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
    monkeypatch.setattr(star, "VERDICT_SECONDS", 0.3 if missing == 0 else PATIENCE)
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


def test_a_late_rank_0_names_who_is_missing_and_who_gave_up(
    trio: list[TcpProcessGroup], pool: ThreadPoolExecutor
) -> None:
    hub, first, _ = trio
    hub._timeout = 60.0
    waiting = pool.submit(first.barrier)
    for error in (*in_threads(pool, [hub], TcpProcessGroup.barrier), waiting.exception(PATIENCE)):
        assert isinstance(error, QueueTimeoutError)
        assert str(error).startswith("rank 2 did not take part within")
        assert str(error).endswith("rank 1 gave up")


@pytest.mark.parametrize(
    "garbage",
    [
        [b"\xc1"],
        [b""],
        cut(Call(0, "barrier", 0)),  # without its value
        cut(Call(0, "barrier", 0), [b"", b""]),
        cut(Call(0, "barrier", 0), [bytes(MOST + 1)]),
        [*cut(Call(0, "barrier", 0)), bytes(FRAME_BYTES)],  # its end is missing
    ],
)
def test_garbage_from_a_rank_is_a_decode_error_at_every_rank(
    garbage: list[bytes], trio: list[TcpProcessGroup], pool: ThreadPoolExecutor
) -> None:
    spoke = trio[2]._star
    assert isinstance(spoke, Spoke)
    spoke._watched.socket.send_multipart(garbage)
    for error in in_threads(pool, trio[:2], TcpProcessGroup.barrier):
        assert isinstance(error, DecodeError)
        assert "rank 2 sent" in str(error)


def test_garbage_from_rank_0_is_a_decode_error_at_every_rank(
    trio: list[TcpProcessGroup], pool: ThreadPoolExecutor
) -> None:
    hub_of(trio[0]).tell(Call(0, "gather_object", 1))  # without the values
    spoke = trio[1]
    with pytest.raises(DecodeError, match=r"rank 0 sent gather_object .* with 0 values"):
        spoke.gather_object(None, 1)
    for error in in_threads(pool, [trio[0]], lambda group: group.gather_object(None, 1)):
        assert isinstance(error, DecodeError)


def test_a_frame_that_is_too_long_ends_the_connection_and_not_the_memory(
    trio: list[TcpProcessGroup],
) -> None:
    spoke = trio[2]._star
    assert isinstance(spoke, Spoke)
    spoke._watched.socket.send(bytes(FRAME_BYTES + 8192))
    trio[0]._timeout = PATIENCE
    with pytest.raises(PeerDiedError, match="rank 2 is gone"):
        trio[0].barrier()


def test_an_interrupted_rank_is_gone_for_the_others(
    trio: list[TcpProcessGroup], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(trio[1]._star, "exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trio[1].barrier()
    with pytest.raises(PeerDiedError, match=r"rank 1 left barrier .*KeyboardInterrupt"):
        trio[1].barrier()
    for error in in_threads(pool, [trio[0], trio[2]], TcpProcessGroup.barrier):
        assert isinstance(error, PeerDiedError)
        assert "rank 1 is gone" in str(error)


def test_a_failure_is_short_enough_for_its_frame() -> None:
    assert len(Failure.of(PeerDiedError("x" * 100_000)).text) == 512
