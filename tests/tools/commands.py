"""What tests of commands share: a command in this process or in its own, and engines for it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any, NamedTuple

from kvindex.testing import FakeEngine, FaultyLink, HttpEngine
from tests.children import ENVIRONMENT, Program
from tests.live import PATIENCE

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


@contextmanager
def http_engines(*workers: str, ranks: int = 1) -> Iterator[list[HttpEngine]]:
    """Run engines of these names that answer over HTTP, each with so many DP ranks."""
    with ExitStack() as opened:
        engines = []
        for worker in workers:
            own = [opened.enter_context(FakeEngine(worker, dp_rank=rank)) for rank in range(ranks)]
            engines.append(opened.enter_context(HttpEngine(own)))
        # Each can pull from all others: their P2P tiers are named as by `--kv-source vllm:+1000`.
        tiers = {
            f"127.0.0.1:{int(engine.url.rpartition(':')[2]) + 1000 + rank}": own
            for engine in engines
            for rank, own in engine._routes.ranks.items()
        }
        for engine in engines:
            engine.peers.update(tiers)
        yield engines


def started(*argv: str, code: Sequence[str] = ("-m", "kvindex")) -> Running:
    """Run a command as a process of its own, ended by the test's end."""
    return Running(*code, *argv, stdin=subprocess.DEVNULL)


class Running(Program):
    """A command that runs in a process of its own."""

    def __init__(self, *command: str, **options: Any) -> None:
        super().__init__(*command, **options)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out: IO[str] = self.process.stdout
        self.err: IO[str] = self.process.stderr

    def end(self, number: signal.Signals = signal.SIGINT, code: int = 0) -> Ran:
        """End the command by a signal, Ctrl-C by default."""
        self.process.send_signal(number)
        out, err = self.finish()
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
