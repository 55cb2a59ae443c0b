"""Configurations, endpoints, and publishers by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvindex.publish import (
    EventPublisher,
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    ZmqEventPublisher,
    offset_endpoint,
)
from kvindex.publish.sockets import binds_endpoint, local_endpoint, port_of
from kvindex.wire import LATEST, EventBatch, dialect
from kvindex.wire.errors import ConfigurationError, DuplicatePublisherError, KVIndexError

pytestmark = pytest.mark.unit

# Configurations ----------------------------------------------------------------------------------


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
        ('{"buffer_steps": 1.5}', "buffer_steps"),
        ('{"max_queue_size": 0}', "max_queue_size"),  # as below, of a value that can be read
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
        *(("hwm", 2**31), ("hwm", -1), ("max_queue_size", 0), ("publisher", "")),
        *(("topic", b"kv"), ("bind", "yes"), ("on_full", "explode")),
        ("enable_kv_cache_events", 1),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(KVIndexError, match=key):
        KVEventsConfig(**{key: value})


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value).decode()


# Endpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://10.0.0.1:5557", 1, "tcp://10.0.0.1:5558"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://*:65534", 1, "tcp://*:65535"),
        ("tcp://*:0", 7, "tcp://*:0"),
        ("tcp://127.0.0.1:*", 7, "tcp://127.0.0.1:*"),
        ("inproc://cache", 0, "inproc://cache"),
        ("inproc://cache", 2, "inproc://cache_dp2"),
        ("inproc://tcp", 2, "inproc://tcp_dp2"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
    ],
)
def test_each_rank_has_its_own_endpoint(endpoint: str, rank: int, expected: str) -> None:
    assert offset_endpoint(endpoint, rank) == expected
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == expected
    assert ZmqEventPublisher.offset_endpoint_port(None, rank) is None


@pytest.mark.parametrize(
    ("endpoint", "rank", "said"),
    [
        ("ipc:///run/kv", 1, "ipc has no port"),
        ("tcp://*:65535", 1, "beyond 65535"),
        ("tcp://*:99999", 0, "beyond 65535"),
        ("tcp://*", 0, "needs a port"),
        ("tcp://*:kv", 0, "needs a port"),
        ("tcp://:5557", 0, "needs a port"),
        ("tcp://*:-1", 0, "needs a port"),
        ("udp://*:5557", 0, "is none of"),
        ("5557", 0, "is none of"),
        ("tcp://", 0, "is none of"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(endpoint: str, rank: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        offset_endpoint(endpoint, rank)


@pytest.mark.parametrize(
    ("endpoint", "version", "expected"),
    [
        ("tcp://*:5557", "vllm-0.9.0", True),
        ("tcp://[::]:5557", "vllm-0.9.0", True),
        ("ipc:///run/kv", "vllm-0.9.0", True),
        ("inproc://cache", "vllm-0.9.0", True),
        ("tcp://10.0.0.1:5557", "vllm-0.33.0", False),
        ("tcp://10.0.0.1:5557", "sglang-0.5.23", False),
        ("tcp://0.0.0.0:5557", "vllm-0.33.0", False),
        ("tcp://0.0.0.0:5557", "sglang-0.5.9", False),
        ("tcp://0.0.0.0:5557", "sglang-0.5.18", True),
        ("tcp://0.0.0.0:5557", "sglang-0.5.23-eagle", True),
        ("tcp://127.0.0.1:0", "vllm-0.33.0", True),
    ],
)
def test_bind_or_connect_follows_the_engine(endpoint: str, version: str, expected: bool) -> None:
    assert binds_endpoint(endpoint, dialect(version)) is expected


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ("tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", "tcp://[::1]:5557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("inproc://cache", "inproc://cache"),
    ],
)
def test_a_bound_wildcard_is_reached_over_the_loopback(bound: str, expected: str) -> None:
    assert local_endpoint(bound) == expected


def test_port_of_knows_fixed_tcp_ports_only() -> None:
    assert port_of("tcp://*:5557") == 5557
    assert port_of("tcp://*:0") is None
    assert port_of("tcp://*:*") is None
    assert port_of("inproc://a:1") is None


def test_nothing_is_opened_for_an_endpoint_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="ipc has no port"):
        ZmqEventPublisher(1, "ipc:///run/kv")
    with pytest.raises(ConfigurationError, match=r"vllm-0\.33\.0"):
        ZmqEventPublisher(dialect="vllm-9")
    assert LATEST.name == "vllm-0.33.0"


# Publishers by name ------------------------------------------------------------------------------


class Recorder(EventPublisher):
    """Keeps the arguments that it was made with."""

    def __init__(self, **arguments: Any) -> None:
        ranks = {name: arguments[name] for name in arguments if name.endswith("_rank")}
        super().__init__(**ranks)
        self.arguments = arguments

    def publish(self, events: EventBatch) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(EventPublisherFactory._registry)
    monkeypatch.setattr(EventPublisherFactory, "_registry", registry)


def created(config: KVEventsConfig, **rank: int) -> Recorder:
    publisher = EventPublisherFactory.create(config, **rank)
    assert isinstance(publisher, Recorder)
    return publisher


@pytest.mark.parametrize(
    "config",
    [
        None,
        "",
        "{}",
        KVEventsConfig(),
        KVEventsConfig(publisher="null"),
        KVEventsConfig(publisher="zmq", enable_kv_cache_events=False),
        KVEventsConfig(publisher="null", enable_kv_cache_events=True),
    ],
)
def test_without_events_the_publisher_does_nothing(config: KVEventsConfig | str | None) -> None:
    publisher = EventPublisherFactory.create(config, data_parallel_rank=3)
    assert isinstance(publisher, NullEventPublisher)
    assert publisher.data_parallel_rank == publisher.attn_dp_rank == 3
    with publisher:
        publisher.publish(EventBatch(ts=0.0, events=[]))
    publisher.shutdown()


def test_a_registered_constructor_gets_what_the_engines_would_give_it_and_knobs_if_set() -> None:
    EventPublisherFactory.register_publisher("mine", Recorder)
    arguments = created(
        KVEventsConfig(publisher="mine", topic="kv"), data_parallel_rank=2
    ).arguments
    assert arguments == {
        "data_parallel_rank": 2,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "kv",
    }
    knobs = {"bind": False, "on_full": "drop", "dialect": "vllm-0.9.0"}
    config = KVEventsConfig(publisher="mine", **knobs)  # type: ignore[arg-type]
    own_name = created(config, attn_dp_rank=4).arguments
    assert own_name.keys() == arguments.keys() - {"data_parallel_rank"} | {"attn_dp_rank", *knobs}
    assert own_name.items() >= {"attn_dp_rank": 4, **knobs}.items()


def test_an_unknown_name_lists_the_known_ones() -> None:
    EventPublisherFactory.register_publisher("mine", Recorder)
    with pytest.raises(ConfigurationError, match="'nats'; known: mine, null, zmq"):
        EventPublisherFactory.create(KVEventsConfig(publisher="nats"))


@pytest.mark.parametrize("builtin", [KeyError, ValueError, ConfigurationError])
def test_a_name_is_registered_once(builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="named 'zmq' is registered already"):
        EventPublisherFactory.register_publisher("zmq", Recorder)
    with pytest.raises(DuplicatePublisherError) as caught:
        EventPublisherFactory.register_publisher("null", Recorder)
    assert str(caught.value) == "a publisher named 'null' is registered already"


@pytest.mark.parametrize(("name", "ctor"), [("", Recorder), (3, Recorder), ("mine", "Recorder")])
def test_a_registered_constructor_is_checked(name: Any, ctor: Any) -> None:
    with pytest.raises(ConfigurationError):
        EventPublisherFactory.register_publisher(name, ctor)


def test_a_rank_is_an_int_from_0_and_its_two_names_must_agree() -> None:
    for rank in (-1, True, "0", 1.0):
        with pytest.raises(ConfigurationError, match="data_parallel_rank"):
            NullEventPublisher(rank)  # type: ignore[arg-type]
    assert NullEventPublisher(1, attn_dp_rank=1).data_parallel_rank == 1
    assert NullEventPublisher().data_parallel_rank == 0
    with pytest.raises(ConfigurationError, match="data_parallel_rank is 1 and attn_dp_rank is 2"):
        NullEventPublisher(1, attn_dp_rank=2)
    with pytest.raises(ConfigurationError, match="two names of one rank"):
        EventPublisherFactory.create(None, 1, attn_dp_rank=0)


def test_a_constructor_gets_the_rank_under_the_name_that_it_has() -> None:
    class SGLangStyle(NullEventPublisher):
        def __init__(self, attn_dp_rank: int, **knobs: object) -> None:
            super().__init__(attn_dp_rank=attn_dp_rank)

    class VLLMStyle(NullEventPublisher):
        def __init__(self, data_parallel_rank: int, **knobs: object) -> None:
            super().__init__(data_parallel_rank)

    for name, constructor in (("by-attn", SGLangStyle), ("by-dp", VLLMStyle)):
        EventPublisherFactory.register_publisher(name, constructor)
        config = KVEventsConfig(publisher=name)
        assert EventPublisherFactory.create(config, 2).data_parallel_rank == 2
        assert EventPublisherFactory.create(config, attn_dp_rank=3).data_parallel_rank == 3


def test_a_configuration_can_be_changed_and_is_checked_when_it_is_used() -> None:
    config = KVEventsConfig(publisher="zmq")
    config.topic = "kv"
    config.buffer_steps = -1
    with pytest.raises(ConfigurationError, match="buffer_steps"):
        EventPublisherFactory.create(config)


def test_the_configuration_of_a_rank_has_its_own_endpoints() -> None:
    config = KVEventsConfig(
        publisher="zmq", endpoint="inproc://config-test", replay_endpoint="tcp://127.0.0.1:0"
    )
    with EventPublisherFactory.create(config, data_parallel_rank=1) as publisher:
        assert isinstance(publisher, ZmqEventPublisher)
        own = publisher.get_publisher_config()
        assert own.endpoint == "inproc://config-test_dp1"
        assert own.replay_endpoint == "tcp://127.0.0.1:0"
        assert config.endpoint == "inproc://config-test"
