"""A process group over `torch.distributed`; torch is imported only when one is made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvindex.shm.groups.objects import MAX_OBJECT_BYTES, check_rank, pack_object, unpack_object
from kvindex.shm.groups.same_node import ranks_that_share_memory
from kvindex.wire.errors import ConfigurationError, DecodeError, PeerDiedError, QueueTimeoutError

__all__ = ["TorchProcessGroup"]

_TIMED_OUT: Final = ("timed out", "timeout")


class TorchProcessGroup:
    """A `torch.distributed` group as a `ProcessGroup`; needs the extra `kvindex[torch]`.

    Values cross as msgpack in CPU tensors of bytes, never as pickle, so the group's backend must
    carry CPU tensors: gloo, mpi, or "cpu:gloo,cuda:nccl". Ranks are those within the group. The
    group is used, not owned: end it with `torch.distributed.destroy_process_group`.

    gloo does not report which rank it lost or waited for; its own text is in the error's message.
    The group keeps the timeout with which it was made.

    Args:
        group: the group; None for the default one.
        max_object_bytes: the largest packed value, in bytes. A gather pads all values to the
            largest, and holds `world_size` of them at its destination.

    Raises:
        ConfigurationError: torch is not installed or not initialised, this process is not in the
            group, or its backend carries no CPU tensors.

    Thread safety: one thread at a time.
    """

    def __init__(self, group: Any = None, *, max_object_bytes: int = MAX_OBJECT_BYTES) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise ConfigurationError(
                "TorchProcessGroup needs torch: pip install 'kvindex[torch]', or pass a group of "
                "your own with the methods of ProcessGroup"
            ) from error
        self._torch: Any = torch
        self._dist: Any = dist
        self._max_object_bytes = max_object_bytes
        self._group = self._usable(group)
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
        """Return at every rank the `obj` of rank `source`. Collective.

        Raises: see `ProcessGroup`.
        """
        check_rank("source", source, self.world_size)
        data = bytearray(self._pack(obj) if self._rank == source else b"")
        with self._collective(f"broadcast_object(source={source})"):
            length = self._torch.tensor([len(data)], dtype=self._torch.int64)
            self._broadcast(length, source)
            if self._rank != source:
                data = bytearray(self._checked(int(length.item()), source))
            self._broadcast(self._tensor(data), source)
        return unpack_object(data)

    def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
        """Return at `destination` every rank's `obj`, by rank; None elsewhere. Collective.

        Raises: see `ProcessGroup`.
        """
        check_rank("destination", destination, self.world_size)
        data = self._pack(obj)
        with self._collective(f"gather_object(destination={destination})"):
            lengths = self._all_lengths(len(data))
            padded = bytearray(data.ljust(max(lengths), b"\0"))
            parts = self._gather(padded, destination)
        if parts is None:
            return None
        return [
            unpack_object(memoryview(part)[:length])
            for part, length in zip(parts, lengths, strict=True)
        ]

    def same_node(self, source: int) -> list[bool]:
        """Return at every rank, for each, whether it shares /dev/shm with `source`. Collective.

        Raises: see `ProcessGroup`.
        """
        check_rank("source", source, self.world_size)
        return ranks_that_share_memory(self, source)

    def barrier(self) -> None:
        """Return when every rank has called it. Collective.

        Raises: see `ProcessGroup`.
        """
        with self._collective("barrier()"):  # torch's own might choose another device's backend
            self._dist.all_reduce(self._torch.zeros(1, dtype=self._torch.int64), group=self._group)

    def __repr__(self) -> str:
        return f"TorchProcessGroup({self._rank} of {self.world_size})"

    def _usable(self, group: Any) -> Any:
        if not self._dist.is_available() or not self._dist.is_initialized():
            raise ConfigurationError(
                "torch.distributed is not initialised: call init_process_group first"
            )
        group = self._dist.group.WORLD if group is None else group
        if group is self._dist.GroupMember.NON_GROUP_MEMBER or self._dist.get_rank(group) < 0:
            raise ConfigurationError("this process is not a member of the group")
        backends = str(self._dist.get_backend_config(group))  # as in "cpu:gloo,cuda:nccl"
        if "cpu" not in {item.partition(":")[0] for item in backends.split(",")}:
            raise ConfigurationError(
                f"the group's backend ({backends}) carries no CPU tensors: make one for this with "
                "torch.distributed.new_group(backend='gloo')"
            )
        return group

    def _pack(self, obj: Any) -> bytes:
        return pack_object(obj, self._max_object_bytes)

    def _tensor(self, data: bytearray) -> Any:
        """A tensor over these very bytes: received values are in `data`."""
        return self._torch.frombuffer(data, dtype=self._torch.uint8)

    def _broadcast(self, tensor: Any, source: int) -> None:
        self._dist.broadcast(tensor, src=self._global_ranks[source], group=self._group)

    def _all_lengths(self, length: int) -> list[int]:
        own = self._torch.tensor([length], dtype=self._torch.int64)
        lengths = [self._torch.zeros_like(own) for _ in range(self.world_size)]
        self._dist.all_gather(lengths, own, group=self._group)
        return [self._checked(int(item.item()), rank) for rank, item in enumerate(lengths)]

    def _gather(self, padded: bytearray, destination: int) -> list[bytearray] | None:
        parts: list[bytearray] | None = None
        if self._rank == destination:
            parts = [bytearray(len(padded)) for _ in range(self.world_size)]
        self._dist.gather(
            self._tensor(padded),
            None if parts is None else [self._tensor(part) for part in parts],
            dst=self._global_ranks[destination],
            group=self._group,
        )
        return parts

    def _checked(self, length: int, rank: int) -> int:
        """A length that a rank has sent, before memory is taken for it."""
        if not 1 <= length <= self._max_object_bytes:
            raise DecodeError(
                f"rank {rank} announced a value of {length} bytes, not of 1 to "
                f"{self._max_object_bytes}; max_object_bytes must be the same at every rank"
            )
        return length

    @contextmanager
    def _collective(self, call: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # all that torch raises for a lost or late rank
            waited = time.monotonic() - began
            said = f"rank {self._rank} failed in {call} after {waited:.3g} s: {error}"
            if any(word in str(error).lower() for word in _TIMED_OUT):
                raise QueueTimeoutError(said, timeout=waited) from error
            raise PeerDiedError(said) from error
