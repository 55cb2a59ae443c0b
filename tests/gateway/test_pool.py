"""`kvindex gateway --from` and `epp --from`: two follow one relay on NATS, and share their load.

The second one has Envoy in front, where that is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvindex.testing import HttpEngine
from tests.gateway.picker.envoys import binary
from tests.gateway.test_gateway import ENVOY, LONG, Gateway, cached_in, chat, gateway_of, live_ranks
from tests.live import PATIENCE as LONG_ENOUGH
from tests.live import until
from tests.nats_server import NatsServer
from tests.tools.commands import http_engines, started

pytestmark = pytest.mark.service


def pooled(folder: Path, opened: ExitStack) -> tuple[NatsServer, list[HttpEngine]]:
    """Run two engines, and a relay that follows them into the pool "p"."""
    server = opened.enter_context(NatsServer(folder))
    engines = opened.enter_context(http_engines("a", "b"))
    small = ("--max-bytes", "16m")
    urls = [engine.url for engine in engines]
    opened.enter_context(started("relay", server.url, "--pool", "p", *small, *urls))
    return server, engines


@contextmanager
def two_gateways(folder: Path) -> Iterator[tuple[list[Gateway], NatsServer]]:
    with ExitStack() as opened:
        server, engines = pooled(folder, opened)
        urls = [engine.url for engine in engines]
        gateways = []
        for front in ((), ENVOY if binary() else ()):
            command = ("--from", f"{server.url}/p", *front, *urls)
            gateways.append(opened.enter_context(gateway_of(engines, *command)))
        until(lambda: [live_ranks(gateway) for gateway in gateways] == [2, 2])
        for gateway in gateways:
            assert json.loads(gateway.ask("/v1/models")[1])["data"]
        yield gateways, server


def test_two_pickers_count_each_others_load(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    from tests.gateway.picker.streams import body, endpoint_in, head, iter_open, picker_of

    with ExitStack() as opened:
        server, engines = pooled(tmp_path, opened)
        urls = [engine.url for engine in engines]
        command = ("--from", f"{server.url}/p")
        first, second = (opened.enter_context(picker_of(urls, *command)) for _ in range(2))
        text = json.dumps({"prompt": list(range(2000)), "max_tokens": 1}).encode()
        open_one = [head("/v1/completions"), body(text)]
        busy = endpoint_in(next(first.stub.Process(iter_open(open_one), timeout=LONG_ENOUGH)))

        def chosen(number: int) -> str:
            ids = json.dumps({"prompt": [number] * 40, "max_tokens": 1}).encode()
            return endpoint_in(second.process_all([head("/v1/completions"), body(ids)])[0])

        # Alone it would choose the busy one as often as the other.
        until(lambda: all(chosen(number) != busy for number in range(12)))


def cached(gateway: Gateway, text: str) -> int:
    status, body = gateway.ask("/v1/chat/completions", chat(text))
    assert status == 200
    return cached_in(body)


def test_each_finds_what_the_other_has_sent_and_counts_its_load(tmp_path: Path) -> None:
    with two_gateways(tmp_path) as ((first, second), _):
        assert cached(first, LONG) == 0
        until(lambda: cached(second, LONG) > 0)

        def held() -> int:
            before = second.settled()["tokens"]["held"]
            cached(second, LONG)
            return int(second.settled()["tokens"]["held"] - before)

        until(lambda: held() > 0)
        until(
            lambda: (
                [
                    one.statistics()["shared_load"]["fake-model"]["gateways"]
                    for one in (first, second)
                ]
                == [1, 1]
            )
        )


def test_without_nats_requests_go_on_by_load(tmp_path: Path) -> None:
    with two_gateways(tmp_path) as ((first, _), server):
        assert cached(first, LONG) == 0
        server.kill()
        until(lambda: not first.statistics()["shared_load"]["fake-model"]["connected"])
        for number in range(4):
            cached(first, f"{number} {LONG}")


def test_a_pool_needs_engines_and_its_options_a_pool() -> None:
    for options in (("--from", "nats://127.0.0.1:1/p"), ("--nats-user", "x", "http://h:1")):
        with started("gateway", *options) as command:
            assert command.process.wait(120) == 2
            assert "--from" in (error := command.err.read()) or "no engine" in error
