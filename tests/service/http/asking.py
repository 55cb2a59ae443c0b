"""Asks an app in this process, without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec

from kvindex.testing import FakeEngine

__all__ = ["Asker", "body_of"]


class Asker:
    """Sends requests to an ASGI app."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the response to one request."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.request(method, path, **options)

        return asyncio.run(ask())

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and JSON."""
        return _told(self.send("GET", path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON, or text."""
        return _told(self.send("POST", path, json=body))


def _told(response: httpx.Response) -> tuple[int, Any]:
    if response.headers.get("content-type") == "application/json":
        return response.status_code, msgspec.json.decode(response.content)
    return response.status_code, response.text


def body_of(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    """The body of a registration of an engine, in Dynamo's dialect."""
    return {
        "instance_id": 1,
        "endpoint": engine.endpoint,
        "replay_endpoint": engine.replay_endpoint,
        "model_name": "m",
        "block_size": 16,
        **fields,
    }
