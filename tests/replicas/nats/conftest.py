"""A server for the tests of a module, and a pool of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvindex.wire.nats import NatsPool, parse_pool
from tests.nats_server import NatsServer

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that no test stops or kills."""
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def pool(server: NatsServer) -> NatsPool:
    """A pool of the test's own at the shared server."""
    return parse_pool(server.url, f"pool-{next(_NUMBERS)}", {})


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may kill."""
    with NatsServer(tmp_path / "server") as server:
        yield server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What it is given ends with the test, the latest first."""
    with ExitStack() as stack:
        yield stack
