"""Publishers and their peers, which end with their test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.publish.publish_peers import Context, Peers


@pytest.fixture
def peers(context: Context) -> Iterator[Peers]:
    peers = Peers(context)
    yield peers
    peers.close()
