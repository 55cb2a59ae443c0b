"""An engine, a neighbour, a link with faults and a free port, for tests over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvindex.testing import FakeEngine, FaultyLink
from kvindex.testing.ports import reserve_port
from tests.live import link_to


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine("engine") as engine:
        yield engine


@pytest.fixture
def other() -> Iterator[FakeEngine]:
    with FakeEngine("other") as other:
        yield other


@pytest.fixture
def link(engine: FakeEngine) -> Iterator[FaultyLink]:
    """A link to the engine: subscribe by `worker_of(engine, link)`."""
    with link_to(engine) as link:
        yield link


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port where nothing listens, and nothing will while the test runs."""
    holder, port = reserve_port()
    yield port
    holder.close()
