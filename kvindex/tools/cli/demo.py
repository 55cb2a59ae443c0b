"""`kvindex demo`: injected faults, live repair, a prompt routed, and what a router gains.

Run two fake engines (a vLLM, an SGLang) of two DP ranks each in this process, behind links that
drop, duplicate and reorder messages. Restart one rank, disconnect another, and show the repair.
Then compare the index with what each engine's cache really holds, route a prompt, and compare a
router that asks the index with round-robin. Needs no GPU and no fixed ports. Exit 0: index and
caches are equal; 1: they differ.
"""

from __future__ import annotations

import argparse
import random
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
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
from kvindex.wire import BlockHash
from kvindex.wire.quirks import fold_hash

_DIALECTS = {"vllm-0": "vllm-0.33.0", "sglang-0": "sglang-0.5.18"}
_DP_SIZE = 2
_FAULTS = Faults(live=LaneFaults(drop=0.03, duplicate=0.04, reorder=0.03))
_INTERVAL = 0.02  # seconds between requests: what paces the demo
_CATCH_UP = 8.0  # seconds that repair may take after the last request
_ROUTED_ENGINES = 4
_ROUTED_BLOCKS = 640  # of 16 tokens: too few for every conversation to be in every cache
_ROUTED_OPEN = 8  # requests at a time

_INTRODUCTION = """
Two fake engines with two ranks each (a rank is one copy of the model with a
KV cache of its own) publish what enters and leaves their caches, in numbered
batches. The network between them and kvindex drops, duplicates and reorders
some. A missing number is a gap: kvindex asks the engine to send the batch
again (a replay), and applies later ones after it.
"""
_DIFFERENCES = """\
These numbers need not agree: neighbouring batches that are dropped make one
gap, a reordered batch may make one until it arrives, a late batch that was
replayed already is a duplicate, and a reconnect asks for a replay too.
"""
_NEXT_STEPS = """\

Next: start `kvindex fake-engine` and connect to it with the first lines of the
README, or ask engines of your own: `kvindex match --help`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare this command's options."""
    option(parser, "--seed N", "seed for faults and requests", int, 1)
    option(parser, "--seconds S", "seconds of traffic", seconds, 5.0)


def run(arguments: argparse.Namespace) -> int:
    """Show the demo; return whether index and engines agree."""
    print(textwrap.fill(version_text(), 80))
    print(_INTRODUCTION)
    with ExitStack() as stack:
        fleet = _Fleet(stack, arguments.seed)
        narrator = _Narrator(fleet.client)
        narrator.report(f"live: {', '.join(map(str, fleet.engines))}", "green")
        requests = _traffic(fleet, narrator, arguments)
        for link in fleet.links.values():
            link.quiesce()
        narrator.report(f"{len(requests)} requests served; no more faults, catching up")
        good = fleet.wait_until_applied(narrator)
        _print_counts(fleet)
        good = _print_truth(fleet) and good
        good = _print_route(fleet, requests) and good
    _print_gain(arguments.seed)
    if good:
        print(painted("\nResult: every rank's index equals its engine's cache.", "green"))
    else:
        print(painted("\nResult: index and caches are NOT equal, see above.", "red"))
    print(_NEXT_STEPS)
    return 0 if good else 1


class _Narrator:
    """Prints a line for each gap, repair, loss, restart and disconnection of a client's ranks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._started = time.monotonic()
        self._statuses = client.statuses()
        self._gaps: dict[Rank, RankStatus] = {}  # ranks with an open gap, as they were before it

    def report(self, text: str, colour: Colour | None = None, *, mark: str = " ") -> None:
        """Print a line with the time since the start."""
        passed = time.monotonic() - self._started
        print(painted(f"{passed:6.2f} s {mark} {text}", colour), flush=True)

    def watch(self, seconds: float) -> None:
        """Let some time pass, and print what has changed."""
        time.sleep(seconds)
        before, self._statuses = self._statuses, self._client.statuses()
        for rank, now in self._statuses.items():
            self._compare(rank, before[rank], now)

    def _compare(self, rank: Rank, before: RankStatus, now: RankStatus) -> None:
        if before.connected and not now.connected:
            self.report(f"{rank}: disconnected; its answers are flagged {now.state!s}", "red")
        if now.connected and not before.connected:
            self.report(f"{rank}: connected again; replay shows what was missed", "green")
        if now.losses > before.losses:
            self.report(f"{rank}: batches lost for good; its blocks are dropped", "red")
        if now.restarts > before.restarts:
            self._gaps.pop(rank, None)
            self.report(f"{rank}: restart noticed; its blocks are dropped", "green")
        elif now.gaps > before.gaps:
            self._gaps.setdefault(rank, before)
            self.report(f"{rank}: a gap after batch {before.seq}", "red")
        if rank in self._gaps and now.state is State.LIVE:
            asked = now.replays_asked > self._gaps.pop(rank).replays_asked
            how = "by replay" if asked else "by late messages"
            self.report(f"{rank}: repaired {how}, whole through batch {now.seq}", "green")


class _Fleet:
    """The engines and the faulty links before them, by rank, and the client behind the links."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.engines: dict[Rank, FakeEngine] = {}
        self.links: dict[Rank, FaultyLink] = {}
        workers = []
        for name, dialect in _DIALECTS.items():
            links = []
            for dp_rank in range(_DP_SIZE):
                engine = stack.enter_context(
                    FakeEngine(name, dp_rank=dp_rank, dialect=dialect, num_blocks=160, seed=seed)
                )
                link = FaultyLink(
                    engine.endpoint,
                    engine.replay_endpoint,
                    faults=_FAULTS,
                    seed=seed * 100 + len(self.links),
                )
                links.append(stack.enter_context(link))
                self.engines[engine.rank], self.links[engine.rank] = engine, link
            replays = [link.replay_endpoint or "" for link in links]
            workers.append(Worker(name, [link.endpoint for link in links], replay=replays))
        self.client = stack.enter_context(
            connect(
                workers,
                replay_policy=ReplayPolicy(timeout=0.5, attempts=8, max_backoff=0.5),
                socket_options=SocketOptions(reconnect=0.05, max_reconnect=0.2),
                probe_interval=0.5,
            )
        )
        self.client.wait_live(timeout=5.0)

    def wait_until_applied(self, narrator: _Narrator) -> bool:
        """Wait until every rank is live at its engine's last batch; return whether they are."""
        until = time.monotonic() + _CATCH_UP
        while late := self._late():
            if time.monotonic() >= until:
                for rank, status in late.items():
                    narrator.report(f"{rank}: {status.reason or 'live'}", "red")
                return False
            narrator.watch(0.05)
        return True

    def _late(self) -> dict[Rank, RankStatus]:
        return {
            rank: status
            for rank, status in self.client.statuses().items()
            if status.state is not State.LIVE or status.seq != self.engines[rank].published - 1
        }


def _traffic(fleet: _Fleet, narrator: _Narrator, arguments: argparse.Namespace) -> list[Request]:
    """Serve requests for some seconds, restart one rank and cut another off meanwhile."""
    restarted, cut = Rank("sglang-0", 1), Rank("vllm-0", 1)
    duration = arguments.seconds
    script = [
        (0.35, f"{restarted}: the engine is restarted", fleet.engines[restarted].restart),
        (0.60, f"{cut}: the connection is cut", fleet.links[cut].cut),
        (0.72, f"{cut}: the connection is back", fleet.links[cut].heal),
    ]
    choose = random.Random(arguments.seed)
    ranks = list(fleet.engines)
    served: list[Request] = []
    started = time.monotonic()
    for request in Workload(int(duration / _INTERVAL) + 1, seed=arguments.seed):
        passed = time.monotonic() - started
        if passed >= duration:
            break
        if script and passed >= script[0][0] * duration:
            _, text, do = script.pop(0)
            narrator.report(text, "yellow", mark="!")
            do()
        fleet.engines[choose.choice(ranks)].run([request])
        served.append(request)
        narrator.watch(_INTERVAL)
    for _, text, do in script:  # a machine too slow to reach them in time
        narrator.report(text, "yellow", mark="!")
        do()
    return served


def _print_truth(fleet: _Fleet) -> bool:
    """Compare each rank of the index with its engine's cache, block by block and copy by copy."""
    rows = []
    agree = True
    for rank, engine in fleet.engines.items():
        truth = {_plain_key(*key): copies for key, copies in engine.truth().items()}
        held = {
            _plain_key(block.block_hash, block.medium, block.group_idx): block.copies
            for block in fleet.client.index.tree(rank).walk()
        }
        agree = agree and held == truth
        verdict = "equal" if held == truth else "DIFFERENT"
        rows.append((rank, engine.dialect.name, len(truth), len(held), verdict))
    print("What each engine's cache really holds, and what the index reports, in blocks:")
    shown = table(("rank", "engine version", "cache", "index", "verdict"), rows)
    print(_with_colours(shown, {"equal": "green", "DIFFERENT": "red"}))
    return agree


def _plain_key(
    block_hash: BlockHash, medium: str, group_idx: int | None
) -> tuple[BlockHash, str, int]:
    """The index names hashes modulo 2**64, and group 0 where the engine names none."""
    return fold_hash(block_hash), medium, group_idx or 0


def _print_route(fleet: _Fleet, requests: Sequence[Request]) -> bool:
    """Route the prompt that is held longest, and ask each engine itself what it would find."""
    candidates = [request.token_ids for request in requests[-40:]]
    matches = [(fleet.client.match(tokens), tokens) for tokens in candidates]
    match, tokens = max(matches, key=lambda pair: pair[0].best.tokens if pair[0].best else 0)
    rows = []
    agree = match.best is not None
    for held in match:
        own = fleet.engines[held.rank].lookup(tokens).tokens
        agree = agree and own == held.tokens
        best = "<- send it here" if match.best and held.rank == match.best.rank else ""
        rows.append((held.rank, held.tokens, own, held.state, best))
    print(f"\nA prompt of {len(tokens)} tokens, and how many of them each rank holds:")
    shown = table(("rank", "by the index", "by its engine", "state", ""), rows)
    print(_with_colours(shown, {"<- send it here": "bold"}))
    return agree


def _print_counts(fleet: _Fleet) -> None:
    injected = [link.statistics() for link in fleet.links.values()]
    dropped, doubled, reordered = (
        sum(link.get(f"live.{what}", 0) for link in injected)
        for what in ("dropped", "duplicated", "reordered")
    )
    seen = fleet.client.statuses().values()
    print(
        f"\nInjected: batches dropped {dropped}, duplicated {doubled}, reordered {reordered}; "
        "1 restart, 1 cut."
        f"\nNoticed:  gaps {sum(s.gaps for s in seen)}, "
        f"duplicates {sum(s.duplicates for s in seen)}, "
        f"restarts {sum(s.restarts for s in seen)}, losses {sum(s.losses for s in seen)}; "
        f"replays asked {sum(s.replays_asked for s in seen)}."
    )
    print(_DIFFERENCES)


def _print_gain(seed: int) -> None:
    """Show what the answers are good for: less to compute, on the same requests."""
    requests = Workload(
        600,
        seed=seed,
        system_prompts=6,
        system_tokens=384,
        turn_tokens=160,
        new_tokens=96,
        max_tokens=2_400,
    )
    policies = {"by prefix and load": "kvindex", "round-robin": "round-robin"}
    outcomes = {name: _routed(requests, policy, seed) for name, policy in policies.items()}
    rows = [
        (name, f"{hit_rate:.1%}", f"{computed:,}", f"{busiest:,}")
        for name, (hit_rate, computed, busiest) in outcomes.items()
    ]
    print("\nThe same 600 requests, sent to four engines with small caches by two routers:")
    shown = table(("router", "cached", "tokens to compute", "busiest engine"), rows)
    print(_with_colours(shown, {"by prefix and load": "bold"}))
    (_, by_prefix, _), (_, in_turn, _) = outcomes.values()
    saved = 1 - by_prefix / in_turn
    print(painted(f"A router that asks kvindex leaves {saved:.0%} less to compute.", "green"))


def _routed(requests: Workload, policy: str, seed: int) -> tuple[float, int, int]:
    """Serve requests as a router of this policy sends them, on fresh engines.

    Returns the share of prompt tokens that were cached where they were sent, how many were
    computed, and how many of these by the busiest engine.
    """
    ranks = [Rank(f"vllm-{number}") for number in range(_ROUTED_ENGINES)]
    engines = {r: FakeEngine(r.worker, num_blocks=_ROUTED_BLOCKS, publish=False) for r in ranks}
    index = Index()
    for rank in ranks:
        index.add(rank)
    router = Router(index, policy=policy, seed=seed)
    prompt_tokens = 0
    computed = dict.fromkeys(ranks, 0)
    opened: deque[Booking] = deque()
    for request in requests:
        if len(opened) == _ROUTED_OPEN:
            opened.popleft().finish()
        booking = router.reserve(request.token_ids)
        opened.append(booking)
        engine = engines[booking.rank]
        (served,) = engine.run([request])
        index.apply(booking.rank, EventBatch(0.0, list(engine.events)))
        prompt_tokens += served.prompt_tokens
        computed[booking.rank] += served.prompt_tokens - served.hit_tokens
    total = sum(computed.values())
    return 1 - total / prompt_tokens, total, max(computed.values())


def _with_colours(text: str, colours: Mapping[str, Colour]) -> str:
    for word, colour in colours.items():
        text = text.replace(word, painted(word, colour))
    return text
