"""`GET /snapshot`: all that this server knows, for another one to begin with."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvindex import BusyError, Client, ClosedError
from kvindex.server.replies import refused

__all__ = ["snapshot_route"]

_PIECE: Final = 256 << 10  # bytes read at once


def snapshot_route(client: Client, directory: str | None = None) -> Route:
    """Return the route `GET /snapshot`, which answers what `Client.save` writes.

    One snapshot is taken at a time; who asks meanwhile gets a 503. It is read from a file without
    a name, which is gone when the response has ended, however it ends.

    Args:
        client: whose state it is.
        directory: where there is room for it; that of temporary files by default.
    """
    taking = threading.Lock()

    async def snapshot(request: Request) -> Response:
        if not taking.acquire(blocking=False):
            reply = refused(503, "another snapshot is being sent: ask again")
            return Response(reply.body, 503, {"retry-after": "1"}, media_type="application/json")
        try:
            file = await asyncio.to_thread(_taken, client, directory)
        except (OSError, BusyError, ClosedError) as error:
            taking.release()
            reply = refused(503, f"no snapshot could be taken: {error}")
            return Response(reply.body, 503, media_type="application/json")
        except BaseException:
            taking.release()
            raise
        size = os.fstat(file).st_size
        return StreamingResponse(
            _pieces(file, taking),
            headers={"content-length": str(size), "cache-control": "no-store"},
            media_type="application/octet-stream",
        )

    return Route("/snapshot", snapshot, methods=["GET"])


def _taken(client: Client, directory: str | None) -> int:
    """Return a descriptor of a file with a new snapshot, which has no name any more."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvindex-snapshot-") as folder:
        path = os.path.join(folder, "snapshot")
        client.save(path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


async def _pieces(file: int, taking: threading.Lock) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(os.read, file, _PIECE):
            yield piece
    finally:
        with suppress(OSError):
            os.close(file)
        taking.release()
