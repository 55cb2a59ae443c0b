"""Process groups without a network: values, who shares memory, torch's groups."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex.shm.groups.objects import pack_object, unpack_object
from kvindex.shm.groups.process_group import ProcessGroup
from kvindex.shm.groups.same_node import ranks_that_share_memory
from kvindex.shm.groups.torch_group import TorchProcessGroup
from kvindex.shm.ring import Segment
from kvindex.wire.errors import ConfigurationError, DecodeError, SegmentError

pytestmark = pytest.mark.unit

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


# Shared memory


class Board:
    """What the ranks of a group in one process write for each other, one box for each call."""

    def __init__(self, world_size: int) -> None:
        self.boxes: list[dict[int, Any]] = []
        self.meeting = threading.Barrier(world_size, timeout=120)


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


class ElsewhereGroup(BoardGroup):
    """A rank on another machine: what it is told the name of, it does not have."""

    def broadcast_object(self, obj: Any, source: int) -> Any:
        value = super().broadcast_object(obj, source)
        return value[:-1] if isinstance(value, str) else value


class LyingGroup(BoardGroup):
    """A rank that guesses the secret."""

    def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
        return super().gather_object(bytes(32), destination)


def shares(kinds: list[type[BoardGroup]], source: int = 0) -> tuple[Any, list[BoardGroup]]:
    """What each rank is told, the ranks being groups of these kinds."""
    board = Board(len(kinds))
    groups = [kind(rank, len(kinds), board) for rank, kind in enumerate(kinds)]
    with ThreadPoolExecutor(len(kinds)) as threads:
        told = list(threads.map(lambda group: ranks_that_share_memory(group, source), groups))
    return told, groups


def test_ranks_that_find_the_secret_share_memory_and_no_others() -> None:
    told, groups = shares([ElsewhereGroup, BoardGroup, BoardGroup, ElsewhereGroup], source=1)
    assert told == [[False, True, True, False]] * 4
    assert isinstance(groups[0], ProcessGroup)
    name, verdict = groups[2].heard
    assert isinstance(name, str), "the name, and nothing of the secret"
    assert verdict == told[2]
    assert not Path("/dev/shm", name).exists()


def test_one_without_shared_memory_shares_it_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, header: bytes) -> Segment:
        raise SegmentError("no room")

    monkeypatch.setattr(Segment, "make", refuse)
    told, _ = shares([BoardGroup, BoardGroup])
    assert told == [[False, False]] * 2


def test_a_wrong_answer_is_no_proof() -> None:
    told, _ = shares([BoardGroup, LyingGroup])
    assert told == [[True, False]] * 2


@pytest.mark.parametrize("named", ["../secret", "/etc/hostname", "\0", "", "a queue's", 7, None])
def test_nothing_else_is_read_whatever_the_source_says(named: Any) -> None:
    """Neither another file nor the memory of a queue."""
    queue = Segment.make(4096, b"private" * 100)

    class Liar(BoardGroup):
        def broadcast_object(self, obj: Any, source: int) -> Any:
            if isinstance(obj, list):
                return super().broadcast_object(obj, source)
            return super().broadcast_object(queue.name if named == "a queue's" else named, source)

        def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
            self.gathered = super().gather_object(obj, destination)
            return self.gathered

    told, groups = shares([Liar, BoardGroup])
    queue.close()
    assert groups[0].gathered == [None, None]  # type: ignore[attr-defined]
    assert told == [[False, False]] * 2


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
