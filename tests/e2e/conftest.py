"""Fixtures of the tests over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from tests.e2e.publish_peers import Context


@pytest.fixture
def context() -> Iterator[Context]:
    """A ZeroMQ context of the test's own, ended with all that is in it."""
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)
