"""A client of OpenAI's API that costs little: chats over kept connections, streamed or whole."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import httptools

from benchmarks.fronts import MODEL, Front

PROMPT: Final = 2_000  # tokens: the fake engine's tokenizer has one for each byte
_SHARED: Final = 8  # requests that share the first three quarters of their prompts


class Answered(NamedTuple):
    """One answer.

    Attributes:
        is_whole: whether it is a 200 and came to its end.
        first: seconds to its first content.
        began: seconds to the first byte of its body.
        ended: seconds to its end.
        held: tokens of the prompt that the engine had by our gateway's index; None if not stated.
        tail: its last bytes.
    """

    is_whole: bool
    first: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    held: int | None = None
    tail: bytes = b""

    @property
    def usage(self) -> dict[str, Any]:
        """What a stream with `include_usage` says of tokens; {} if nothing."""
        for line in reversed(self.tail.splitlines()):
            if line.startswith(b"data: {") and b'"usage"' in line:
                usage: dict[str, Any] = json.loads(line[6:])["usage"]
                return usage
        return {}


def chats(count: int, seed: int, **fields: Any) -> Iterator[bytes]:
    """Yield the bodies of chats."""
    for number in range(count):
        shared = (
            random.Random(seed * 1_000_003 + number // _SHARED).randbytes(PROMPT * 3 // 8).hex()
        )
        own = random.Random(f"{seed} {number}").randbytes(PROMPT // 8).hex()
        messages = [{"role": "user", "content": shared + own}]
        yield json.dumps({"model": MODEL, "messages": messages, "stream": True, **fields}).encode()


def ask(front: Front, bodies: Sequence[bytes], *, at_once: int, gap: float = 0.0) -> list[Answered]:
    """Send chats, so many at once, and return the answers.

    Args:
        front: where to.
        bodies: the chats.
        at_once: connections.
        gap: seconds between an engine's tokens.
    """
    return asyncio.run(_ask(front, bodies, at_once, gap))


async def _ask(front: Front, bodies: Sequence[bytes], at_once: int, gap: float) -> list[Answered]:
    answers: list[Answered] = []
    faults = json.dumps({"gap": gap}).encode()
    head = b"x-fake-faults: %b\r\n" % faults
    if front.key:
        head += b"authorization: Bearer %b\r\n" % front.key.encode()
    left = iter(bodies)

    async def work() -> None:
        client: Client | None = None
        for body in left:
            if client is None or client.transport.is_closing():
                client = await Client.connected(front.port)
            answers.append(await client.ask(body, head))
        if client is not None:
            client.transport.close()

    await asyncio.gather(*(work() for _ in range(at_once)))
    return answers


_HEAD: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
)


class Client(asyncio.Protocol):
    """One connection, with one request at a time."""

    @classmethod
    async def connected(cls, port: int) -> Client:
        """Connect to a port of this machine."""
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(cls, "127.0.0.1", port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._done: asyncio.Future[Answered] | None = None

    def ask(self, body: bytes, headers: bytes = b"") -> asyncio.Future[Answered]:
        """Send a chat, with further headers."""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._first, self._body, self._tail = 0.0, 0.0, b""
        self._held: int | None = None
        self._began = time.perf_counter()
        self.transport.write(_HEAD % (len(body), headers) + body)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-kvindex-held":
            self._held = int(value)

    def on_body(self, body: bytes) -> None:
        self._body = self._body or time.perf_counter() - self._began
        is_content = b'"content":"' in body or b'"content": "' in body
        is_empty = body.count(b'"content":""') + body.count(b'"content": ""')
        if not self._first and is_content and is_empty < body.count(b'"content":'):
            self._first = time.perf_counter() - self._began
        self._tail = (self._tail + body)[-1_000:]

    def on_message_complete(self) -> None:
        is_whole = self._parser.get_status_code() == 200 and b"[DONE]" in self._tail
        ended = time.perf_counter() - self._began
        self._end(Answered(is_whole, self._first, self._body, ended, self._held, self._tail))
        if not self._parser.should_keep_alive():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(Answered(is_whole=False))

    def _end(self, answered: Answered) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(answered)
