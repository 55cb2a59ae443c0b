"""`GET /snapshot`: this server's whole state, for another server to begin with."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from typing import Final

from kvindex import BusyError, Client, ClosedError
from kvindex.service.http.messages import Request, Route, Stream, in_threads, refusal
from kvindex.service.openapi import binary, route

_PIECE: Final = 256 << 10  # bytes read at once
_FRESH: Final = 10.0  # seconds for which a snapshot that is being sent is sent to others, too
_MOST: Final = 2  # snapshots that are being sent at once
_HEADERS: Final = (
    (b"content-type", b"application/octet-stream"),
    (b"cache-control", b"no-store"),
)


class _Taken:
    """A snapshot in a nameless file, which is gone once it is no longer being sent."""

    def __init__(self, descriptor: int, taken_at: float) -> None:
        self.descriptor = descriptor
        self.taken_at = taken_at
        self.readers = 0


def snapshot_route(client: Client, *, clock: Callable[[], float] = time.monotonic) -> Route:
    """Return the route `GET /snapshot`, which answers with the file of `Client.save`.

    A request soon after another one, or while two snapshots are being sent, gets the newest of
    these. So no client waits for a slow reader.

    Args:
        client: whose state it is.
        clock: monotonic seconds.
    """
    sent: list[_Taken] = []  # at present, the newest last
    lock: asyncio.Lock | None = None

    async def snapshot(request: Request) -> Stream:
        nonlocal lock
        if request.method == "HEAD":  # none is taken for that
            return Stream(in_threads(iter(())), _HEADERS)
        lock = lock or asyncio.Lock()
        async with lock:
            is_fresh = bool(sent) and clock() - sent[-1].taken_at < _FRESH
            if not is_fresh and len(sent) < _MOST:
                try:
                    descriptor = await asyncio.to_thread(_taken, client)
                except (OSError, BusyError, ClosedError) as error:
                    raise refusal(503, f"no snapshot could be taken: {error}", "busy") from error
                sent.append(_Taken(descriptor, clock()))
            taken = sent[-1]
            taken.readers += 1
        return Stream(_pieces(taken, sent), _HEADERS, length=os.fstat(taken.descriptor).st_size)

    return route(
        *("GET /snapshot", snapshot),
        "All that is known, for `kvindex serve --warm-from URL`, the secret seed included",
        {
            "description": "What `Client.save` writes.",
            "content": {"application/octet-stream": binary("A snapshot.")},
        },
    )


def _taken(client: Client) -> int:
    """Return a descriptor of a file with a new snapshot, which has no name any more."""
    with tempfile.TemporaryDirectory(prefix="kvindex-snapshot-") as folder:
        path = os.path.join(folder, "snapshot")
        client.save(path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


async def _pieces(taken: _Taken, sent: list[_Taken]) -> AsyncGenerator[bytes, None]:
    place = 0
    try:
        while piece := await asyncio.to_thread(os.pread, taken.descriptor, _PIECE, place):
            place += len(piece)
            yield piece
    finally:
        taken.readers -= 1
        if not taken.readers:
            sent.remove(taken)
            os.close(taken.descriptor)
