"""The processes that answer HTTP, as the one that subscribes keeps them.

Each is `python -m kvindex.service.child`. They share one listening socket, so the operating system
hands each connection to one that waits for it. One that dies is started again, later each time.

Orders to a process are lines of JSON through a pipe, its stdin. When the parent is gone, however it
ended, the pipe closes.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvindex.service.catalog import Catalog, Change, Registration
from kvindex.service.settings import ServeSettings
from kvindex.service.traffic import Traffic

logger = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 0.1  # seconds before one that died is started again
_LONGEST_PAUSE: Final = 10.0
_STEADY: Final = 30.0  # seconds of life after which a death is no reason to wait
_PATIENCE: Final = 5.0  # seconds beyond `shutdown_within` before one that does not end is killed


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first line: how to serve.

    Attributes:
        settings: of the server.
        tokens: any of them admits a request.
        fanout: path of the fan-out to join.
        upstream: path of the unix socket where all else is answered.
        listen_fd: descriptor of the listening socket that all children share.
        counters_fd: descriptor of the memory for this child's counters.
        routes: paths that requests are counted under.
        log_level: of the package's log, as a number.
    """

    settings: ServeSettings
    tokens: tuple[str, ...]
    fanout: str
    upstream: str
    listen_fd: int
    counters_fd: int = -1
    routes: tuple[str, ...]
    log_level: int


class Registered(msgspec.Struct, frozen=True, tag=True):
    """All that is registered, once; a `Change` says what has changed since."""

    registrations: tuple[Registration, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The last line: finish the open requests and end."""


Order = Start | Registered | Change | Stop

_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def write_order(order: Order) -> bytes:
    """Return an order as one line."""
    return msgspec.json.encode(order) + b"\n"


def read_order(line: bytes) -> Order:
    """Return the order in a line.

    Raises:
        msgspec.MsgspecError: there is none in it.
    """
    return _decoder.decode(line)


class Children:
    """Keeps a number of HTTP processes running until `close`.

    Each begins with the order `start`.

    Thread safety: every method from any thread.
    """

    def __init__(self, count: int, start: Start) -> None:
        self._start = start
        self._changed = threading.Condition()
        self._catalog = Catalog()
        self._version = 0
        self._closing = threading.Event()
        self._exits: Counter[str] = Counter()
        self._places = [_Place(number) for number in range(count)]
        self._threads = [
            threading.Thread(
                target=self._keep, args=(place,), name=f"kvindex-child-{place.number}", daemon=True
            )
            for place in self._places
        ]

    def begin(self) -> None:
        """Start the processes; returns at once."""
        for thread in self._threads:
            thread.start()

    def follow(self, catalog: Catalog) -> None:
        """Send every process the present registrations."""
        with self._changed:
            self._catalog = catalog
            self._version += 1
            self._changed.notify_all()

    def pids(self) -> list[int]:
        """Return the ids of the processes that run now."""
        running = [place.process for place in self._places]
        return [process.pid for process in running if process and process.poll() is None]

    def traffic(self) -> list[Traffic]:
        """Return the counted requests of the processes at each place, past ones included."""
        return [place.traffic for place in self._places]

    def statistics(self) -> dict[str, Any]:
        """Return `running` and `wanted` processes, and the unexpected `exits` by cause."""
        return {
            "running": len(self.pids()),
            "wanted": len(self._places),
            "exits": dict(self._exits),
        }

    def close(self) -> None:
        """Let them finish their open requests and end; kill those that do not. Idempotent."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + self._start.settings.shutdown_within + _PATIENCE
        for place, thread in zip(self._places, self._threads, strict=True):
            if thread.ident is None:
                continue  # `begin` was not called
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive() and place.process is not None:
                logger.error("HTTP process %d does not end; it is killed", place.process.pid)
                place.process.kill()
                thread.join()
        for place in self._places:
            place.close()

    def _keep(self, place: _Place) -> None:
        """Run one process after the other at a place."""
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                code = self._run(place)
            except OSError as error:
                logger.error("an HTTP process could not be started: %s", error)
                code = None
            if self._closing.is_set():
                return
            cause = "not started" if code is None else _cause(code)
            self._exits[cause] += 1
            if time.monotonic() - began >= _STEADY:
                pause = _FIRST_PAUSE
            logger.error("HTTP process %d ended (%s); again in %g s", place.number, cause, pause)
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _run(self, place: _Place) -> int:
        """Run one process to its end; return its exit code."""
        start = msgspec.structs.replace(self._start, counters_fd=place.descriptor)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvindex.service.child"],
            stdin=subprocess.PIPE,
            pass_fds=(start.listen_fd, place.descriptor),
        )
        place.process = process
        orders = threading.Thread(
            target=self._give_orders, args=(process, start), name="kvindex-orders", daemon=True
        )
        orders.start()
        code = process.wait()
        with self._changed:
            self._changed.notify_all()
        orders.join()
        return code

    def _give_orders(self, process: subprocess.Popen[bytes], start: Start) -> None:
        """Write to one process until it ends, or all are to end."""
        assert process.stdin is not None
        sent = -1
        before: Catalog | None = None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(write_order(start))
            while not self._closing.is_set() and process.returncode is None:
                with self._changed:
                    catalog, version = self._catalog, self._version
                if version != sent:
                    order: Order = Registered(catalog.registrations)
                    if before is not None:
                        order = catalog.since(before)
                    pipe.write(write_order(order))
                    sent, before = version, catalog
                    pipe.flush()
                with self._changed:
                    self._changed.wait_for(
                        lambda seen=sent: (
                            self._version != seen  # type: ignore[misc]
                            or self._closing.is_set()
                            or process.returncode is not None
                        )
                    )
            pipe.write(write_order(Stop()))


class _Place:
    """Where one process runs after the other: their counters go on."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.descriptor = os.memfd_create(f"kvindex-counters-{number}")
        os.ftruncate(self.descriptor, Traffic.SIZE)
        self.traffic = Traffic(memoryview(mmap.mmap(self.descriptor, Traffic.SIZE)))

    def close(self) -> None:
        """Let go of the descriptor; the numbers stay."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _cause(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit {code}"
