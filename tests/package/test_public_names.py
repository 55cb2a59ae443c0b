"""The root has every name that its own functions return, and no more `Any` than it needs."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

import kvindex
import kvindex.replicas
import kvindex.replicas.nats
import kvindex.routing
import kvindex.shm
import kvindex.subscribe
import kvindex.subscribe.discovery
from kvindex import Client, ConfigurationError, EventStream, Index, connect
from kvindex.publish import ZmqEventPublisher
from kvindex.routing import Router
from kvindex.testing import FakeEngine
from kvindex.wire import errors

pytestmark = pytest.mark.unit

_T = TypeVar("_T")


class _Unpack(typing.Generic[_T]):
    """Stands for `typing_extensions.Unpack`, which nothing needs at run time."""


def public_functions(owner: object) -> Iterator[Any]:
    if inspect.isfunction(owner):
        yield owner
    if inspect.isclass(owner):
        for name, member in inspect.getmembers(owner):
            shown = not name.startswith("_") or name in ("__iter__", "__getitem__", "__aiter__")
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if shown and inspect.isfunction(function):
                yield function


def hints(something: Any) -> dict[str, Any]:
    module = inspect.getmodule(something)
    names = {**vars(kvindex.subscribe.discovery), **vars(module), "Unpack": _Unpack}
    return typing.get_type_hints(something, names, names)


def parts(hint: Any) -> Iterator[Any]:
    yield hint
    arguments = hint if isinstance(hint, list) else typing.get_args(hint)
    for argument in arguments:
        yield from parts(argument)


def ours(hint: Any) -> Iterator[str]:
    """The names of the classes of kvindex that a type hint has."""
    for part in parts(hint):
        if inspect.isclass(part) and part.__module__.startswith("kvindex"):
            yield part.__name__


@pytest.mark.parametrize("name", kvindex.__all__)
def test_what_the_root_returns_is_in_the_root(name: str) -> None:
    owner = getattr(kvindex, name)
    returned = [
        hints(function).get("return")
        for function in public_functions(owner)
        if function.__module__.startswith("kvindex")
    ]
    if inspect.isclass(owner) and hasattr(owner, "__struct_fields__"):
        returned += hints(owner).values()
    for hint in returned:
        assert set(ours(hint)) <= set(kvindex.__all__)


@pytest.mark.parametrize("name", kvindex.__all__)
def test_no_argument_of_the_root_is_untyped(name: str) -> None:
    owner = getattr(kvindex, name)
    functions = [*public_functions(owner), *([owner.__init__] if inspect.isclass(owner) else ())]
    for function in functions:
        if inspect.isfunction(function) and function.__module__.startswith("kvindex"):
            named = {key: hint for key, hint in hints(function).items() if key != "return"}
            assert Any not in named.values(), function.__qualname__


def test_every_error_is_had_where_it_is_raised() -> None:
    queue_errors = {"PeerDiedError", "QueueClosedError", "QueueTimeoutError", "ReaderDiedError"}
    queue_errors |= {"ReaderEvictedError", "SegmentError", "WaitCancelledError", "WriterDiedError"}
    routing_errors = {"DuplicateBookingError", "NoCandidateError", "UnknownBookingError"}
    server_errors = {"EndpointRefusedError", "QueryError", "RegistrationError"}
    elsewhere = queue_errors | routing_errors | server_errors | {"NatsError"}
    assert not elsewhere & set(kvindex.__all__)
    assert queue_errors <= set(kvindex.shm.__all__)
    assert routing_errors <= set(kvindex.routing.__all__)
    assert "NatsError" in kvindex.replicas.nats.__all__
    assert "DiscoveryError" in kvindex.subscribe.discovery.__all__
    assert set(errors.__all__) - elsewhere <= set(kvindex.__all__)
    assert {"QueueTimeoutError", "SegmentError"} <= set(kvindex.replicas.__all__)


def test_the_error_of_queries_is_had_where_it_is_raised() -> None:
    queries = pytest.importorskip("kvindex.service.queries", exc_type=ImportError)
    assert "QueryError" in queries.__all__


def keywords(taker: Any) -> set[str]:
    parameters = inspect.signature(taker).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_options_that_are_passed_on_are_those_of_the_receiver() -> None:
    stream = set(kvindex.subscribe.StreamOptions.__annotations__)
    assert stream < keywords(kvindex.Subscriber)
    client = set(kvindex.ClientOptions.__annotations__)
    assert client == stream | keywords(kvindex.Client) - {"index", "tap", "on_stop"}
    for name in client:
        assert f"        {name}: " in (kvindex.connect.__doc__ or ""), "`help` says what it means"


@pytest.mark.parametrize("taker", [kvindex.connect, kvindex.Client, kvindex.EventStream])
def test_an_option_or_a_value_that_does_not_exist_is_refused(taker: Any) -> None:
    with pytest.raises(TypeError, match="prob_interval"):
        taker((), prob_interval=1.0)
    with pytest.raises(ValueError, match="on_loss"):
        taker((), on_loss="drop")


@pytest.mark.parametrize(
    ("called", "arguments", "option", "said"),
    [
        (connect, [()], "stale", "connect() .* 'stale_after'?"),
        (Client, [()], "stale_aftr", "Client() .* 'stale_after'?"),
        (EventStream, [()], "zzz", "EventStream() .* 'zzz'"),
        (Index().match, [[1]], "lorra", "match() .* 'lora'?"),
        (Index().explain, [[1]], "lorra", "explain() .* 'lora'?"),
        (Router(Index()).select, [[1]], "timeout", "select() .* 'timeout'"),
        (Router(Index()).reserve, [[1]], "timeout", "reserve() .* 'timeout'"),
        (Router(Index()).place, ["a/0", [1]], "labels", "place() .* 'labels'"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_in_the_name_of_what_was_called(
    called: Any, arguments: list[Any], option: str, said: str
) -> None:
    pattern = said.replace("()", r"\(\)").replace("?", r"\?")
    with pytest.raises(TypeError, match=pattern):
        called(*arguments, **{option: 1})


@pytest.mark.parametrize("source", [None, [], kvindex.Worker("a", "tcp://127.0.0.1:1")])
def test_a_router_says_what_it_asks_instead(source: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"a client .* not {type(source).__name__}"):
        Router(source)


def test_no_default_fills_a_screen_of_help() -> None:
    for taker in (FakeEngine, ZmqEventPublisher):
        for parameter in inspect.signature(taker).parameters.values():
            assert len(repr(parameter.default)) < 60, parameter
