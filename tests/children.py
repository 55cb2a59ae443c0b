"""Children of tests: programs, and forked ones that check something; none outlives its test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
_Program = TypeVar("_Program", bound="Program")
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


class Program:
    """A program of a test with pipes of text; killed with the test, or long before if it hangs."""

    def __init__(self, *command: str, **options: Any) -> None:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options = {"text": True, "env": ENVIRONMENT, **pipes, **options}
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, *command], **options
        )
        self._ending = ended_after(self.process)
        self._ending.__enter__()

    def line(self) -> str:
        """The next line that it prints; "" if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, line: str = "") -> None:
        print(line, file=self.process.stdin, flush=True)

    def stop(self) -> None:
        """Let it stand still, with its connections open; it does when this returns."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def finish(self, text: str | None = None) -> tuple[str, str]:
        """Send a last text and wait for its end; what it printed, and its errors."""
        return self.process.communicate(text, timeout=_LIMIT)

    def kill(self) -> None:
        """End it without any warning, even if it is stopped. Idempotent."""
        self._ending.__exit__(None, None, None)

    def __enter__(self: _Program) -> _Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def run_code(code: str, *argv: str, **options: Any) -> tuple[int, str, str]:
    """Run Python code as a program; return its exit code, what it printed, and its errors."""
    with Program("-W", "error", "-c", code, *argv, **options) as program:
        out, errors = program.finish()
    return program.process.returncode, out, errors


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
