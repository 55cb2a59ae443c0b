"""The state from which a server continues after a restart: ranks' blocks, HTTP registrations."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kvindex import BusyError, Client, ClosedError, ConfigurationError
from kvindex.index.snapshot import replaced_file
from kvindex.service.catalog import BY_CLIENTS, Catalog, Registration
from kvindex.service.http.messages import Request, Route, Stream, in_threads, refusal, sending
from kvindex.service.openapi import binary, route
from kvindex.wire.errors import UNREADABLE
from kvindex.wire.log_rate import LogRate
from kvindex.wire.web import Web

logger = logging.getLogger(__name__)

_MAX_REGISTRATIONS_BYTES = 64 << 20
_MAX_SNAPSHOT_BYTES = 64 << 30
_PIECE = 256 << 10  # bytes that are read or sent at once


def registrations_path(state: str | os.PathLike[str]) -> Path:
    """Return the file with the registrations that belongs to a state file."""
    return Path(f"{os.fspath(state)}.registered.json")


def read_registrations(state: str | os.PathLike[str]) -> list[Registration]:
    """Return the registrations that were saved beside a state file; none if there is no file.

    Raises:
        ConfigurationError: it holds something else.
        OSError: it cannot be read.
    """
    path = registrations_path(state)
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_REGISTRATIONS_BYTES + 1)
        return msgspec.json.decode(data, type=list[Registration])
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        raise ConfigurationError(
            f"--state {path}: it holds no registrations ({error}); to start without them, delete "
            "it or move it away"
        ) from error


class Saver:
    """Saves a client's state every so many seconds, and registrations whenever they change.

    Thread safety: every method from any thread.
    """

    def __init__(self, client: Client, path: str | os.PathLike[str], every: float) -> None:
        self._client = client
        self._path = Path(path)
        self._every = every
        self._registered: tuple[Registration, ...] | None = None
        self._wake = threading.Event()
        self._closing = False
        self._writing = threading.Lock()
        self._rate = LogRate()
        self._counters = {"saved": 0, "failed": 0}
        self._saved_at: float | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvindex-saver", daemon=True)
        self._thread.start()

    def note(self, catalog: Catalog) -> None:
        """Schedule saving the registrations: a listener of `Registry.on_change`."""
        # Those of the operator come again by themselves, and may have changed by then.
        self._registered = tuple(
            entry for entry in catalog.registrations if entry.source == BY_CLIENTS
        )
        self._wake.set()

    def save(self) -> bool:
        """Write both files now; return whether it worked. A failure is logged and counted."""
        # The registrations first: a rank without blocks fills up, blocks without a rank are lost.
        is_saved = self._write(
            "the state", self._write_registered, partial(self._client.save, self._path)
        )
        if is_saved:
            self._counters["saved"] += 1
            self._saved_at, self._error = time.time(), None
        return is_saved

    def statistics(self) -> dict[str, Any]:
        """Return how often it was saved and failed, when last (Unix seconds), and the error."""
        return {**self._counters, "saved_at": self._saved_at, "error": self._error}

    def close(self) -> bool:
        """Save for the last time; return whether it worked."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        return self.save()

    def _run(self) -> None:
        due = time.monotonic() + self._every
        while not self._closing:
            if self._wake.wait(max(0.0, due - time.monotonic())):
                self._wake.clear()
                self._write("registrations", self._write_registered)
            else:
                self.save()
                due = time.monotonic() + self._every

    def _write(self, what: str, *steps: Callable[[], object]) -> bool:
        """Carry out steps of saving; log and count a failure, and return whether there was none."""
        # A full disk must neither end the thread nor the server, whose answers are as good as ever.
        with self._writing:
            try:
                for step in steps:
                    step()
            except (OSError, BusyError, ClosedError) as error:
                self._counters["failed"] += 1
                self._error = str(error)
                if self._rate.allows(what):
                    logger.error(
                        "%s could not be saved in %s (%s); a file that was there is as before",
                        *(what, self._path, error),
                    )
                return False
        return True

    def _write_registered(self) -> None:
        registered, self._registered = self._registered, None
        if registered is None:
            return
        try:
            with replaced_file(registrations_path(self._path)) as file:
                file.write(msgspec.json.encode(registered))
        except BaseException:  # again the next time, unless there are newer ones by now
            self._registered = self._registered or registered
            raise


def fetch_snapshot(
    url: str, path: str | os.PathLike[str], *, token: str | None = None, timeout: float = 30.0
) -> None:
    """Write another server's snapshot to a file, which appears once all of it has come.

    `connect(resume=path)` continues from it. `timeout` is of seconds without a byte.

    Raises:
        ConfigurationError: it is no URL of a server.
        OSError: it could not be had; the message says why.
    """
    # The token goes to that server and no other: no proxy is used, and no redirect followed.
    web = Web(url, token=token)
    with web.open("/snapshot", timeout) as answer, replaced_file(path) as file:
        if answer.status != 200:
            body, why = answer.read(4096), ""
            with suppress(ValueError, KeyError, TypeError):  # it may be no kvindex that answers
                why = f" ({json.loads(body)['error']})"
            raise OSError(f"{web.url}/snapshot: status {answer.status}{why}")
        expected, size = answer.length, 0
        while piece := answer.read(_PIECE, timeout):
            size += len(piece)
            if size > _MAX_SNAPSHOT_BYTES:
                raise OSError(f"the snapshot exceeds {_MAX_SNAPSHOT_BYTES} bytes")
            file.write(piece)
        if expected not in (None, size):
            raise OSError(f"the snapshot was cut off after {size} of {expected} bytes")


_FRESH: Final = 10.0  # seconds for which a snapshot that is being sent is sent to others, too
_MOST: Final = 2  # snapshots that are being sent at once
_OCTETS: Final = (
    (b"content-type", b"application/octet-stream"),
    (b"cache-control", b"no-store"),
)


@dataclass(eq=False)
class _Snapshot:
    """A snapshot in a nameless file, which is gone once it is no longer being sent."""

    descriptor: int
    taken_at: float
    readers: int = 0


def snapshot_route(client: Client, *, clock: Callable[[], float] = time.monotonic) -> Route:
    """Return the route `GET /snapshot`, which answers with the file of `Client.save`."""
    sent: list[_Snapshot] = []  # at present, the newest last
    lock: asyncio.Lock | None = None

    async def send(request: Request) -> Stream:
        nonlocal lock
        if request.method == "HEAD":  # none is taken for that
            return Stream(sending(in_threads(iter(()))), _OCTETS)
        lock = lock or asyncio.Lock()
        # A request soon after another one, or while two snapshots are being sent, gets the newest
        # of these: so the disk holds two at most, and no client waits for a slow reader.
        async with lock:
            is_fresh = bool(sent) and clock() - sent[-1].taken_at < _FRESH
            if not is_fresh and len(sent) < _MOST:
                try:
                    descriptor = await asyncio.to_thread(_nameless_snapshot, client)
                except (OSError, BusyError, ClosedError) as error:
                    raise refusal(503, f"no snapshot could be taken: {error}", "busy") from error
                sent.append(_Snapshot(descriptor, clock()))
            snapshot = sent[-1]
            snapshot.readers += 1
        size = os.fstat(snapshot.descriptor).st_size
        return Stream(sending(_pieces(snapshot, sent)), _OCTETS, length=size)

    return route(
        *("GET /snapshot", send),
        "All that is known, for `kvindex serve --warm-from URL`, the secret seed included",
        {
            "description": "What `Client.save` writes.",
            "content": {"application/octet-stream": binary("A snapshot.")},
        },
    )


def _nameless_snapshot(client: Client) -> int:
    """Return a descriptor of a file with a new snapshot, which has no name any more."""
    with tempfile.TemporaryDirectory(prefix="kvindex-snapshot-") as folder:
        path = os.path.join(folder, "snapshot")
        client.save(path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


async def _pieces(snapshot: _Snapshot, sent: list[_Snapshot]) -> AsyncGenerator[bytes, None]:
    place = 0
    try:
        while piece := await asyncio.to_thread(os.pread, snapshot.descriptor, _PIECE, place):
            place += len(piece)
            yield piece
    finally:
        snapshot.readers -= 1
        if not snapshot.readers:
            sent.remove(snapshot)
            os.close(snapshot.descriptor)
