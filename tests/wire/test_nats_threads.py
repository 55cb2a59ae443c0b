"""The thread that runs a connection: how it ends, and what is left of it in a forked child."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from kvindex.wire.nats import NatsThread, run_apart
from tests.children import in_child
from tests.live import PATIENCE

pytestmark = pytest.mark.unit


class Failures:
    """What `on_failure` was called with."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.came = threading.Event()

    def __call__(self, error: BaseException) -> None:
        self.errors.append(error)
        self.came.set()


class Main:
    """A coroutine that waits until it is cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    async def __call__(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # it may still await something
            self.ended.set()


def test_close_cancels_the_coroutine_and_waits_until_it_has_ended() -> None:
    main, failures = Main(), Failures()
    thread = NatsThread("test", main, failures)
    assert main.begun.wait(PATIENCE)
    thread.close()
    assert main.ended.is_set()
    thread.close()
    assert not failures.errors


def test_close_ends_a_coroutine_whose_call_ignores_that_it_is_cancelled() -> None:
    begun = threading.Event()

    async def ignoring() -> None:
        with suppress(asyncio.CancelledError):  # as a flush of nats-py
            begun.set()
            await asyncio.Event().wait()

    async def main() -> None:
        await run_apart(ignoring())
        await asyncio.Event().wait()

    thread = NatsThread("test", main, Failures())
    assert begun.wait(PATIENCE)
    thread.request_stop()
    thread._thread.join(PATIENCE)
    assert not thread._thread.is_alive()


async def test_a_call_that_runs_apart_returns_raises_and_may_take_too_long() -> None:
    async def returning() -> int:
        return 1

    async def raising() -> None:
        raise ValueError("wrong")

    assert await run_apart(returning(), PATIENCE) == 1
    with pytest.raises(ValueError, match="wrong"):
        await run_apart(raising(), PATIENCE)
    never = asyncio.ensure_future(asyncio.Event().wait())
    with pytest.raises(asyncio.TimeoutError):
        await run_apart(never, 0.01)
    with pytest.raises(asyncio.CancelledError):
        await never


async def test_a_wait_does_not_count_the_time_for_which_the_process_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    stopped = 0.0

    def clock(clock: Callable[[], float] = loop.time) -> float:
        return clock() + stopped

    monkeypatch.setattr(loop, "time", clock)

    async def answered() -> str:
        nonlocal stopped
        for _ in range(5):  # messages that came meanwhile are read one after the other
            await asyncio.sleep(0)
            stopped += PATIENCE
        return "answer"

    assert await run_apart(answered(), 5.0) == "answer"


def test_closing_twice_does_not_interrupt_how_the_coroutine_ends() -> None:
    begun, ending, may_end, ended = (threading.Event() for _ in range(4))

    async def main() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait, PATIENCE)
            ended.set()

    thread = NatsThread("test", main, Failures())
    assert begun.wait(PATIENCE)
    thread.request_stop()
    assert ending.wait(PATIENCE)
    thread.request_stop()
    called = threading.Event()
    thread.call_soon(called.set)  # after the second request
    assert called.wait(PATIENCE)
    may_end.set()
    thread.close()
    assert ended.is_set()


def test_a_thread_that_is_closed_before_it_runs_ends() -> None:
    for _ in range(20):
        main, failures = Main(), Failures()
        NatsThread("test", main, failures).close()
        assert not main.begun.is_set() or main.ended.is_set()
        assert not failures.errors


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_an_error_of_the_coroutine_is_reported_and_the_thread_can_be_closed(
    error: type[BaseException],
) -> None:
    async def fail() -> None:
        raise error("planted")  # cancelled by others, too

    failures = Failures()
    thread = NatsThread("test", fail, failures)
    assert failures.came.wait(PATIENCE)
    thread.close()
    assert [str(error) for error in failures.errors] == ["planted"]


def test_an_error_while_the_coroutine_is_cancelled_is_reported() -> None:
    begun = threading.Event()

    async def fail() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("planted")

    failures = Failures()
    thread = NatsThread("test", fail, failures)
    assert begun.wait(PATIENCE)
    thread.close()
    assert [str(error) for error in failures.errors] == ["planted"]


def test_what_the_coroutine_started_ends_with_it() -> None:
    helper, begun = Main(), threading.Event()
    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        kept.append(asyncio.ensure_future(helper()))
        await asyncio.to_thread(helper.begun.wait, PATIENCE)
        begun.set()
        await asyncio.Event().wait()

    thread = NatsThread("test", main, Failures())
    assert begun.wait(PATIENCE)
    thread.close()
    assert helper.ended.is_set()


def test_a_call_runs_on_the_loop_and_after_the_end_not_at_all() -> None:
    calls: list[str] = []
    called, main = threading.Event(), Main()

    def note() -> None:
        calls.append(threading.current_thread().name)
        called.set()

    thread = NatsThread("test", main, Failures())
    thread.call_soon(note)
    assert called.wait(PATIENCE)
    thread.close()
    thread.call_soon(lambda: calls.append("late"))
    assert calls == ["test"]


def test_the_coroutine_may_close_its_own_thread() -> None:
    closed, failures = threading.Event(), Failures()
    threads: list[NatsThread] = []
    ready = threading.Event()

    async def main() -> None:
        await asyncio.to_thread(ready.wait, PATIENCE)
        threads[0].close()
        closed.set()
        await asyncio.Event().wait()

    threads.append(NatsThread("test", main, failures))
    ready.set()
    assert closed.wait(PATIENCE)
    threads[0].close()
    assert not failures.errors


def test_a_forked_child_closes_nothing_and_the_parent_goes_on() -> None:
    main = Main()
    thread = NatsThread("test", main, Failures())
    assert main.begun.wait(PATIENCE)

    def check() -> bool:
        thread.call_soon(lambda: None)
        thread.request_stop()
        thread.close()
        return True

    assert in_child(check) == 0
    called = threading.Event()
    thread.call_soon(called.set)
    assert called.wait(PATIENCE)
    assert not main.ended.is_set()
    thread.close()
    assert main.ended.is_set()
