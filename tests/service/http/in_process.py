"""Asks routes in this process, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvindex.service.http.guards import Guard
from kvindex.service.http.messages import Reply, Request, Route, Stream, Writer
from kvindex.service.http.site import Site
from kvindex.testing import FakeEngine


class _Answer(NamedTuple):
    status_code: int
    headers: Mapping[str, str]
    content: bytes


class Answer(_Answer):
    """The response to a request."""

    @cached_property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        return json.loads(self.content)


def request(
    method: str,
    target: str,
    body: Any = b"",
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
) -> Request:
    """Return a request, its body as JSON if it is not bytes."""
    fields = {"host": "localhost", **{k.lower(): v for k, v in (headers or {}).items()}}
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
        fields.setdefault("content-type", "application/json")
    if content_type is not None:
        fields["content-type"] = content_type
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    return Request.of(method, urlsplit(target)._replace(fragment="").geturl().encode(), raw, body)


async def pieces_of(stream: Stream) -> AsyncGenerator[bytes, None]:
    """Yield what a stream writes, as its client reads it; closed, the client has gone."""
    written: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send() -> None:
        try:
            await stream.send(Writer(written.put_nowait, written.empty, written.join))
        finally:
            written.put_nowait(None)

    sending = asyncio.ensure_future(send())
    try:
        while (piece := await written.get()) is not None:
            yield piece
            written.task_done()
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


class Asker:
    """Sends requests to a site, or to routes."""

    def __init__(self, of: Site | Sequence[Route]) -> None:
        self.site = of if isinstance(of, Site) else Site(of, Guard())

    async def answer(self, question: Request) -> Answer:
        """Return the response to one request; a stream's as a whole."""
        refusal = self.site.admit(question)
        answer: Any = self.site.answer(question) if refusal is None else refusal.reply
        if not isinstance(answer, Reply):
            answer = await answer
        self.site.count(question, answer.status)
        headers = {name.decode(): value.decode() for name, value in answer.headers}
        if isinstance(answer, Stream):
            body = b"".join([piece async for piece in pieces_of(answer)])
        else:
            body = answer.body
            if answer.content_type:
                headers["content-type"] = answer.content_type.decode()
        return Answer(answer.status, headers, body)

    def send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Return the response to one request."""
        body = json if json is not None else content or b""
        return asyncio.run(self.answer(request(method, path, body, headers)))

    def get(self, path: str) -> tuple[int, Any]:
        """Return status and JSON."""
        return _read(self.send("GET", path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and JSON, or text."""
        return _read(self.send("POST", path, json=body))


def _read(answer: Answer) -> tuple[int, Any]:
    is_json = answer.headers.get("content-type") == "application/json"
    return answer.status_code, answer.json() if is_json else answer.text


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
