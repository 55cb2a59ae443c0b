"""What a process group settles before it shares a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvindex.errors import ConfigurationError, KVIndexError
from kvindex.shm.groups.process_group import ProcessGroup
from kvindex.shm.handle import Handle

__all__ = [
    "as_process_group",
    "check_reachable",
    "collect_handles",
    "confirm",
    "reader_options",
    "spread_handle",
]

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
    data, failure = group.broadcast_object(_offer(made), writer_rank)
    if isinstance(made, KVIndexError):
        raise made
    if data is None:
        raise ConfigurationError(f"rank {writer_rank} could not make the queue: {failure}")
    return Handle.from_bytes(data)


def collect_handles(
    group: ProcessGroup, reader_rank: int, made: Handle | KVIndexError
) -> list[Handle]:
    """Return at `reader_rank` every rank's handle, and elsewhere nothing; collective.

    Raises:
        ConfigurationError: a rank could not make its queue; at that rank, its own error.
    """
    offers = group.gather_object(_offer(made), reader_rank) or []
    confirm(group, made if isinstance(made, KVIndexError) else None)
    return [Handle.from_bytes(data) for data, _ in offers]


def confirm(group: ProcessGroup, failure: KVIndexError | None) -> None:
    """Return if no rank has failed; collective.

    Raises:
        ConfigurationError: one has; at that rank, its own error.
    """
    told = group.gather_object(None if failure is None else str(failure), 0) or []
    failed = [[rank, why] for rank, why in enumerate(told) if why is not None]
    failed = group.broadcast_object(failed, 0)
    if failure is not None:
        raise failure
    if failed:
        rank, why = failed[0]
        raise ConfigurationError(f"rank {rank} could not open its end of the queue: {why}")


def _offer(made: Handle | KVIndexError | None) -> list[Any]:
    if isinstance(made, KVIndexError):
        return [None, str(made)]
    return [made and made.to_bytes(), ""]


def reader_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a queue's options that a reader takes."""
    return {name: options[name] for name in _READER_OPTIONS if name in options}
