"""One request's ext_proc stream: the proxy's messages in, the picker's answers out.

Bodies are FULL_DUPLEX_STREAMED, in both directions: nothing is answered until a request's body has
come; then come the headers' answer and the body. Other modes are refused: without the answer, the
end of a request is not known. The stream ends with the request, whatever its reason: its booking
ends with it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from itertools import count
from typing import Any, Final

import msgspec

from kvindex.gateway.access import Access
from kvindex.gateway.calls import ROUTES, Call, CallError, error_reply, read_call
from kvindex.gateway.choosing import LocalRouting, NoRankError, Place
from kvindex.gateway.exchange import Exchange, Stage
from kvindex.gateway.front import no_place_reply
from kvindex.gateway.models import Serving, UnknownModelError
from kvindex.gateway.passing import with_fields
from kvindex.gateway.picker import messages
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.waiting import ShedError
from kvindex.service.http import Headers, Reply

_DUPLEX: Final = 4  # ProcessingMode.FULL_DUPLEX_STREAMED


class _Head(msgspec.Struct):
    """An answer's head, as the exchange reads it; the proxy has the connection."""

    status: int
    headers: Headers

    def close(self) -> None:
        """Leave the connection to the proxy."""


class Picker:
    """What all streams share.

    Args:
        routing: reserves ranks.
        tokenizing: finds the tokens of prompts.
        most_bytes: of a request's body.
        queue_within: seconds that a request may wait for a rank.

    Attributes:
        access: counts and logs the requests.

    Owner: one event loop.
    """

    def __init__(
        self,
        routing: LocalRouting,
        tokenizing: Tokenizing,
        *,
        most_bytes: int,
        queue_within: float = 30.0,
    ) -> None:
        self.routing = routing
        self.tokenizing = tokenizing
        self.most_bytes = most_bytes
        self.queue_within = queue_within
        self.access = Access()
        self._prefix = secrets.token_hex(6)
        self._numbers = count(1)

    def new_id(self) -> str:
        """Return an id for a booking."""
        return f"{self._prefix}-{next(self._numbers)}"

    async def process(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Answer one stream's messages; its booking ends with it."""
        stream = _PickedRequest(self)
        try:
            async for message in requests:
                async for answer in stream.answers(message):
                    yield answer
                if stream.is_over:
                    return
        finally:
            stream.end()


class _PickedRequest:
    """One stream. Messages out of order or twice change nothing but what they say themselves."""

    def __init__(self, picker: Picker) -> None:
        self.is_over = False  # the request has the picker's own answer
        self._picker = picker
        self._is_duplex = True  # unless the proxy says otherwise
        self._path = ""
        self._request_id = ""
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] | None = []  # until it is whole
        self._size = 0
        self._exchange: Exchange | None = None
        self._is_counted = False
        self._time = asyncio.get_running_loop().time

    async def answers(self, message: Any) -> AsyncIterator[Any]:
        """Yield the answers to one message."""
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._is_duplex = {modes.request_body_mode, modes.response_body_mode} == {_DUPLEX}
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            async for answer in self._head(message):
                yield answer
        elif kind == "request_body":
            async for answer in self._part(message.request_body):
                yield answer
        elif kind == "response_headers":
            self._answered(message)
            yield messages.nothing(kind)
        elif kind == "response_body":
            for answer in self._received(message.response_body):
                yield answer
        elif kind is not None:  # trailers
            if kind == "response_trailers":
                if rest := self._completed():
                    for answer in messages.pieces("response_body", rest, is_last=False):
                        yield answer
            elif self._body is not None:
                async for answer in self._whole(is_end=False):
                    yield answer
            yield messages.nothing(kind)

    def end(self) -> None:
        """End with the stream: what has not ended has been left by its client, or cut."""
        exchange = self._exchange
        if exchange is not None:
            exchange.left(self._time())
            if self._is_counted:
                self._is_counted = False
                self._picker.access.end(exchange)

    # The request --------------------------------------------------------------------------------

    async def _head(self, message: Any) -> AsyncIterator[Any]:
        fields = dict(messages.headers_of(message.request_headers))
        self._path = fields.get(b":path", b"").decode("latin-1").partition("?")[0]
        self._request_id = fields.get(b"x-request-id", b"").decode("latin-1")[:128]
        self._subset = messages.subset_of(message)
        if message.request_headers.end_of_stream:  # a GET: any engine
            self._body = None
            yield self._anywhere()[0]
        elif not self._is_duplex:
            text = "this picker needs FULL_DUPLEX_STREAMED bodies of requests and answers"
            yield self._refuse(error_reply(500, text, code="ext_proc_mode"))

    async def _part(self, part: Any) -> AsyncIterator[Any]:
        if self._body is None:
            return
        self._body.append(part.body)
        self._size += len(part.body)
        if self._size > self._picker.most_bytes:
            text = f"the body is longer than {self._picker.most_bytes} bytes"
            yield self._refuse(error_reply(413, text, code="body"))
        elif part.end_of_stream:
            async for answer in self._whole(is_end=True):
                yield answer

    async def _whole(self, *, is_end: bool) -> AsyncIterator[Any]:
        """Send a request, whose body is whole, to its rank."""
        body, self._body = b"".join(self._body or ()), None
        try:
            call = read_call(self._path, body) if self._path in ROUTES else None
            place = None if call is None else await self._reserve(call)
        except CallError as error:
            reply = error_reply(error.status, str(error), param=error.param, code=error.code)
            yield self._refuse(reply)
            return
        except (UnknownModelError, NoRankError, ShedError) as error:
            yield self._refuse(no_place_reply(error))
            return
        if call is None or place is None:
            for answer in self._anywhere(body, is_end=is_end):
                yield answer
            return
        sent = with_fields(call.body, place.pin.body_fields)
        endpoint = messages.endpoint_of(place.serving.url)
        length = len(sent) if sent != body else None
        yield messages.destination(endpoint, place.pin.headers, length)
        for answer in messages.pieces("request_body", sent, is_last=is_end):
            yield answer

    async def _reserve(self, call: Call) -> Place:
        picker, time = self._picker, self._time
        exchange = Exchange(call, self._request_id or picker.new_id(), time())
        self._exchange = exchange
        picker.access.begin()
        self._is_counted = True
        try:
            servings = picker.routing.servings(call.model)
            found = await picker.tokenizing.tokens(call, servings)
            length = found.length(call)
            exchange.tokenized(length, found.reason)
            place = await picker.routing.reserve(
                call.model,
                found.token_ids,
                prompt_tokens=length,
                salt=call.salt,
                reads_cache=call.reads_cache,
                exclude=(),
                request_id=picker.new_id(),
                deadline=time() + picker.queue_within,
                workers=self._workers(servings),
            )
        except (UnknownModelError, NoRankError, ShedError, CallError) as error:
            status = error.status if isinstance(error, CallError) else no_place_reply(error).status
            exchange.refused(status, time())
            raise
        exchange.reserved(place, time())
        return place

    def _workers(self, servings: Sequence[Serving]) -> Collection[str]:
        """Return the engines that a request may go to: those with an address, in its subset."""
        subset = self._subset
        found = messages.endpoints({each.worker: each.url for each in servings})
        if not found:
            raise NoRankError({"named without an address": len(servings)})
        workers = [
            worker
            for endpoint, worker in found.items()
            if subset is None or messages.is_in(endpoint, subset)
        ]
        if not workers:
            raise NoRankError({"not in the request's subset": len(found)})
        return workers

    def _anywhere(self, body: bytes | None = None, *, is_end: bool = True) -> list[Any]:
        """Return the answers that send a request without a prompt to any engine."""
        routing = self._picker.routing
        servings = [each for name in routing.models() for each in routing.servings(name)]
        found = [
            endpoint
            for endpoint in sorted(messages.endpoints({each.worker: each.url for each in servings}))
            if self._subset is None or messages.is_in(endpoint, self._subset)
        ]
        if not found:
            return [self._refuse(error_reply(503, "no engine is known for this request"))]
        endpoint = found[secrets.randbelow(len(found))]
        answers = [messages.destination(endpoint, (), None)]
        if body is not None:
            answers += messages.pieces("request_body", body, is_last=is_end)
        return answers

    def _refuse(self, reply: Reply) -> Any:
        self.is_over = True
        return messages.refusal(reply)

    # The answer ---------------------------------------------------------------------------------

    def _answered(self, message: Any) -> None:
        exchange = self._exchange
        if exchange is None or exchange.stage is not Stage.SENT:
            return
        self._move(exchange, messages.served_by(message))
        fields = messages.headers_of(message.response_headers)
        status = next((value for name, value in fields if name == b":status"), b"0")
        head = _Head(int(status) if status.isdigit() else 0, fields)
        exchange.answered(head, self._time())
        if exchange.failures:  # there is no other try here
            exchange.given_up(self._time())
        elif message.response_headers.end_of_stream:
            self._completed()

    def _move(self, exchange: Exchange, endpoint: str) -> None:
        """Move the load if the proxy has sent the request to another engine."""
        place = exchange.place
        if not endpoint or place is None or endpoint == messages.endpoint_of(place.serving.url):
            return
        urls = {
            each.worker: each.url for each in self._picker.routing.servings(exchange.call.model)
        }
        worker = messages.endpoints(urls).get(endpoint)
        if worker is not None:
            self._picker.routing.move(place, worker)

    def _received(self, part: Any) -> Iterator[Any]:
        exchange, body = self._exchange, part.body
        if exchange is not None and exchange.stage in (Stage.KEPT, Stage.FORWARDED):
            body = exchange.received(body, self._time())
            if part.end_of_stream:
                body += exchange.completed(self._time())
        if body or part.end_of_stream:  # an event may not be whole yet
            yield from messages.pieces("response_body", body, is_last=part.end_of_stream)

    def _completed(self) -> bytes:
        """End with the answer; return what was kept back of it."""
        return b"" if self._exchange is None else self._exchange.completed(self._time())
