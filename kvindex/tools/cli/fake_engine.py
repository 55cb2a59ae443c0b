"""`kvindex fake-engine`: an engine without a model, to try kvindex and routers on."""

from __future__ import annotations

import argparse
import itertools
import math
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack

from kvindex.testing import FakeEngine, HttpEngine, HttpOptions, Request, Workload
from kvindex.tools.cli.arguments import count, option, port, rate, seconds
from kvindex.tools.cli.signals import handled
from kvindex.wire import LATEST

_PROMPT = tuple(range(100))  # the prompt of README's first example
_PROMPT_EVERY = 10  # requests: often enough to stay in a cache that evicts what is old
_WORKLOAD = 1_000  # requests until the workload starts again


def add_fake_engine_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--endpoint ENDPOINT", "where rank 0 publishes", str, "tcp://127.0.0.1:5557")
    text = "where rank 0 answers replay requests"
    option(parser, "--replay-endpoint ENDPOINT", text, str, "tcp://127.0.0.1:5657")
    option(parser, "--name NAME", "name in what is printed", str, "vllm-0")
    option(parser, "--dp-size N", "number of DP ranks", count, 2)
    option(parser, "--block-size N", "tokens per block", count, 16)
    option(parser, "--blocks N", "blocks in each rank's cache", count, 1000)
    option(parser, "--dialect NAME", "engine version whose events to publish", str, LATEST.name)
    text = "requests per second, over all ranks; 0: only those that arrive over HTTP"
    option(parser, "--rate N", text, rate, 5.0)
    option(parser, "--seed N", "seed for the requests", int, 1)
    text = (
        "also answer completions over HTTP at this port of 127.0.0.1, as the engine of the dialect "
        "would; 0 has the system choose"
    )
    option(parser, "--http PORT", text, port)
    text = "model that is served over HTTP; engines with one name serve one"
    option(parser, "--model NAME", text, str, "fake-model")
    text = "over HTTP, play a side of prefill and decode apart (SGLang's says so alone)"
    option(parser, "--role ROLE", text, ("prefill", "decode"))
    option(parser, "--seconds S", "end after S seconds (default: never)", seconds)


def run_fake_engine(arguments: argparse.Namespace) -> int:
    """Run an engine without a model, to try kvindex and routers on.

    Run an engine without a model: a real prefix cache that serves random requests and publishes
    every change as an engine does, with replay. DP rank r listens at port + r on both endpoints.
    One request in ten is the prompt 0, 1, ... 99 (on rank r only its first 100 / (r + 1) tokens),
    so that there is something to match. With --rate 0 it serves only what you send over HTTP. Runs
    until Ctrl-C, SIGTERM or --seconds, its normal ends (exit 0). Exit 2: an endpoint cannot be
    used.

    Over HTTP, as vLLM, it refuses a body without `content-type: application/json` (400). A byte is
    a token. The answer is letters that mean nothing. It accepts tools, tool_calls and logprobs, and
    ignores them: they change no token, no answer calls a tool, and logprobs are null.
    """
    ending = _Ending()
    signals = dict.fromkeys((signal.SIGINT, signal.SIGTERM), ending.ask)
    with ExitStack() as stack:
        stack.enter_context(handled(signals))
        engines = [
            stack.enter_context(
                FakeEngine(
                    arguments.name,
                    dp_rank=dp_rank,
                    block_size=arguments.block_size,
                    num_blocks=arguments.blocks,
                    seed=arguments.seed,
                    dialect=arguments.dialect,
                    endpoint=arguments.endpoint,
                    replay_endpoint=arguments.replay_endpoint,
                )
            )
            for dp_rank in range(arguments.dp_size)
        ]
        traffic = _Traffic(engines, arguments.seed)
        # Before anybody subscribes: it is in the replay buffer then.
        for _ in engines if arguments.rate else ():
            traffic.serve_next()  # the known prompt: later subscribers find it
        try:
            for engine in engines:
                print(
                    f"{engine.rank}: events at {engine.endpoint}, replay at "
                    f"{engine.replay_endpoint}"
                )
            if arguments.http is not None:
                options = HttpOptions(role=arguments.role or "null")
                server = HttpEngine(
                    engines, model=arguments.model, port=arguments.http, options=options
                )
                print(f"HTTP at {stack.enter_context(server).url}")
            number = f"about {arguments.rate:g}" if arguments.rate else "no"
            print(f"{number} requests per second of its own; Ctrl-C ends it", flush=True)
            _serve(traffic, ending, arguments)
        except KeyboardInterrupt:
            pass  # the normal end of an engine
        print(traffic.summary())
    return 0


def _serve(traffic: _Traffic, ending: _Ending, arguments: argparse.Namespace) -> None:
    """Serve at the rate asked for; print once a second what has been served."""
    started = printed_at = time.monotonic()
    until = started + (arguments.seconds or math.inf)
    due, printed = started if arguments.rate else math.inf, ""
    while not ending.asked and (now := time.monotonic()) < until:
        if now >= printed_at + 1.0:
            printed_at = now
            if (summary := traffic.summary()) != printed:
                print(summary, flush=True)
            printed = summary
        if now >= due:
            traffic.serve_next()
            # From the last time that was due, not from now: the rate holds on a slow machine, too.
            due += 1 / arguments.rate
        else:
            ending.wait(min(due, until, printed_at + 1.0) - now)


class _Traffic:
    """Random requests, given to the ranks in turn, with the known prompt now and then."""

    def __init__(self, engines: Sequence[FakeEngine], seed: int) -> None:
        self._engines = engines
        self._requests = (
            request
            # Another seed each round: the same prompts once more would all be in the caches.
            for round_seed in itertools.count(seed)
            for request in Workload(_WORKLOAD, seed=round_seed)
        )
        self._served = self._tokens = self._hit = 0

    def serve_next(self) -> None:
        """Serve one request on the rank whose turn it is; the first of each is the known prompt."""
        turn, number = divmod(self._served, len(self._engines))
        engine = self._engines[number]
        if turn % _PROMPT_EVERY == 0:
            request = Request(token_ids=_PROMPT[: len(_PROMPT) // (engine.rank.dp_rank + 1)])
        else:
            request = next(self._requests)
        (served,) = engine.run([request])
        self._served += 1
        self._tokens += served.prompt_tokens
        self._hit += served.hit_tokens

    def summary(self) -> str:
        """Return how much was served, and what the caches hold."""
        held = f"blocks held: {', '.join(str(len(engine.truth())) for engine in self._engines)}"
        if not self._served:
            return held
        cached = f"{self._hit / self._tokens:.0%} of their tokens cached"
        return f"{self._served} requests, {cached}; {held}"


class _Ending:
    """Ends the command between two requests: a signal interrupts nothing but its waiting."""

    # In the middle of a request it would leave an engine whose cache is half changed.

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def wait(self, seconds: float) -> None:
        """Sleep; raises KeyboardInterrupt at a signal."""
        self._waiting = True
        try:
            if not self.asked:
                time.sleep(seconds)
        finally:
            self._waiting = False

    def ask(self, _: int) -> None:
        """Handle a signal."""
        self.asked = True
        if self._waiting:
            raise KeyboardInterrupt
