"""An examination from beginning to end: all targets at once, each step within its time."""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import zmq

from kvindex import Client, Rank, RankStatus, ReplayPolicy, State, connect
from kvindex.tools.doctor.case import (
    Case,
    Diagnosis,
    Examined,
    Limits,
    Shared,
    Target,
    ordered,
    rank_of,
)
from kvindex.tools.doctor.claims import (
    accept_mapped,
    ask_and_check,
    check_rank,
    check_replayed,
    check_shape,
)
from kvindex.tools.doctor.listener import Listener
from kvindex.tools.doctor.prompts import UserPrompt, check_prompt, probe_engine
from kvindex.tools.doctor.streams import (
    check_hashes,
    check_prefixes,
    check_received,
    check_serving,
    check_streams,
    filtered,
    prompt_tokens,
)
from kvindex.wire.errors import ConfigurationError

_QUESTIONS: Final = 64  # under way
_LOOK_EVERY: Final = 0.2  # seconds between two looks whether a replay gets on
_MAX_TARGETS: Final = 1024


def examine(
    targets: Iterable[Target],
    *,
    passive: bool = False,
    prompt: UserPrompt | None = None,
    token: str = "",
    tls: ssl.SSLContext | None = None,
    model: str = "",
    block_size: int | None = None,
    limits: Limits | None = None,
) -> Diagnosis:
    """Look for reasons why hits are missing, and return what was found.

    All targets are examined at once. Engines with a URL are sent one test prompt, twice, unless
    `passive`; nothing else changes their state.

    Args:
        targets: engines, by URL, by endpoints, or by both.
        passive: send no prompt.
        prompt: a prompt to look for besides.
        token: the engines' API key.
        tls: for https; by default certificates are checked as the system does.
        model: the model to ask for; by default each engine's first.
        block_size: the block size that your router goes by, to be compared.
        limits: how long to wait.

    Raises:
        ConfigurationError: there are no targets, or too many, or one cannot be used as given.

    Thread safety: any thread. It blocks for seconds; its threads end with it.

    Examples:
        >>> from kvindex.testing import FakeEngine, HttpEngine
        >>> with FakeEngine() as engine, HttpEngine(engine) as server:
        ...     report = examine([Target(url=server.url)])
        >>> report.exit_code, [finding.id for finding in report.findings]
        (0, ['all-well'])
    """
    started = time.monotonic()
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="kvindex-doctor")
        stack.callback(pool.shutdown, cancel_futures=True)
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.term)
        shared = Shared(
            limits=limits or Limits(),
            passive=passive,
            token=token,
            tls=tls,
            model=model,
            block_size=block_size,
            # Not by `random`'s own generator, which a program may seed: each of its runs would send
            # the same prompt, which is cached by now.
            seed=random.SystemRandom().getrandbits(64),
            context=context,
        )
        cases = [Case(target, shared) for target in targets]
        if not 1 <= len(cases) <= _MAX_TARGETS:
            count = len(cases)
            raise ConfigurationError(f"targets: 1 to {_MAX_TARGETS} can be examined, not {count}")
        for case in cases:
            if not case.target.url and case.target.worker is None:
                raise ConfigurationError("a target needs a URL or endpoints")
        # Ports before subscriptions: what is wrong with one explains what a stream lacks.
        _at_once(pool, ask_and_check, [case for case in cases if case.target.url])
        for case in cases:
            check_shape(case)
        _name_apart(cases)
        addresses = [(case, address) for case in cases for address in case.addresses]
        _at_once(pool, check_rank, *zip(*addresses, strict=True))
        # Before the client, so that the listener hears all of the test prompt.
        for case in cases:
            _listen_to(case, stack)
        # One client of all engines that can be reached.
        workers = [case.worker for case in cases if case.worker is not None]
        client: Client | None = None
        before: Mapping[Rank, int | None] = {}
        if workers:
            wait = shared.limits.live
            policy = ReplayPolicy(timeout=wait, attempts=3)
            # While events are listened for: what does not arrive live is replayed meanwhile, which
            # tells a mute live stream from an engine that publishes nothing.
            probe = max(0.1, shared.limits.listen / 4)
            connected = connect(workers, replay_policy=policy, probe_interval=probe)
            client = shared.client = stack.enter_context(connected)
            before = _wait_live(cases, client, shared.limits)
        _at_once(pool, _watch, cases)
        # After the test prompt: an engine that serves nothing else has a batch to replay now.
        _at_once(pool, check_replayed, cases)
        for case in cases:
            if client is not None and case.worker is not None:
                check_streams(case, client, before)
            check_received(case)
            accept_mapped(case)
        # What no single engine shows.
        check_hashes(cases)
        others, notes = ([], []) if prompt is None else check_prompt(prompt, cases, client)
        others += [] if client is None else check_prefixes(client)
    findings = [finding for case in cases for finding in ordered(case.findings)] + others
    examined = [
        Examined(
            name=case.name,
            url=case.target.url,
            engine=case.engine,
            version=case.report.version if case.report else "",
            ranks={address.dp_rank: address.endpoint for address in case.addresses},
            test=case.test,
        )
        for case in cases
    ]
    return Diagnosis(
        targets=tuple(examined),
        findings=tuple(sorted(findings, key=rank_of)),
        notes=tuple(notes),
        seconds=round(time.monotonic() - started, 3),
    )


def _at_once(pool: ThreadPoolExecutor, do: Callable[..., None], *arguments: Sequence[Any]) -> None:
    for _ in pool.map(do, *arguments):
        pass


def _name_apart(cases: Sequence[Case]) -> None:
    """Give each case a name of its own, which is its worker's too."""
    used: set[str] = set()
    for case in cases:
        name, number = case.name, 1
        while case.name in used:
            number += 1
            case.name = f"{name}#{number}"
        used.add(case.name)
        if case.worker is not None and case.worker.name != case.name:
            case.worker = msgspec.structs.replace(case.worker, name=case.name)


def _listen_to(case: Case, stack: ExitStack) -> None:
    """Listen without a filter, where a plain connection can."""
    worker = case.worker
    # Engines that connect reach one listener only, and that is the client.
    if worker is None or worker.bind or worker.curve is not None:
        return
    addresses = [
        address
        for address in case.addresses
        if address.dp_rank not in case.broken and not address.endpoint.startswith("inproc:")
    ]
    if addresses:
        case.listener = Listener(case.shared.context, addresses)
        stack.callback(case.listener.close)


def _wait_live(cases: Sequence[Case], client: Client, limits: Limits) -> Mapping[Rank, int | None]:
    """Wait until all ranks are live, or none gets on, or time is over; return the last batches."""
    broken = {Rank(case.name, dp_rank) for case in cases for dp_rank in case.broken}
    until = time.monotonic() + limits.replay
    news = threading.Event()
    client.on_change(lambda _: news.set())  # for as long as the client lives: not long

    def last_batches(statuses: Mapping[Rank, RankStatus]) -> dict[Rank, int | None]:
        return {
            rank: status.seq
            for rank, status in statuses.items()
            if status.state is not State.LIVE and rank not in broken
        }

    while True:
        before = last_batches(client.statuses())
        waited_until = time.monotonic() + limits.live
        while now := last_batches(client.statuses()):
            moment = time.monotonic()
            if moment >= waited_until or (now != before and moment >= until):
                break
            # Batches that change no state are not announced: whether a replay gets on is sampled.
            news.wait(min(_LOOK_EVERY, waited_until - moment))
            news.clear()
        # Replays pass a filter that lets no live batch through: such a rank is never done.
        waits = {rank.worker for rank in last_batches(client.statuses())}
        broken |= {
            Rank(case.name, rank) for case in cases if case.name in waits for rank in filtered(case)
        }
        now = last_batches(client.statuses())
        if not now or now == before or time.monotonic() >= until:
            return before  # of the last wait: a rank that has another batch now gets on


def _watch(case: Case) -> None:
    """Test an engine, or only listen to it."""
    client = case.shared.client
    if case.worker is None or client is None:
        return  # nothing receives the events of a test prompt
    # vLLM guards /v1 alone: such an engine answers the rest, and would refuse the prompt.
    denied = any(finding.id == "engine-denied" for finding in case.findings)
    if case.http is not None and not case.shared.passive and not denied:
        probe_engine(case, client)
        return
    before = prompt_tokens(case.metrics)
    if case.listener is not None:
        case.listener.listen(lambda: False, case.shared.limits.listen)
    check_serving(case, before)
