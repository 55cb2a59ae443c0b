"""Waiting for what happens in Ray's processes, which tells nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

DEADLINE = 60.0  # seconds: far more than anything takes, so that a slow machine is no failure


def eventually(reached: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < end, "it never came to be"
        threading.Event().wait(0.01)
