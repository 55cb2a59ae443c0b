"""The engines' publisher interface, its configuration, and the publisher that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from kvindex.wire import EventBatch
from kvindex.wire.errors import ConfigurationError

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
    ranks = [rank for rank in (data_parallel_rank, attn_dp_rank) if rank is not None]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ConfigurationError(f"data_parallel_rank is {rank!r}; it must be an int from 0")
    if len(set(ranks)) > 1:
        raise ConfigurationError(
            f"data_parallel_rank is {data_parallel_rank} and attn_dp_rank is {attn_dp_rank}: "
            "two names of one rank; give one"
        )
    return ranks[0] if ranks else 0


_Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class KVEventsConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How one engine publishes its KV-cache events.

    The first eight are vLLM's names and defaults; SGLang has all but the first. Left out,
    `enable_kv_cache_events` is True if a publisher is named (as SGLang does), and `publisher` is
    "zmq" if the events are enabled (as vLLM does), else "null"; both are filled in here.
    Like vLLM's it can be changed afterwards; `EventPublisherFactory.create` checks it again.
    Unknown keys are refused (SGLang ignores them): more often than not they are mistyped.

    Attributes:
        enable_kv_cache_events: False publishes nothing, whatever `publisher` says.
        publisher: "null", "zmq", or a name given to `EventPublisherFactory.register_publisher`.
        endpoint: where rank 0 publishes: tcp, ipc (rank 0 only) or inproc; rank r uses port + r.
        replay_endpoint: where rank 0 answers replay requests, always bound; None for no replay.
        buffer_steps: batches kept for replay; 0 keeps none.
        hwm: batches queued in the socket for each subscriber before it loses some; 0 for no limit.
        max_queue_size: batches that wait for the publisher's thread, at least 1.
        topic: first frame of every message.
        bind: True binds the live endpoint, False connects to it, None goes by the engine's rule:
            it binds wildcards and connects to a concrete host.
        on_full: what `publish` does when max_queue_size batches wait: "block" waits for room;
            "drop" drops the batch, counts it and uses up its number: subscribers see a gap.
        dialect: name of the engine version to write as; None for the newest.

    Raises:
        ConfigurationError: a value of the wrong type or range; the message names it.

    Examples:
        >>> KVEventsConfig(publisher="zmq").enable_kv_cache_events
        True
        >>> KVEventsConfig(enable_kv_cache_events=True).publisher
        'zmq'
    """

    enable_kv_cache_events: bool | None = None
    publisher: _Text | None = None
    endpoint: _Text = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Size = 100_000
    topic: str = ""
    bind: bool | None = None
    on_full: Literal["block", "drop"] = "block"
    dialect: str | None = None

    def __post_init__(self) -> None:
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
        if self.enable_kv_cache_events is None:
            self.enable_kv_cache_events = self.publisher != "null"
        # msgspec checks types where it decodes; here also what a constructor was given.
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise ConfigurationError(f"{field.name} is {value!r}: {error}") from None

    @classmethod
    def from_cli(cls, cli_value: str) -> KVEventsConfig:
        """Return the configuration written as a JSON object, as on the engines' command lines.

        Raises:
            ConfigurationError: not JSON, not an object, an unknown key, or a value of the wrong
                type or range; the message names the key.

        Examples:
            >>> KVEventsConfig.from_cli('{"publisher": "zmq", "topic": "kv"}').topic
            'kv'
        """
        try:
            return msgspec.json.decode(cli_value, type=cls)
        except msgspec.DecodeError as error:
            why = f"cannot be read: {error}; known keys: {', '.join(cls.__struct_fields__)}"
        except (TypeError, UnicodeError) as error:
            why = f"is JSON text, not {type(cli_value).__name__}: {error}"
        raise ConfigurationError(f"the KV events configuration {why}")
