"""Fixtures of the tests over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import zmq

from tests.e2e.publish_peers import Context

# With torch (the extra "torch") its tests are collected; without it there is nothing to test.
collect_ignore = [] if find_spec("torch") else ["test_torch_groups.py"]


@pytest.fixture
def context() -> Iterator[Context]:
    """A ZeroMQ context of the test's own, ended with all that is in it."""
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)
