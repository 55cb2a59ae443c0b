"""Process groups without a network: values, and which torch groups can be used."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex.shm import ProcessGroup, TorchProcessGroup
from kvindex.shm.groups import pack_object, unpack_object
from kvindex.wire.errors import ConfigurationError, DecodeError

pytestmark = pytest.mark.unit


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
    ("changes", "group", "reason"),
    [
        ({"initialized": False}, None, "init_process_group first"),
        ({"rank": -1}, None, "not a member"),
        ({}, -100, "not a member"),
        ({"backend": "cuda:nccl"}, None, r"\(cuda:nccl\) carries no CPU tensors"),
    ],
)
def test_a_torch_group_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], group: Any, reason: str
) -> None:
    pretend_torch(monkeypatch, FakeDistributed(**changes))
    with pytest.raises(ConfigurationError, match=reason):
        TorchProcessGroup(group)


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigurationError, match=r"pip install -e '\.\[torch\]'"):
        TorchProcessGroup()
