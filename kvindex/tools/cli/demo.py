"""`kvindex demo`: injected faults, live repair, a prompt routed, and what a router gains."""

from __future__ import annotations

import argparse
import random
import textwrap
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from kvindex import (
    Client,
    EventBatch,
    Index,
    Rank,
    RankStatus,
    ReplayPolicy,
    SocketOptions,
    State,
    Worker,
    connect,
)
from kvindex.routing import Booking, Router
from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults, Request, Workload
from kvindex.tools.cli.arguments import option, seconds
from kvindex.tools.cli.output import Colour, painted, table, version_text
from kvindex.wire.quirks import fold_hash

_DIALECTS = {"vllm-0": "vllm-0.33.0", "sglang-0": "sglang-0.5.18"}
_FAULTS = Faults(live=LaneFaults(drop=0.03, duplicate=0.04, reorder=0.03))
_INTERVAL = 0.02  # seconds between requests: what paces the demo
_CATCH_UP = 8.0  # seconds that repair may take after the last request
_ROUTED_BLOCKS = 640  # of 16 tokens: too few for every conversation to be in every cache
_ROUTED_OPEN = 8  # requests at a time

_INTRODUCTION = """
Two fake engines with two ranks each (a rank is one copy of the model with a
KV cache of its own) publish what enters and leaves their caches, in numbered
batches. The network between them and kvindex drops, duplicates and reorders
some. A missing number is a gap: kvindex asks the engine to send the batch
again (a replay), and applies later ones after it.
"""
_NEXT_STEPS = """
Next: start `kvindex fake-engine` and connect to it with the first lines of the
README, or ask engines of your own: `kvindex match --help`."""


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--seed N", "seed for faults and requests", int, 1)
    option(parser, "--seconds S", "seconds of traffic", seconds, 5.0)


def run_demo(arguments: argparse.Namespace) -> int:
    """Show injected faults, live repair, a prompt routed, and what a router gains.

    Run two fake engines (a vLLM, an SGLang) of two DP ranks each in this process, behind links that
    drop, duplicate and reorder messages. Restart one rank, disconnect another, and show the repair.
    Then compare the index with what each engine's cache really holds, route a prompt, and compare a
    router that asks the index with round-robin. Needs no GPU and no fixed ports. Exit 0: index and
    caches are equal; 1: they differ.
    """
    print(textwrap.fill(version_text(), 80))
    print(_INTRODUCTION)
    with ExitStack() as stack:
        demo = _Demo(stack, arguments.seed)
        demo.say(f"live: {', '.join(map(str, demo.engines))}", "green")
        requests = demo.serve(arguments.seconds)
        for link in demo.links.values():
            link.quiesce()
        demo.say(f"{len(requests)} requests served; no more faults, catching up")
        good = demo.catch_up()
        good = _print_truth(demo) and good
        good = _print_route(demo, requests) and good
    _print_gain(arguments.seed)
    result = "every rank's index equals its engine's cache."
    if not good:
        result = "index and caches are NOT equal, see above."
    print(painted(f"\nResult: {result}", "green" if good else "red"))
    print(_NEXT_STEPS)
    return 0 if good else 1


class _Demo:
    """Engines, the faulty links before them, the client behind the links, and what it notices."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.engines: dict[Rank, FakeEngine] = {}
        self.links: dict[Rank, FaultyLink] = {}
        workers = []
        for name, dialect in _DIALECTS.items():
            links = []
            for dp_rank in range(2):
                engine = stack.enter_context(
                    FakeEngine(name, dp_rank=dp_rank, dialect=dialect, num_blocks=160, seed=seed)
                )
                # Each link has faults of its own, which are the same each time.
                ends = (engine.endpoint, engine.replay_endpoint)
                link = FaultyLink(*ends, faults=_FAULTS, seed=seed * 100 + len(self.links))
                links.append(stack.enter_context(link))
                self.engines[engine.rank], self.links[engine.rank] = engine, link
            replays = [link.replay_endpoint or "" for link in links]
            workers.append(Worker(name, [link.endpoint for link in links], replay=replays))
        # Impatient, so that repair is seen within the seconds of a demo.
        self.client: Client = stack.enter_context(
            connect(
                workers,
                replay_policy=ReplayPolicy(timeout=0.5, attempts=8, max_backoff=0.5),
                socket_options=SocketOptions(reconnect=0.05, max_reconnect=0.2),
                probe_interval=0.5,
            )
        )
        self.client.wait_live(timeout=5.0)
        self._seed = seed
        self._statuses = self.client.statuses()
        self._gaps: dict[Rank, RankStatus] = {}  # ranks with an open gap, as they were before it
        self._started = time.monotonic()

    def say(self, text: str, colour: Colour | None = None, *, mark: str = " ") -> None:
        """Print a line with the time since the start."""
        passed = time.monotonic() - self._started
        print(painted(f"{passed:6.2f} s {mark} {text}", colour), flush=True)

    def serve(self, duration: float) -> list[Request]:
        """Serve requests for some seconds, restart one rank and cut another off meanwhile."""
        restarted, cut = Rank("sglang-0", 1), Rank("vllm-0", 1)
        script = [
            (0.35, f"{restarted}: the engine is restarted", self.engines[restarted].restart),
            (0.60, f"{cut}: the connection is cut", self.links[cut].cut),
            (0.72, f"{cut}: the connection is back", self.links[cut].heal),
        ]
        choose = random.Random(self._seed).choice
        served: list[Request] = []
        # By number, not by time: the same faults meet the same requests on any machine.
        requests = max(1, int(duration / _INTERVAL))
        for number, request in enumerate(Workload(requests, seed=self._seed)):
            while script and number >= script[0][0] * requests:
                _, text, do = script.pop(0)
                self.say(text, "yellow", mark="!")
                do()
            choose(list(self.engines.values())).run([request])
            served.append(request)
            self._watch(_INTERVAL)
        return served

    def catch_up(self) -> bool:
        """Wait until every rank is live at its engine's last batch; return whether they are."""
        until = time.monotonic() + _CATCH_UP
        while True:
            late = {
                rank: status
                for rank, status in self.client.statuses().items()
                if status.state is not State.LIVE or status.seq != self.engines[rank].published - 1
            }
            if not late or time.monotonic() >= until:
                break
            self._watch(0.05)
        for rank, status in late.items():
            self.say(f"{rank}: {status.reason or 'live'}", "red")
        return not late

    def _watch(self, seconds: float) -> None:
        """Let some time pass, and print what the client has noticed meanwhile."""
        time.sleep(seconds)
        old, self._statuses = self._statuses, self.client.statuses()
        for rank, now in self._statuses.items():
            before = old[rank]
            if now.connected != before.connected:
                how = "connected again" if now.connected else "disconnected"
                self.say(f"{rank}: {how}", "green" if now.connected else "red")
            if now.losses > before.losses:
                self.say(f"{rank}: batches lost for good; its blocks are dropped", "red")
            if now.restarts > before.restarts:
                self._gaps.pop(rank, None)
                self.say(f"{rank}: restart noticed; its blocks are dropped", "green")
            elif now.gaps > before.gaps:
                self._gaps.setdefault(rank, before)
                self.say(f"{rank}: a gap after batch {before.seq}", "red")
            if rank in self._gaps and now.state is State.LIVE:
                asked = now.replays_asked > self._gaps.pop(rank).replays_asked
                how = "replay" if asked else "late messages"
                self.say(f"{rank}: repaired by {how}, whole through batch {now.seq}", "green")


def _print_truth(demo: _Demo) -> bool:
    """Compare each rank of the index with its engine's cache, block by block and copy by copy."""
    rows = []
    agree = True
    for rank, engine in demo.engines.items():
        # The index names hashes modulo 2**64, and group 0 where the engine names none.
        truth = {
            (fold_hash(label), medium, group or 0): copies
            for (label, medium, group), copies in engine.truth().items()
        }
        held = {
            (fold_hash(block.block_hash), block.medium, block.group_idx or 0): block.copies
            for block in demo.client.index.tree(rank).walk()
        }
        agree = agree and held == truth
        verdict = "equal" if held == truth else "DIFFERENT"
        rows.append((rank, engine.dialect.name, len(truth), len(held), verdict))
    print("\nWhat each engine's cache really holds, and what the index reports, in blocks:")
    print(table(("rank", "engine version", "cache", "index", "verdict"), rows))
    return agree


def _print_route(demo: _Demo, requests: Sequence[Request]) -> bool:
    """Route the prompt that is held longest, and ask each engine itself what it would find."""
    # The latest: the caches are too small to hold what was asked long before.
    candidates = [request.token_ids for request in requests[-40:]]
    matches = [(demo.client.match(tokens), tokens) for tokens in candidates]
    match, tokens = max(matches, key=lambda pair: pair[0].best.tokens if pair[0].best else 0)
    rows = []
    agree = match.best is not None
    for held in match:
        own = demo.engines[held.rank].lookup(tokens).tokens
        agree = agree and own == held.tokens
        best = "<- send it here" if match.best and held.rank == match.best.rank else ""
        rows.append((held.rank, held.tokens, own, held.state, best))
    print(f"\nA prompt of {len(tokens)} tokens, and how many of them each rank holds:")
    print(table(("rank", "by the index", "by its engine", "state", ""), rows))
    return agree


def _print_gain(seed: int) -> None:
    """Show what the answers are good for: less to compute, on the same requests."""
    print("\nThe same 600 requests, sent to four engines with small caches by two routers:")
    by_prefix, in_turn = (_routed(policy, seed) for policy in ("kvindex", "round-robin"))
    rows = [("by prefix and load", *by_prefix), ("round-robin", *in_turn)]
    print(table(("router", "prompt tokens", "tokens to compute"), rows))
    saved = 1 - by_prefix[1] / in_turn[1]
    print(painted(f"A router that asks kvindex leaves {saved:.0%} less to compute.", "green"))


def _routed(policy: str, seed: int) -> tuple[int, int]:
    """Serve requests on fresh engines; return their tokens, and how many were computed."""
    requests = Workload(
        600,
        seed=seed,
        system_prompts=6,
        system_tokens=384,
        turn_tokens=160,
        new_tokens=96,
        max_tokens=2_400,
    )
    names = [f"vllm-{number}" for number in range(4)]
    engines = {Rank(n): FakeEngine(n, num_blocks=_ROUTED_BLOCKS, publish=False) for n in names}
    index = Index()
    for rank in engines:
        index.add(rank)
    router = Router(index, policy=policy, seed=seed)
    prompt_tokens = computed = 0
    opened: deque[Booking] = deque()
    for request in requests:
        # Some requests stay open: without them a router has no load to go by.
        if len(opened) == _ROUTED_OPEN:
            opened.popleft().finish()
        booking = router.reserve(request.token_ids)
        opened.append(booking)
        engine = engines[booking.rank]
        (served,) = engine.run([request])
        index.apply(booking.rank, EventBatch(0.0, list(engine.events)))
        prompt_tokens += served.prompt_tokens
        computed += served.prompt_tokens - served.hit_tokens
    return prompt_tokens, computed
