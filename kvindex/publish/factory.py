"""Publishers by name, from a configuration."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from kvindex.publish.publisher import EventPublisher, KVEventsConfig, NullEventPublisher, one_rank
from kvindex.publish.zmq_publisher import ZmqEventPublisher
from kvindex.wire.errors import ConfigurationError, DuplicatePublisherError

_OWN_KNOBS = ("bind", "on_full", "dialect")


class EventPublisherFactory:
    """Makes the publisher that a configuration names: "null", "zmq", or one registered.

    Thread safety: every method may be called from any thread.
    """

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Register a publisher under a name that configurations can use.

        The constructor is called as the engines do: with the rank, as data_parallel_rank or
        attn_dp_rank, whichever parameter it has (as it was given to `create` if it has both or
        neither), endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size and topic; also with
        bind, on_full and dialect where the configuration sets them.

        Raises:
            DuplicatePublisherError: the name is registered already.
            ConfigurationError: the name is empty, or the constructor cannot be called.
        """
        if not name or not isinstance(name, str) or not callable(ctor):
            raise ConfigurationError(
                f"a publisher needs a name and a constructor, not {name!r} and {ctor!r}"
            )
        with cls._lock:
            if name in cls._registry:
                raise DuplicatePublisherError(f"a publisher named {name!r} is registered already")
            cls._registry[name] = ctor

    @classmethod
    def create(
        cls,
        config: KVEventsConfig | str | None,
        data_parallel_rank: int | None = None,
        *,
        attn_dp_rank: int | None = None,
    ) -> EventPublisher:
        """Return a running publisher; one that does nothing if none is configured.

        Args:
            config: the configuration, or its JSON text as SGLang's factory accepts it; None or
                empty text for none.
            data_parallel_rank: the rank, from 0 (the default).
            attn_dp_rank: SGLang's name for the same.

        Raises:
            ConfigurationError: a publisher that is not registered, or an error of its constructor.

        Examples:
            >>> EventPublisherFactory.create(None).data_parallel_rank
            0
        """
        rank = one_rank(data_parallel_rank, attn_dp_rank)
        if isinstance(config, str):
            config = KVEventsConfig.from_cli(config) if config else None
        if config is not None:
            config = msgspec.structs.replace(config)  # checked again: it may have been changed
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher(rank)
        with cls._lock:
            constructor = cls._registry.get(config.publisher or "")
            known = ", ".join(sorted(cls._registry))
        if constructor is None:
            raise ConfigurationError(f"no publisher is named {config.publisher!r}; known: {known}")
        came_as = "data_parallel_rank" if attn_dp_rank is None else "attn_dp_rank"
        return constructor(**{_rank_name(constructor, came_as): rank}, **_knobs(config))


def _rank_name(constructor: Callable[..., EventPublisher], came_as: str) -> str:
    """Return the engine's name of a constructor's rank."""
    try:
        names = inspect.signature(constructor).parameters
    except (TypeError, ValueError):  # a builtin without a readable signature
        return came_as
    taken = [name for name in ("data_parallel_rank", "attn_dp_rank") if name in names]
    return taken[0] if len(taken) == 1 else came_as


def _knobs(config: KVEventsConfig) -> dict[str, Any]:
    """The constructor's arguments: the engines' always, ours where they differ from the default."""
    usual = KVEventsConfig()
    return {
        name: value
        for name in config.__struct_fields__[2:]  # without what decides whether there is one
        if (value := getattr(config, name)) != getattr(usual, name) or name not in _OWN_KNOBS
    }
