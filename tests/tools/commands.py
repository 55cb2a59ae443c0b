"""What tests of commands share: a command in this process or in its own, and engines for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvindex.testing import FakeEngine, FaultyLink
from tests.children import ended_after
from tests.live import PATIENCE

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
PROMPT = list(range(100))
NOBODY = ("--worker", "a=tcp://127.0.0.1:1")


class Ran(NamedTuple):
    """What a command printed that has ended."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]
"""The fixture `run`: runs a command, which must exit with `code`, 0 by default."""


def at(source: FakeEngine | FaultyLink, name: str = "vllm-0") -> tuple[str, str]:
    """Name an engine, or the link before it, to a command."""
    return "--worker", f"{name}={source.endpoint},replay={source.replay_endpoint}"


@contextlib.contextmanager
def started(*argv: str, code: Sequence[str] = ("-m", "kvindex")) -> Iterator[Running]:
    """Run a command as a process of its own, ended by the test's end."""
    process = subprocess.Popen(
        [sys.executable, *code, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    with ended_after(process):
        yield Running(process)


class Running:
    """A command that runs in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.out: IO[str] = process.stdout
        self.err: IO[str] = process.stderr

    def end(self, number: signal.Signals = signal.SIGINT, code: int = 0) -> Ran:
        """End the command by a signal, Ctrl-C by default."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE)
        assert "Traceback" not in err
        assert self.process.returncode == code, err
        return Ran(out, err)


def output_of(*argv: str, stdin: str = "") -> str:
    """Return what a command prints as a process of its own, which must exit with 0."""
    return subprocess.run(
        [sys.executable, "-m", "kvindex", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=ENVIRONMENT,
        check=True,
    ).stdout
