"""The protocol that a queue needs from the processes that will share it, however they connect."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["ProcessGroup"]


@runtime_checkable
class ProcessGroup(Protocol):
    """A fixed number of processes that exchange small values, all of them taking part each time.

    Every method is collective: each rank calls it, in the same order and with the same arguments
    (but for the values), or the others wait for it. `TorchProcessGroup` adapts a
    `torch.distributed` group; a group of your own needs these methods and nothing else.

    Values are those that msgpack carries: None, bool, int of 64 bits, float, str, bytes, lists and
    maps of these. Every rank, the giving one included, gets the value as msgpack decodes it: a
    tuple becomes a list.

    Raises:
        ConfigurationError: by each method: the value cannot be carried, `source` or `destination`
            is no rank of the group, or the ranks called different things.
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
        """Return at every rank the `obj` of rank `source`; others are ignored."""
        ...

    def gather_object(self, obj: Any, destination: int) -> list[Any] | None:
        """Return at `destination` every rank's `obj`, in the order of ranks; None elsewhere."""
        ...

    def same_node(self, source: int) -> list[bool]:
        """Return at every rank, for each rank, whether it shares /dev/shm with rank `source`."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...
