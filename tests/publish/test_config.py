from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvindex.publish import KVEventsConfig
from kvindex.wire.errors import ConfigurationError, KVIndexError

pytestmark = pytest.mark.unit


def test_defaults_are_the_engines() -> None:
    config = KVEventsConfig()
    assert (config.enable_kv_cache_events, config.publisher) == (False, "null")
    assert (config.endpoint, config.replay_endpoint) == ("tcp://*:5557", None)
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert config.topic == ""


@pytest.mark.parametrize(
    ("values", "enabled", "publisher"),
    [
        ({}, False, "null"),
        ({"enable_kv_cache_events": True}, True, "zmq"),  # vLLM
        ({"publisher": "zmq"}, True, "zmq"),  # SGLang
        ({"publisher": "null"}, False, "null"),
        ({"publisher": "zmq", "enable_kv_cache_events": False}, False, "zmq"),
        ({"publisher": "null", "enable_kv_cache_events": True}, True, "null"),
        ({"publisher": "mine"}, True, "mine"),
    ],
)
def test_either_engines_way_of_enabling_works(
    values: dict[str, Any], enabled: bool, publisher: str
) -> None:
    for config in (KVEventsConfig(**values), KVEventsConfig.from_cli(_json(values))):
        assert config.enable_kv_cache_events is enabled
        assert config.publisher == publisher


def test_from_cli_reads_every_key() -> None:
    values = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:6000",
        "replay_endpoint": "tcp://*:7000",
        "buffer_steps": 5,
        "hwm": 0,
        "max_queue_size": 1,
        "topic": "kv@pod@model",
        "bind": False,
        "on_full": "drop",
        "dialect": "sglang-0.5.22",
    }
    assert set(values) == set(KVEventsConfig.__struct_fields__)
    assert msgspec.structs.asdict(KVEventsConfig.from_cli(_json(values))) == values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"publisher": "zmq", "hvm": 1}', "hvm"),
        ('{"hwm": "many"}', "hwm"),
        ('{"hwm": -1}', "hwm"),
        ('{"buffer_steps": 1.5}', "buffer_steps"),
        ('{"max_queue_size": 0}', "max_queue_size"),
        ('{"on_full": "explode"}', "on_full"),
        ('{"endpoint": null}', "endpoint"),
        ('{"bind": 1}', "bind"),
        ("{publisher: zmq}", "cannot be read"),
        ("[]", "cannot be read"),
        ("", "cannot be read"),
        ({"publisher": "zmq"}, "dict"),
    ],
)
def test_from_cli_says_which_key_is_wrong(text: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        KVEventsConfig.from_cli(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("endpoint", value) for value in (5557, "")),
        *(("buffer_steps", value) for value in (True, -1)),
        *(("hwm", 2**31), ("max_queue_size", 0), ("publisher", "")),
        *(("topic", b"kv"), ("bind", "yes"), ("on_full", "explode")),
        ("enable_kv_cache_events", 1),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(KVIndexError, match=key):
        KVEventsConfig(**{key: value})


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()
