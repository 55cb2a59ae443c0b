"""Interrupts at any moment of a call: Python raises them at calls, and where functions return."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(
    call: Callable[[], object], moment: int, counts: Callable[[FrameType, str], bool]
) -> bool:
    """Make a call, and interrupt it when so many of its events counted; whether it got there."""
    left = moment

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if counts(frame, event):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    # A collection would call functions of others (hypothesis notes its time), and interrupt those;
    # what is raised in a finalizer is not seen.
    gc.disable()
    sys.setprofile(count)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return left <= 0
