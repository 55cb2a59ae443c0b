"""`kvindex fake-engine`: an engine without a model, to try kvindex and routers on."""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

from kvindex.testing import FakeEngine, HttpEngine, Request, Served, Workload
from kvindex.tools.cli.arguments import Commands, count, seconds
from kvindex.wire import LATEST

__all__ = ["add_parser"]

_PROMPT = range(100)  # the prompt of README's first example
_PROMPT_EVERY = 10  # requests: often enough to stay in a cache that evicts what is old
_WORKLOAD = 1_000  # requests until the workload starts again


def add_parser(commands: Commands, text: str) -> None:
    """Add this command to the command line, with `text` in the list of commands."""
    parser = commands.add_parser(
        "fake-engine",
        help=text,
        description=(
            "Run an engine without a model: a real prefix cache that serves random requests and "
            "publishes every change as an engine does, with replay. DP rank r listens at port + r "
            "on both endpoints. One request in ten is the prompt 0, 1, ... 99 (on rank r only its "
            "first 100 / (r + 1) tokens), so that there is something to match. With --rate 0 it "
            "serves only what you send over HTTP. Runs until Ctrl-C, "
            "SIGTERM or --seconds, its normal ends (exit 0). Exit 2: an endpoint cannot be used."
        ),
    )
    parser.add_argument(
        "--endpoint",
        default="tcp://127.0.0.1:5557",
        help="where rank 0 publishes (default: %(default)s)",
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="ENDPOINT",
        default="tcp://127.0.0.1:5657",
        help="where rank 0 answers replay requests (default: %(default)s)",
    )
    parser.add_argument(
        "--name", default="vllm-0", help="name in what is printed (default: %(default)s)"
    )
    parser.add_argument(
        "--dp-size", type=count, default=2, metavar="N", help="number of DP ranks (default: 2)"
    )
    parser.add_argument(
        "--block-size", type=count, default=16, metavar="N", help="tokens per block (default: 16)"
    )
    parser.add_argument(
        "--blocks",
        type=count,
        default=1_000,
        metavar="N",
        help="blocks in each rank's cache (default: 1000)",
    )
    parser.add_argument(
        "--dialect",
        default=LATEST.name,
        metavar="NAME",
        help="engine version whose events to publish (default: %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default=5.0,
        metavar="N",
        help="requests per second, over all ranks (default: 5); 0: only those that come over HTTP",
    )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed for the requests (default: 1)"
    )
    parser.add_argument(
        "--http",
        type=_port,
        metavar="PORT",
        help="also answer completions over HTTP at this port of 127.0.0.1, as the engine of the "
        "dialect would; 0 has the system choose",
    )
    parser.add_argument(
        "--model",
        default="fake-model",
        metavar="NAME",
        help="model that is served over HTTP; engines with one name serve one (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--seconds", type=seconds, metavar="S", help="end after S seconds (default: never)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve requests until the time is over, or Ctrl-C."""
    with ExitStack() as stack:
        ending = stack.enter_context(_Ending())
        engines = [stack.enter_context(_engine(arguments, r)) for r in range(arguments.dp_size)]
        traffic = _Traffic(engines, arguments.seed)
        if arguments.rate:
            traffic.begin()
        try:
            for engine in engines:
                print(
                    f"{engine.rank}: events at {engine.endpoint}, replay at "
                    f"{engine.replay_endpoint}"
                )
            if arguments.http is not None:
                server = HttpEngine(engines, model=arguments.model, port=arguments.http)
                print(f"HTTP at {stack.enter_context(server).url}")
            rate = f"about {arguments.rate:g}" if arguments.rate else "no"
            print(f"{rate} requests per second of its own; Ctrl-C ends it", flush=True)
            _serve(traffic, ending, arguments)
        except KeyboardInterrupt:
            pass  # the normal end of an engine
        print(traffic.summary())
    return 0


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests per second, from 0")
    return value


def _port(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return number


def _engine(arguments: argparse.Namespace, dp_rank: int) -> FakeEngine:
    return FakeEngine(
        arguments.name,
        dp_rank=dp_rank,
        block_size=arguments.block_size,
        num_blocks=arguments.blocks,
        seed=arguments.seed,
        dialect=arguments.dialect,
        endpoint=arguments.endpoint,
        replay_endpoint=arguments.replay_endpoint,
    )


def _serve(traffic: _Traffic, ending: _Ending, arguments: argparse.Namespace) -> None:
    """Serve at the rate asked for; say once a second what has been done."""
    started = told = time.monotonic()
    until = started + (arguments.seconds or math.inf)
    due, said = started if arguments.rate else math.inf, ""
    while not ending.asked and (now := time.monotonic()) < until:
        if now >= told + 1.0:
            told = now
            summary = traffic.summary()
            if summary != said:
                print(summary, flush=True)
            said = summary
        if now >= due:
            traffic.serve_next()
            due += 1 / arguments.rate
        else:
            ending.wait(min(due, until, told + 1.0) - now)


class _Traffic:
    """Random requests, given to the ranks in turn, with the known prompt now and then."""

    def __init__(self, engines: Sequence[FakeEngine], seed: int) -> None:
        self._engines = engines
        self._requests = _endless(seed)
        self._served = self._tokens = self._hit = 0

    def begin(self) -> None:
        """Serve the known prompt on each rank at once, so that later subscribers find it."""
        for engine in self._engines:
            self._serve_prompt(engine)

    def serve_next(self) -> None:
        """Serve one request on the rank whose turn it is."""
        turn, number = divmod(self._served, len(self._engines))
        engine = self._engines[number]
        if turn % _PROMPT_EVERY == 0:
            self._serve_prompt(engine)
        else:
            request = next(self._requests)
            self._count(engine.serve(request.token_ids, new_tokens=request.new_tokens))

    def summary(self) -> str:
        """Return how much was served, and what the caches hold."""
        held = f"blocks held: {', '.join(str(len(engine.truth())) for engine in self._engines)}"
        if not self._served:
            return held
        cached = f"{self._hit / self._tokens:.0%} of their tokens cached"
        return f"{self._served} requests, {cached}; {held}"

    def _serve_prompt(self, engine: FakeEngine) -> None:
        self._count(engine.serve(_PROMPT[: len(_PROMPT) // (engine.rank.dp_rank + 1)]))

    def _count(self, served: Served) -> None:
        self._served += 1
        self._tokens += served.prompt_tokens
        self._hit += served.hit_tokens


def _endless(seed: int) -> Iterator[Request]:
    for round_seed in itertools.count(seed):
        yield from Workload(_WORKLOAD, seed=round_seed)


class _Ending:
    """Has Ctrl-C and SIGTERM end the command between two requests, and cut only its waiting short.

    In the middle of a request they would leave an engine whose cache is half changed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False
        self._before: dict[int, Any] = {}

    def wait(self, seconds: float) -> None:
        """Sleep; raises KeyboardInterrupt when a signal comes."""
        self._waiting = True
        try:
            if not self.asked:
                time.sleep(seconds)
        finally:
            self._waiting = False

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._waiting:
            raise KeyboardInterrupt

    def __enter__(self) -> _Ending:
        if threading.current_thread() is threading.main_thread():  # only that one can
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._ask)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
