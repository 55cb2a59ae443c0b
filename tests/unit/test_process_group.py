"""Process groups without a network: values, addresses, who shares memory, torch's groups."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex.errors import ConfigurationError, DecodeError
from kvindex.shm.groups.joining import Address
from kvindex.shm.groups.objects import pack_object, unpack_object
from kvindex.shm.groups.process_group import ProcessGroup
from kvindex.shm.groups.same_node import ranks_that_share_memory
from kvindex.shm.groups.tcp_group import TcpProcessGroup
from kvindex.shm.groups.torch_group import TorchProcessGroup

TOKEN = b"0123456789abcdef"


# Values


@pytest.mark.parametrize(
    "value", [None, True, -(2**63), 2**64 - 1, 1.5, "é", b"\0", [], {"a": [1, {2: b""}]}]
)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert unpack_object(pack_object(value)) == value


@pytest.mark.parametrize("value", [2**64, object(), {1: {2: object()}}, "\ud800"])
def test_a_value_that_msgpack_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot carry"):
        pack_object(value)


def test_a_value_too_deep_to_write_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigurationError, match="cannot carry"):
        pack_object(deep)


def test_a_value_larger_than_the_group_carries_is_refused_with_both_sizes() -> None:
    assert len(pack_object(b"x" * 98, 100)) == 100
    with pytest.raises(ConfigurationError, match="101 bytes, more than the 100"):
        pack_object(b"x" * 99, 100)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x01\x01", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"]
)
def test_bytes_that_are_no_value_are_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        unpack_object(data)


# Addresses and arguments


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("node-7.local:65535", "node-7.local", 65535),
        ("[::1]:29500", "::1", 29500),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    address = Address(text)
    assert (address.host, address.port) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "::1:5", "[]:5", "host:65536", "tcp://host:5", "a:1:2"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not host:port"):
        Address(text)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rank": 2}, "rank=2"),
        ({"rank": -1}, "rank=-1"),
        ({"world_size": 0}, "world_size=0"),
        ({"token": b"short"}, "token must be 16 bytes"),
        ({"token": "0123456789abcdef"}, "token must be 16 bytes"),
        ({"timeout": 0.0}, "timeout=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"max_object_bytes": 0}, "max_object_bytes=0"),
        ({"address": "127.0.0.1"}, "not host:port"),
        ({"rank": 1}, "needs rank 0's port"),
        ({"address": "203.0.113.1:0"}, "cannot listen at"),
    ],
)
def test_a_group_refuses_what_cannot_work(changed: dict[str, Any], said: str) -> None:
    usual = {"rank": 0, "world_size": 2, "address": "127.0.0.1:0", "token": TOKEN}
    with pytest.raises(ConfigurationError, match=said):
        TcpProcessGroup(**{**usual, **changed})


def test_without_curve_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq.has", lambda what: False)
    with pytest.raises(ConfigurationError, match="built without CURVE"):
        TcpProcessGroup(0, 2, "127.0.0.1:0", token=TOKEN)


def test_a_host_that_nobody_knows_is_refused_at_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    with pytest.raises(ConfigurationError, match=r"cannot listen at nowhere:0: Name or service"):
        TcpProcessGroup(0, 2, "nowhere:0", token=TOKEN)


def test_a_group_of_one_needs_nobody() -> None:
    with TcpProcessGroup(0, 1, "127.0.0.1:0", token=TOKEN) as group:
        assert isinstance(group, ProcessGroup)
        assert group.broadcast_object((1, "a"), 0) == [1, "a"]
        assert group.gather_object(b"x", 0) == [b"x"]
        group.barrier()
        assert group.same_node(0) == [True]
        for call in (group.broadcast_object, group.gather_object):
            with pytest.raises(ConfigurationError, match="=1 is no rank"):
                call(None, 1)
            for nonsense in ("0", None, False, 0.0):
                with pytest.raises(ConfigurationError, match=f"={nonsense!r} is no rank"):
                    call(None, nonsense)  # type: ignore[arg-type]


# Shared memory


class Board:
    """What the ranks of a group in one process write for each other, one box for each call."""

    def __init__(self, world_size: int) -> None:
        self.boxes: list[dict[int, Any]] = []
        self.meeting = threading.Barrier(world_size, timeout=10)


class BoardGroup:
    """One rank of a group whose ranks are threads; `heard` has every value given to it."""

    def __init__(self, rank: int, world_size: int, board: Board) -> None:
        self.rank = rank
        self.world_size = world_size
        self.heard: list[Any] = []
        self._board = board

    def broadcast_object(self, obj: Any, source: int) -> Any:
        self.heard.append(self._exchange(obj)[source])
        return self.heard[-1]

    def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
        box = self._exchange(obj)
        return [box[rank] for rank in sorted(box)] if self.rank == destination else None

    def same_node(self, source: int) -> list[bool]:
        return ranks_that_share_memory(self, source)

    def barrier(self) -> None:
        self._board.meeting.wait()

    def _exchange(self, obj: Any) -> dict[int, Any]:
        if self._board.meeting.wait() == 0:
            self._board.boxes.append({})
        self._board.meeting.wait()
        box = self._board.boxes[-1]
        box[self.rank] = obj
        self._board.meeting.wait()
        return box


def shares(directories: list[Path], source: int = 0) -> tuple[list[list[bool]], list[BoardGroup]]:
    """What each rank is told, when rank r sees directories[r] as its shared memory."""
    board = Board(len(directories))
    groups = [BoardGroup(rank, len(directories), board) for rank in range(len(directories))]
    told: dict[int, list[bool]] = {}

    def run(rank: int) -> None:
        told[rank] = ranks_that_share_memory(groups[rank], source, directory=directories[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(directories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [told[rank] for rank in sorted(told)], groups


def test_ranks_that_see_the_file_share_memory_and_no_others(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    told, groups = shares([there, here, here, there], source=1)
    assert told == [[False, True, True, False]] * 4
    assert list(here.iterdir()) == list(there.iterdir()) == []
    assert isinstance(groups[0], ProcessGroup)


def test_one_without_shared_memory_shares_it_with_nobody(tmp_path: Path) -> None:
    told, _ = shares([tmp_path / "missing", tmp_path])
    assert told == [[False, False]] * 2


def test_the_file_is_its_users_alone_and_the_secret_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bytes]] = []

    def read(file: int, size: int) -> bytes:
        seen.append((os.fstat(file).st_mode & 0o777, os.pread(file, 100, 0)))
        return b"wrong"

    monkeypatch.setattr("kvindex.shm.groups.same_node.os.read", read)
    told, groups = shares([tmp_path, tmp_path])
    assert told == [[False, False]] * 2, "a wrong answer is no proof"
    assert [mode for mode, _ in seen] == [0o600, 0o600]
    assert all(len(secret) == 32 for _, secret in seen)
    assert not any(secret in repr(groups[1].heard).encode() for _, secret in seen)


class Liar(BoardGroup):
    """A source that names a file of its choice."""

    named: str = ""

    def broadcast_object(self, obj: Any, source: int) -> Any:
        return super().broadcast_object(self.named, source)


@pytest.mark.parametrize("named", ["../secret", "secret", "/etc/hostname", "kvindex-same-node-\0"])
def test_no_other_file_is_read_whatever_the_source_says(tmp_path: Path, named: str) -> None:
    (tmp_path / "secret").write_text("private")
    (tmp_path / "memory").mkdir()
    board = Board(2)
    liar = Liar(0, 2, board)
    liar.named = named
    answers: list[Any] = []

    def lie() -> None:
        liar.broadcast_object(None, 0)
        answers.extend(liar.gather_object(None, 0) or [])
        liar.broadcast_object(None, 0)

    thread = threading.Thread(target=lie)
    thread.start()
    honest = BoardGroup(1, 2, board)
    told = ranks_that_share_memory(honest, 0, directory=tmp_path / "memory")
    thread.join(10)
    assert answers == [None, None]
    assert told == [False, False]


def test_a_file_whose_process_was_killed_is_removed_by_the_next_and_one_in_use_is_not(
    tmp_path: Path,
) -> None:
    abandoned, in_use = (tmp_path / f"kvindex-same-node-{letter * 32}" for letter in "ab")
    abandoned.touch()
    os.mkfifo(tmp_path / "kvindex-same-node-pipe")  # somebody's trap: to open it would wait
    with in_use.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert shares([tmp_path, tmp_path])[0] == [[True, True]] * 2
    assert not abandoned.exists()
    assert in_use.exists()


# torch.distributed


class FakeDistributed(SimpleNamespace):
    """As much of torch.distributed as is asked before a group is used."""

    def __init__(self, **changes: Any) -> None:
        answers = {"initialized": True, "rank": 1, "backend": "cpu:gloo,cuda:nccl", **changes}
        super().__init__(
            is_available=lambda: True,
            is_initialized=lambda: answers["initialized"],
            get_rank=lambda group: answers["rank"],
            get_backend_config=lambda group: answers["backend"],
            get_process_group_ranks=lambda group: [4, 7],
            group=SimpleNamespace(WORLD="world"),
            GroupMember=SimpleNamespace(NON_GROUP_MEMBER=-100),
        )


def pretend_torch(monkeypatch: pytest.MonkeyPatch, dist: FakeDistributed) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=dist))
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)


def test_ranks_are_those_within_the_torch_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, FakeDistributed())
    group = TorchProcessGroup()
    assert (group.rank, group.world_size) == (1, 2)
    assert isinstance(group, ProcessGroup)
    with pytest.raises(ConfigurationError, match="source=4 is no rank"):
        group.broadcast_object(None, 4)


@pytest.mark.parametrize(
    ("changes", "group", "said"),
    [
        ({"initialized": False}, None, "init_process_group first"),
        ({"rank": -1}, None, "not a member"),
        ({}, -100, "not a member"),
        ({"backend": "cuda:nccl"}, None, r"\(cuda:nccl\) carries no CPU tensors"),
    ],
)
def test_a_torch_group_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], group: Any, said: str
) -> None:
    pretend_torch(monkeypatch, FakeDistributed(**changes))
    with pytest.raises(ConfigurationError, match=said):
        TorchProcessGroup(group)


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigurationError, match=r"kvindex\[torch\]"):
        TorchProcessGroup()
