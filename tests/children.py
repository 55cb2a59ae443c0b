"""Children of tests: forked ones that check something, and programs; none outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LIMIT = 120  # seconds after which a child that hangs is ended by SIGALRM
_LONGEST = 3 * _LIMIT  # seconds for a program, which does more than one thing


@contextmanager
def ended_after(program: subprocess.Popen[Any]) -> Iterator[None]:
    """End a program with the test, or long before: reading what it never says ends then, too."""
    late = threading.Timer(_LONGEST, program.kill)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
        program.kill()
        program.communicate(timeout=_LIMIT)


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
