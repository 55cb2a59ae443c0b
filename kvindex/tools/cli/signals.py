"""How long-running commands handle signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def handled(
    handlers: Mapping[signal.Signals, Callable[[int], object]], *, to_the_end: bool = False
) -> Iterator[None]:
    """Handle signals in this block; in a thread other than the main one, do nothing.

    Args:
        handlers: what to call with the number of a signal, by the signal.
        to_the_end: after one of the signals arrived, its handler stays after the block: the process
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
