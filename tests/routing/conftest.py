"""What the tests of routing share."""

from __future__ import annotations

import pytest

from tests.routing.fleet import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
