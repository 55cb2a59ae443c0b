"""A gateway of several processes: one routes, the others are proxies at one listening socket.

The parent starts them and starts again what ends. Each runs the parent's own command line, with
what part it has; its standard input is a pipe of the parent, so that none outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Final

from kvindex.gateway.door import Door
from kvindex.gateway.remote import RemoteRouting
from kvindex.gateway.router_process import RouterProcess
from kvindex.gateway.routers import Routers
from kvindex.gateway.settings import GatewaySettings

try:
    from uvloop import run as run_loop
except ImportError:
    from asyncio import run as run_loop  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_SOON: Final = 1.0  # seconds: what ends sooner is started again later and later
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


class _Child:
    """A process that is started again whenever it ends."""

    def __init__(self, name: str, command: Sequence[str], descriptors: tuple[int, ...]) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._descriptors = descriptors
        self._began = 0.0
        self._pause = 0.0

    def start(self, ended: Callable[[_Child], None]) -> None:
        """Start it; `ended` is called once it has ended, by another thread."""
        self._began = time.monotonic()
        self.process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=self._descriptors,
            start_new_session=True,  # Ctrl-C is the parent's
        )

        def wait() -> None:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            ended(self)

        threading.Thread(target=wait, name=f"kvindex-{self.name}", daemon=True).start()

    def pause(self) -> float:
        """Return the seconds until it is to be started again."""
        is_soon = time.monotonic() - self._began < _SOON
        self._pause = min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE) if is_soon else 0.0
        return self._pause

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Workers:
    """The parent of a gateway's processes.

    Args:
        command: the command line of a gateway; `part_of` reads what is appended to it.
        listener: the listening socket of the proxies.
        proxies: how many there are.

    Attributes:
        restarts: how often a process was started again.

    Owner: the thread that calls `run`; `stop` and `kill` also from signal handlers.
    """

    def __init__(self, command: Sequence[str], listener: socket.socket, proxies: int) -> None:
        self.restarts = 0
        self._is_ending = False
        self._ended: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._opened = ExitStack()
        folder = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="kvindex-"))
        path, fd = os.path.join(folder, "router"), listener.fileno()
        self._router = _Child("router", [*command, *_options("router", path)], ())
        self._proxies = [
            _Child(f"proxy-{number}", [*command, *_options("proxy", path, fd)], (fd,))
            for number in range(proxies)
        ]

    def run(self) -> None:
        """Run all processes until `stop`, and until the proxies have drained."""
        children = [self._router, *self._proxies]
        with self._opened:
            try:
                for child in children:
                    child.start(self._ended.put)
                running = len(self._proxies)
                while running:
                    child = self._ended.get()
                    if self._is_ending:
                        running -= child is not self._router
                    else:
                        self._start_again(child)
                self._router.signal(signal.SIGTERM)
                if self._router.process is not None:
                    self._router.process.wait()
            finally:
                self.kill()

    def _start_again(self, child: _Child) -> None:
        assert child.process is not None
        pause = child.pause()
        logger.warning(
            "%s ended with %d: it is started again in %g s",
            *(child.name, child.process.returncode, pause),
        )
        self.restarts += 1

        def start() -> None:
            if self._is_ending:
                self._ended.put(child)
            else:
                child.start(self._ended.put)

        timer = threading.Timer(pause, start)
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        """Let the proxies drain, then end all."""
        self._is_ending = True
        for child in self._proxies:
            child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all processes at once."""
        for child in [self._router, *self._proxies]:
            child.signal(signal.SIGKILL)


def _options(part: str, path: str, descriptor: int = -1) -> list[str]:
    return ["--part", f"{part}:{descriptor}:{path}"]


def run_part(
    part: str,
    make_routers: Callable[[], Routers],
    settings: GatewaySettings,
    engine_token: Callable[[], str | None],
) -> None:
    """Run one of the processes of `Workers`, until SIGTERM or the parent's end.

    Args:
        part: as appended to the command line.
        make_routers: makes those of the router process.
        settings: of the gateway.
        engine_token: returns the engines' API key.
    """
    name, descriptor, path = part.split(":", 2)
    if name == "router":
        with make_routers() as routers:
            run_loop(_route(routers, path))
        return
    routing = RemoteRouting(path)
    door = Door(routing, routing, settings, engine_token)
    signal.signal(signal.SIGTERM, lambda *_: door.stop())
    _at_parents_end(door.stop)
    listener = socket.socket(fileno=int(descriptor))
    door.run(listener, lambda accepts: routing.run(door.statistics, accepts))


async def _route(routers: Routers, path: str) -> None:
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    _at_parents_end(lambda: loop.call_soon_threadsafe(ending.set))
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a router process before
    await RouterProcess(routers, path).serve(ending)


def _at_parents_end(call: Callable[[], object]) -> None:
    """Call a function once standard input ends, which the parent never writes to."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        call()

    threading.Thread(target=wait, name="kvindex-parent", daemon=True).start()
