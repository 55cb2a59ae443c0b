"""How long-running commands handle signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol


@contextmanager
def handled(
    handlers: Mapping[signal.Signals, Callable[[int], object]], *, to_the_end: bool = False
) -> Iterator[None]:
    """Handle signals in this block; in a thread other than the main one, do nothing.

    With `to_the_end`, the handlers stay after the block if one of the signals arrived: the process
    is to end with its own exit code, whatever else a shell or systemd sends.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one can
        yield
        return
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        handlers[signal.Signals(number)](number)

    before = {number: signal.signal(number, receive) for number in handlers}
    try:
        yield
    finally:
        if not (to_the_end and received):
            for number, handler in before.items():
                signal.signal(number, handler)


class Stoppable(Protocol):
    """A server that runs until it is stopped."""

    def stop(self) -> object: ...


@contextmanager
def ending(
    server: Stoppable, at_once: Callable[[], object] = lambda: None, *, hangs_up: bool = False
) -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C in this block stop a server, and the second the process.

    With `hangs_up`, SIGHUP does, too: nothing is to be read again, and a terminal that has gone
    must leave nothing behind.
    """
    is_ending = False

    def end(number: int) -> None:
        nonlocal is_ending
        if is_ending:
            at_once()
            # Without any cleaning up: what does not end may be just that.
            os._exit(128 + number)
        is_ending = True
        print("ending; once more ends at once", file=sys.stderr, flush=True)
        server.stop()

    signals = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hangs_up else [])]
    with handled(dict.fromkeys(signals, end), to_the_end=True):
        yield
