"""Groups of processes that exchange small values, as the making of a queue among them needs.

`ProcessGroup` is all that is asked of a group, `TorchProcessGroup` one over `torch.distributed`;
torch is imported only when one is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from kvindex.shm.ring import Segment
from kvindex.shm.writing import Handle
from kvindex.wire.errors import (
    ConfigurationError,
    DecodeError,
    PeerDiedError,
    QueueTimeoutError,
    SegmentError,
    how_to_install,
)

logger = logging.getLogger(__name__)

_MAX_OBJECT_BYTES: Final = 64 << 20
_MAX_REASON: Final = 1_000  # characters of an error that are reported to the other ranks
_Made = TypeVar("_Made")


@runtime_checkable
class ProcessGroup(Protocol):
    """A fixed number of processes that exchange small values; `TorchProcessGroup` adapts torch's.

    A group of your own needs these four members and nothing else. Both methods are collective: each
    rank calls them in the same order, or the others wait for it.

    Values are those that msgpack carries: None, bool, int of 64 bits, float, str, bytes, lists and
    maps of these.

    Raises:
        ConfigurationError: by each method: the value cannot be carried, or `source` is no rank of
            the group.
        QueueTimeoutError: by each method: ranks did not make the call in time.
        PeerDiedError: by each method: a rank is gone.

    Thread safety: one thread at a time, as the order of calls must be the same everywhere.
    """

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        ...

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """Return at every rank the `obj` of rank `source`; those of other ranks are ignored."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...


class TorchProcessGroup:
    """A `torch.distributed` group as a `ProcessGroup`; needs the extra `kvindex[torch]`.

    Values cross as msgpack in CPU tensors of bytes, never as pickle, so the group's backend must
    carry CPU tensors: gloo, mpi, or "cpu:gloo,cuda:nccl". Ranks are those within the group. The
    group is used, not owned: end it with `torch.distributed.destroy_process_group`.

    gloo does not report which rank it lost or waited for; its own text is in the error's message.
    The group keeps the timeout with which it was made. Its methods raise as those of
    `ProcessGroup`.

    Args:
        group: the group; None for the default one.
        max_object_bytes: the largest packed value, in bytes.

    Raises:
        ConfigurationError: torch is not installed or not initialised, this process is not in the
            group, or its backend carries no CPU tensors.

    Thread safety: one thread at a time.
    """

    def __init__(self, group: Any = None, *, max_object_bytes: int = _MAX_OBJECT_BYTES) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise ConfigurationError(
                f"TorchProcessGroup needs torch: {how_to_install('torch')}. Or pass a group of your"
                " own with the methods of ProcessGroup"
            ) from error
        self._torch: Any = torch
        self._dist: Any = dist
        self._max_object_bytes = max_object_bytes
        # All that could fail at this rank alone is refused here, before a rank waits for it.
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed is not initialised: call init_process_group first"
            )
        self._group = dist.group.WORLD if group is None else group
        if self._group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(self._group) < 0:
            raise ConfigurationError("this process is not a member of the group")
        backends = str(dist.get_backend_config(self._group))  # as in "cpu:gloo,cuda:nccl"
        if "cpu" not in {item.partition(":")[0] for item in backends.split(",")}:
            raise ConfigurationError(
                f"the group's backend ({backends}) carries no CPU tensors: make one for this with "
                "torch.distributed.new_group(backend='gloo')"
            )
        self._rank = int(dist.get_rank(self._group))
        self._global_ranks = [int(rank) for rank in dist.get_process_group_ranks(self._group)]

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return len(self._global_ranks)

    def broadcast_object(self, obj: Any, source: int) -> Any:
        """Return at every rank the `obj` of rank `source`. Collective."""
        check_rank("source", source, self.world_size)
        is_source = self._rank == source
        # Packed before anything is sent: what cannot be carried fails here, not at the others.
        data = bytearray(pack_object(obj, self._max_object_bytes) if is_source else b"")
        with self._collective(f"broadcast_object(source={source})"):
            length = self._torch.tensor([len(data)], dtype=self._torch.int64)
            self._broadcast(length, source)
            if not is_source:
                announced = int(length.item())
                if not 1 <= announced <= self._max_object_bytes:  # before memory is taken for it
                    raise DecodeError(
                        f"rank {source} announced a value of {announced} bytes, not of 1 to "
                        f"{self._max_object_bytes}; max_object_bytes must be the same at every rank"
                    )
                data = bytearray(announced)
            # The tensor shares the memory of `data`, which receives the value.
            self._broadcast(self._torch.frombuffer(data, dtype=self._torch.uint8), source)
        return unpack_object(data)

    def barrier(self) -> None:
        """Return when every rank has called it. Collective."""
        with self._collective("barrier()"):  # torch's own might choose another device's backend
            self._dist.all_reduce(self._torch.zeros(1, dtype=self._torch.int64), group=self._group)

    def __repr__(self) -> str:
        return f"TorchProcessGroup({self._rank} of {self.world_size})"

    def _broadcast(self, tensor: Any, source: int) -> None:
        self._dist.broadcast(tensor, src=self._global_ranks[source], group=self._group)

    @contextmanager
    def _collective(self, call: str) -> Iterator[None]:
        # gloo's group keeps its own timeout and does not say it: how long it took is measured here.
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # all that torch raises for a lost or late rank
            waited = time.monotonic() - began
            message = f"rank {self._rank} failed in {call} after {waited:.3g} s: {error}"
            # gloo has no other sign of a time-out than its text.
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise QueueTimeoutError(message, timeout=waited) from error
            raise PeerDiedError(message) from error


def pack_object(obj: Any, max_bytes: int = _MAX_OBJECT_BYTES) -> bytes:
    """Return a value as msgpack; ConfigurationError if it cannot be, or is too long."""
    try:
        data = msgspec.msgpack.encode(obj)
    except Exception as error:  # msgspec raises several kinds, down to RecursionError
        raise ConfigurationError(
            f"a process group cannot carry this {type(obj).__name__}: {error}; use None, "
            "numbers of 64 bits, str, bytes, and lists and maps of these"
        ) from error
    if len(data) > max_bytes:
        raise ConfigurationError(
            f"this {type(obj).__name__} takes {len(data)} bytes, more than the {max_bytes} that "
            "the group carries; raise max_object_bytes at every rank"
        )
    return data


def unpack_object(data: bytes | bytearray) -> Any:
    """Return the value in what `pack_object` made; only DecodeError is raised."""
    try:
        return msgspec.msgpack.decode(data)
    except Exception as error:  # as above; MemoryError too
        raise DecodeError(
            f"not a value of a process group ({len(data)} bytes): {type(error).__name__}: {error}",
            size=len(data),
        ) from None


def check_rank(name: str, rank: int, world_size: int) -> None:
    """Raise ConfigurationError unless the group has this rank."""
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"{name}={rank!r} is no rank of this group: it has {world_size}, from 0"
        )


def gather(group: ProcessGroup, obj: Any) -> list[Any]:
    """Return at every rank each rank's `obj`. Collective."""
    ranks = range(group.world_size)
    return [group.broadcast_object(obj if rank == group.rank else None, rank) for rank in ranks]


def shares_memory(group: ProcessGroup, source: int) -> bool:
    """Return whether this rank shares memory with rank `source`. Collective."""
    # Containers on one machine may have a /dev/shm each, and two machines may have one name. So
    # rank `source` makes a segment, whose name cannot be guessed, and the others try to attach it.
    # A rank of another user cannot, since segments are private to their user.
    made: Segment | None = None
    try:
        if group.rank == source:
            made = Segment.make(1, b"\0")
    except SegmentError as error:
        logger.warning("no rank can share memory with this one: %s", error)
    try:
        name = group.broadcast_object(None if made is None else made.name, source)
        shared = isinstance(name, str)
        if shared:
            try:
                Segment.attach(name).close()
            except SegmentError:
                shared = False
        group.barrier()  # before the name is gone, every rank has tried it
    finally:
        if made is not None:
            made.close()
    return shared


def settle(
    group: ProcessGroup, task: str, act: Callable[[], tuple[_Made, Handle | None]]
) -> tuple[_Made, list[bytes]]:
    """Act at every rank; return what was made here, and every rank's handle. Collective.

    If a rank fails, it raises its own error, and the others a ConfigurationError that names it.
    """
    offer = failure = None
    try:
        made, handle = act()
        offer = None if handle is None else handle.to_bytes()
    except Exception as error:  # of whatever kind: the other ranks wait for this one's report
        failure = error
    # Everybody's report before anybody raises: who left earlier would keep the others waiting.
    # Its text is bounded and can be encoded, or the report itself would fail, at this rank only.
    reason = failure and str(failure)[:_MAX_REASON].encode(errors="replace").decode()
    reports = gather(group, [offer, reason])
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(reports):
        if reason is not None:
            raise ConfigurationError(f"rank {rank} could not {task}: {reason}")
    return made, [offer for offer, _ in reports]
