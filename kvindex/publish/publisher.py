"""The engines' publisher interface, and the publisher that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from kvindex.wire import EventBatch
from kvindex.wire.errors import ConfigurationError

__all__ = ["EventPublisher", "NullEventPublisher", "one_rank"]

_Publisher = TypeVar("_Publisher", bound="EventPublisher")


class EventPublisher(ABC):
    """One data-parallel rank's outlet of KV-cache events.

    Every rank has its own publisher, with its own numbering; the publisher writes its rank into
    the batches. A context manager: leaving it shuts the publisher down.

    Args:
        data_parallel_rank: the rank, from 0 (the default).
        attn_dp_rank: SGLang's name for the same.

    Raises:
        ConfigurationError: a rank that is no int from 0, or two ranks that differ.
    """

    def __init__(
        self, data_parallel_rank: int | None = None, *, attn_dp_rank: int | None = None
    ) -> None:
        self._data_parallel_rank = one_rank(data_parallel_rank, attn_dp_rank)

    @property
    def data_parallel_rank(self) -> int:
        """The rank whose events are published."""
        return self._data_parallel_rank

    @property
    def attn_dp_rank(self) -> int:
        """SGLang's name for `data_parallel_rank`."""
        return self._data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Emit one batch, after those published before it."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send waiting batches within the timeout, then stop. Idempotent."""

    def __enter__(self: _Publisher) -> _Publisher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


class NullEventPublisher(EventPublisher):
    """Publishes nothing: an engine uses it while KV-cache events are off.

    Examples:
        >>> with NullEventPublisher() as publisher:
        ...     publisher.publish(EventBatch(ts=0.0, events=[]))
    """

    def publish(self, events: EventBatch) -> None:
        """Forget the batch."""

    def shutdown(self) -> None:
        """Do nothing."""


def one_rank(data_parallel_rank: int | None, attn_dp_rank: int | None) -> int:
    """Return the rank given by either name, or 0.

    Raises:
        ConfigurationError: a rank that is no int from 0, or two ranks that differ.
    """
    given = [rank for rank in (data_parallel_rank, attn_dp_rank) if rank is not None]
    for rank in given:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ConfigurationError(f"data_parallel_rank is {rank!r}; it must be an int from 0")
    if len(set(given)) > 1:
        raise ConfigurationError(
            f"data_parallel_rank is {data_parallel_rank} and attn_dp_rank is {attn_dp_rank}: "
            "two names of one rank; give one"
        )
    return given[0] if given else 0
