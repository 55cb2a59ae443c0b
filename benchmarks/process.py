"""Processes of the harness: a side that serves tasks, and what they cost the machine."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Lines:
    """A process that is spoken to in lines of JSON."""

    def __init__(self, command: list[str], *, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next line's value.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        value: dict[str, Any] = json.loads(line)
        return value

    def close(self) -> None:
        """End the process by ending its input; idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


class Side:
    """One side of a comparison, in a process of its own.

    Args:
        name: which one; see the `create` of the package that serves it.
        python: the interpreter of its virtual environment.
        cpus: the cores that it may use; all by default.
        package: what serves it.
        environment: variables that are added to this process's.
    """

    def __init__(
        self,
        name: str,
        python: str,
        *,
        cpus: Iterable[int] | None = None,
        package: str = "benchmarks.sides",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        where = [] if cpus is None else [",".join(map(str, cpus))]
        self._lines = Lines(
            [python, "-m", package, name, *where],
            environment={"DYN_LOG": "error", **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._lines.pid

    def call(self, method: str, **arguments: Any) -> Any:
        """Return what a task's method returns.

        Raises:
            RuntimeError: it failed; the message is its traceback.
        """
        self._lines.say(json.dumps({"call": method, "args": arguments}))
        reply = self._lines.hear()
        if "error" in reply:
            raise RuntimeError(f"{self.name}: {method} failed\n{reply['error']}")
        return reply["value"]

    def close(self) -> None:
        """End the process; idempotent."""
        self._lines.close()


def pinned(command: list[str], cpus: Iterable[int] | None) -> list[str]:
    """Return a command that runs on these cores only."""
    return command if cpus is None else ["taskset", "-c", ",".join(map(str, cpus)), *command]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used, all its threads, also those that ended."""
    # The kernel's own clock of another process: clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)


def allow_descriptors() -> None:
    """Let this process, and those it starts from now on, open as many files as the system allows.

    A subscriber of 512 ranks needs more than the usual 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
