"""What a process group settles before it shares a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvindex.errors import ConfigurationError, KVIndexError
from kvindex.shm.groups.process_group import ProcessGroup
from kvindex.shm.handle import Handle

__all__ = ["as_process_group", "check_reachable", "reader_options", "spread_handle"]

_READER_OPTIONS = ("codec", "waiting")


def as_process_group(group: Any) -> ProcessGroup:
    """Return a process group as it is, and one of torch.distributed adapted."""
    if isinstance(group, ProcessGroup):
        return group
    from kvindex.shm.groups.torch_group import TorchProcessGroup

    return TorchProcessGroup(group)


def check_reachable(n_reader: int, local: Sequence[int], connect_ip: str | None) -> None:
    """Check that readers elsewhere, if any, are given an address.

    Raises:
        ConfigurationError: they are not.
    """
    if len(local) < n_reader and connect_ip is None:
        raise ConfigurationError(
            f"{n_reader - len(local)} ranks share no memory with the writer: give it connect_ip, "
            "its address that they can reach"
        )


def spread_handle(
    group: ProcessGroup, writer_rank: int, made: Handle | KVIndexError | None
) -> Handle:
    """Return at every rank the handle that the writer made; collective.

    Args:
        group: the ranks.
        writer_rank: the one whose `made` counts.
        made: there, the handle, or why there is none.

    Raises:
        ConfigurationError: the writer could not make a queue; at the writer, its own error.
    """
    offered = (
        [None, str(made)] if isinstance(made, KVIndexError) else [made and made.to_bytes(), ""]
    )
    data, failure = group.broadcast_object(offered, writer_rank)
    if isinstance(made, KVIndexError):
        raise made
    if data is None:
        raise ConfigurationError(f"rank {writer_rank} could not make the queue: {failure}")
    return Handle.from_bytes(data)


def reader_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a queue's options that a reader takes."""
    return {name: options[name] for name in _READER_OPTIONS if name in options}
