"""The publisher's configuration, as both engines read it from their command lines."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvindex.wire.errors import ConfigurationError

__all__ = ["KVEventsConfig"]

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "enable_kv_cache_events": (bool,),
    "publisher": (str,),
    "endpoint": (str,),
    "replay_endpoint": (str, type(None)),
    "buffer_steps": (int,),
    "hwm": (int,),
    "max_queue_size": (int,),
    "topic": (str,),
    "bind": (bool, type(None)),
    "on_full": (str,),
    "dialect": (str, type(None)),
}
_LEAST: Final = {"buffer_steps": 0, "hwm": 0, "max_queue_size": 1}
_MAX_HWM: Final = 2**31 - 1


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
        endpoint: where rank 0 publishes; rank r uses port + r.
        replay_endpoint: where rank 0 answers replay requests; None for no replay.
        buffer_steps: batches kept for replay; 0 keeps none.
        hwm: batches queued in the socket for each subscriber before it loses some; 0 for no limit.
        max_queue_size: batches that wait for the publisher's thread, at least 1.
        topic: first frame of every message.
        bind: True binds the live endpoint, False connects to it, None goes by the engine's rule.
        on_full: what `publish` does when max_queue_size batches wait: "block" or "drop".
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
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    bind: bool | None = None
    on_full: Literal["block", "drop"] = "block"
    dialect: str | None = None

    def __post_init__(self) -> None:
        if self.publisher is None:
            named = "zmq" if self.enable_kv_cache_events else "null"
            self.publisher = named
        if self.enable_kv_cache_events is None:
            enabled = self.publisher != "null"
            self.enable_kv_cache_events = enabled
        self._check()

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
            known = ", ".join(cls.__struct_fields__)
            raise ConfigurationError(
                f"the KV events configuration cannot be read: {error}; known keys: {known}"
            ) from error
        except (TypeError, UnicodeError) as error:
            raise ConfigurationError(
                f"the KV events configuration is JSON text, not {type(cli_value).__name__}: {error}"
            ) from error

    def _check(self) -> None:
        for name, types in _TYPES.items():
            value = getattr(self, name)
            is_odd_bool = isinstance(value, bool) and bool not in types
            if is_odd_bool or not isinstance(value, types):
                expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
                raise ConfigurationError(f"{name} is {value!r}; it must be of type {expected}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not least <= value <= _MAX_HWM:
                raise ConfigurationError(f"{name} is {value}; it must be {least} to {_MAX_HWM}")
        if self.on_full not in ("block", "drop"):
            raise ConfigurationError(f'on_full is {self.on_full!r}; it must be "block" or "drop"')
        if not self.endpoint or not self.publisher:
            empty = "endpoint" if not self.endpoint else "publisher"
            raise ConfigurationError(f"{empty} is empty")
