from __future__ import annotations

from typing import Any

import pytest

from kvindex.publish import (
    EventPublisher,
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    ZmqEventPublisher,
)
from kvindex.wire import EventBatch
from kvindex.wire.errors import ConfigurationError, DuplicatePublisherError

pytestmark = pytest.mark.unit


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
    given = created(KVEventsConfig(publisher="mine", topic="kv"), data_parallel_rank=2).arguments
    assert given == {
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
    assert own_name.keys() == given.keys() - {"data_parallel_rank"} | {"attn_dp_rank", *knobs}
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
