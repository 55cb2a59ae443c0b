"""Clients, subscribers and streams that nobody holds any more end by themselves."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest

from kvindex import Client, ClosedError, EventStream, Worker, connect
from kvindex.subscribe import Subscriber
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, caught_up, client_of, worker_of

pytestmark = pytest.mark.e2e

WORKERS = [Worker("w", "tcp://127.0.0.1:1", replay="tcp://127.0.0.1:2")]
HOLDERS: list[Callable[[], Client | Subscriber | EventStream]] = [
    lambda: connect(WORKERS),
    lambda: Subscriber(WORKERS, sink=lambda _: None),
    lambda: EventStream(WORKERS),
]
IDS = ["Client", "Subscriber", "EventStream"]


def receiving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvindex-subscriber"]


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(PATIENCE)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("make", HOLDERS, ids=IDS)
def test_what_is_dropped_ends_its_thread_gives_back_its_descriptors_and_warns(
    make: Callable[[], object],
) -> None:
    gc.collect()
    before = receiving()
    descriptors = []
    for _ in range(3):
        held = [make()]
        threads = [thread for thread in receiving() if thread not in before]
        assert len(threads) == 1
        with pytest.warns(ResourceWarning, match=r"dropped without close\(\)"):
            held.clear()
        assert ended(threads)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] <= descriptors[0], "the first one opens what the process keeps"


@pytest.mark.parametrize("make", HOLDERS, ids=IDS)
def test_what_is_closed_does_not_warn_and_cannot_be_entered_again(
    make: Callable[[], Client | Subscriber | EventStream],
) -> None:
    before = receiving()
    made = make()
    with made:
        pass
    with pytest.raises(ClosedError):
        made.__enter__()
    assert ended([thread for thread in receiving() if thread not in before])
    del made
    gc.collect()  # a warning would be an error


def test_a_client_that_receives_can_be_dropped_too() -> None:
    with FakeEngine("a") as engine:
        engine.serve(range(64))
        before = receiving()
        held = [client_of(worker_of(engine))]
        caught_up(held[0], engine)
        threads = [thread for thread in receiving() if thread not in before]
        with pytest.warns(ResourceWarning):
            held.clear()
        assert ended(threads)
