"""A site for each test: engines, servers and replicas that end with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.replicas.fanout_peers import Site
from tests.shm.queue_peers import Nursery


@pytest.fixture(scope="module")
def processes() -> Iterator[Nursery]:
    started = Nursery("tests.replicas.fanout_peers:FanOutEnd")
    yield started
    started.close()


@pytest.fixture
def site(processes: Nursery, tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(str(tmp_path / "kvindex.sock"), processes, stack)
