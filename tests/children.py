"""Forked children that check something, for tests."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

__all__ = ["in_child"]

_LIMIT = 120  # seconds after which a child that hangs is ended by SIGALRM


def in_child(check: Callable[[], object]) -> int:
    """Return the exit code of a child that checks something: 0, or a signal's, negative.

    A check fails by raising, or by returning False.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LIMIT)
            code = int(check() is False)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
