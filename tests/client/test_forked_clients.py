"""A process with a client forks, as servers that preload their application do: nobody hangs."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvindex import (
    Client,
    ClosedError,
    EventStream,
    Rank,
    State,
)
from kvindex.subscribe import Subscriber
from kvindex.subscribe.status_board import StatusBoard
from kvindex.testing import FakeEngine
from tests.children import Program, in_child
from tests.live import PATIENCE, caught_up, client_of, followed, until, worker_of

pytestmark = pytest.mark.e2e

FORKED = "this process was forked; connect in the child"
PROMPT = list(range(64))


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(ClosedError, match=FORKED):
        call()


def check_closed(client: Client, rank: Rank) -> None:
    """In a child: every call raises at once, and nothing is called live."""
    assert client.ranks == (rank,)
    assert client.trusts()[rank].state == State.CLOSED
    refused(lambda: client.status(rank))
    refused(lambda: client.match(PROMPT))
    refused(client.statistics)
    refused(lambda: client.wait_live(PATIENCE))
    refused(lambda: client.remove(rank.worker))
    refused(lambda: client.subscriber.call(lambda: None))
    refused(lambda: client.subscriber.cursor(rank))
    refused(client.__enter__)
    client.subscriber.close()
    gc.collect()


@contextmanager
def flooded(engine: FakeEngine) -> Iterator[None]:
    """Have an engine publish without a pause."""
    done = threading.Event()

    def publish() -> None:
        for number in range(10**9):
            if done.is_set():
                return
            engine.serve(range(number * 10_000, number * 10_000 + 4000))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_under_a_flood_a_child_is_closed_and_its_parent_goes_on() -> None:
    with FakeEngine("a") as engine, client_of(worker_of(engine)) as client:
        engine.serve(PROMPT)
        caught_up(client, engine)
        with flooded(engine):
            for _ in range(12):
                assert in_child(lambda: check_closed(client, engine.rank)) == 0
        caught_up(client, engine)
        assert client.status(engine.rank).complete
        assert client.match(PROMPT)[engine.rank].state == State.LIVE


class Held:
    """Holds the lock of a client's statuses while another thread forks."""

    def __init__(self, client: Client) -> None:
        self._held, self._let_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(client._board,))

    def _hold(self, board: StatusBoard) -> None:
        with board._lock:
            self._held.set()
            self._let_go.wait(PATIENCE)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._held.wait(PATIENCE)

    def __exit__(self, *exc_info: object) -> None:
        self._let_go.set()
        self._thread.join()


def test_a_child_needs_no_lock_that_a_thread_of_its_parent_held() -> None:
    with FakeEngine("a") as engine, followed(engine) as client:
        with Held(client):
            assert in_child(lambda: check_closed(client, engine.rank)) == 0


def test_a_child_and_its_child_connect_by_themselves() -> None:
    with FakeEngine("a") as engine, client_of(worker_of(engine)) as client:
        engine.serve(PROMPT)
        caught_up(client, engine)

        def connect_anew() -> None:
            check_closed(client, engine.rank)
            with client_of(worker_of(engine)) as own:
                own.wait_live(PATIENCE)
                assert own.match(PROMPT)[engine.rank].state == State.LIVE

        def twice() -> None:
            connect_anew()
            assert in_child(connect_anew) == 0

        assert in_child(twice) == 0
        engine.serve(range(1000, 1064))
        caught_up(client, engine)


def test_a_stream_is_closed_in_a_child_whoever_waits_for_it() -> None:
    with FakeEngine("a") as engine, EventStream([worker_of(engine)]) as stream:
        waiting = threading.Thread(target=lambda: [stream.get(PATIENCE) for _ in range(3)])
        engine.serve(PROMPT)
        waiting.start()

        def check() -> None:
            refused(stream.get)
            assert list(stream) == []
            stream.close()

        assert in_child(check) == 0
        engine.serve(range(1000, 1064))
        waiting.join(PATIENCE)
        assert not waiting.is_alive()


@pytest.mark.parametrize("how", ["sink", "on_batch", "on_statuses", "call"])
def test_a_child_that_is_forked_on_the_thread_ends_with_it(how: str) -> None:
    children: list[int] = []

    def fork(*_: object) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(int(PATIENCE))

    calls: dict[str, Any] = {"sink": lambda _: None, **({} if how == "call" else {how: fork})}
    with FakeEngine("a") as engine, Subscriber([worker_of(engine)], **calls) as subscriber:
        engine.serve(PROMPT)
        if how == "call":
            subscriber.call(fork)
        until(lambda: bool(children))
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        subscriber.wait_live(PATIENCE)


@pytest.mark.parametrize("leave", ["close", "exit"])
def test_a_child_that_exits_as_a_program_does_leaves_its_parents_client_alone(leave: str) -> None:
    script = f"""
import os, sys, warnings
warnings.simplefilter("error", ResourceWarning)
from kvindex import Worker, connect
client = connect([Worker("a", {{0: sys.argv[1]}}, replay={{0: sys.argv[2]}})])
client.wait_live({PATIENCE})
pid = os.fork()
if pid == 0:
    {"client.close()" if leave == "close" else "pass"}
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
client.wait_live({PATIENCE})
client.close()
"""
    with FakeEngine("a") as engine:
        with Program("-c", script, engine.endpoint, str(engine.replay_endpoint)) as program:
            _, errors = program.finish()
    assert (program.process.returncode, errors) == (0, "")
