"""The handlers of the gateway's routes: from a client's request to an engine's answer.

A routed request runs as one generator, `Front._live`. Its first piece is empty and marks that the
head may go; the rest are the pieces of the answer. The connection pulls it, so that a slow client
holds back its own engine connection only, and closes it once the client has gone, at any stage.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any, Final

from kvindex.gateway.access import Access
from kvindex.gateway.calls import ROUTES, Call, CallError, error_reply, read_call
from kvindex.gateway.choosing import NoRankError, Routing
from kvindex.gateway.exchange import End, Exchange, Stage
from kvindex.gateway.models import UnknownModelError
from kvindex.gateway.passing import answer_headers, request_headers, with_fields
from kvindex.gateway.silence import Silence
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.upstream import Upstream
from kvindex.gateway.waiting import ShedError
from kvindex.gateway.wires import Answer, UpstreamError
from kvindex.service.http import (
    BrokenOffError,
    Headers,
    Refusal,
    RefusedError,
    Reply,
    Request,
    Route,
    Stream,
    Writer,
    json_reply,
)

_ID: Final = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
_METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_RETRY_AFTER: Final = (b"retry-after", b"1")


class Front:
    """Serves OpenAI's API in front of engines.

    Args:
        routing: chooses the ranks.
        upstream: the connections to the engines.
        tokenizing: finds the tokens of prompts.
        access: logs and counts the requests; of its own by default.
        passes_keys: whether engines receive the clients' `authorization`: not if it is the
            gateway's own.
        queue_within: seconds that a request may wait for a rank.
        head_within: seconds until an engine begins its answer. A whole answer begins once the
            engine has generated it.
        silent_within: seconds that an engine may send nothing of an answer that has begun.

    Attributes:
        access: as given.
        is_draining: whether `drain` was called.

    Owner: one event loop.
    """

    def __init__(
        self,
        routing: Routing,
        upstream: Upstream,
        tokenizing: Tokenizing,
        *,
        access: Access | None = None,
        passes_keys: bool = True,
        queue_within: float = 30.0,
        head_within: float = 600.0,
        silent_within: float = 300.0,
    ) -> None:
        self.access = access or Access()
        self.is_draining = False
        self._routing = routing
        self._upstream = upstream
        self._tokenizing = tokenizing
        self._passes_keys = passes_keys
        self._queue_within = queue_within
        self._head_within = head_within
        self._silent_within = silent_within
        self._prefix = secrets.token_hex(6)
        self._numbers = count(1)
        self._loop = asyncio.get_running_loop

    # Routes -------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """Return the routes; another method on one of their paths is a 405."""
        routes = [Route("POST", path, self._serve, cancels=True) for path in ROUTES]
        routes += [
            Route("POST", "/tokenize", self._tokenize, cancels=True),
            Route("GET", "/v1/models", self._models),
            Route("GET", "/health", self._health),
            Route("GET", "/ready", self._ready),
        ]
        others = [
            Route(method, route.path, _wrong_method(route.method))
            for route in routes
            for method in _METHODS
            if method != route.method
        ]
        return routes + others

    def not_found(self, request: Request) -> Reply:
        """Answer a path without a route."""
        self.access.count("(other)", 404)
        return error_reply(404, f"this gateway has no route {request.method} {request.path[:200]}")

    def drain(self, on_idle: Callable[[], object] = lambda: None) -> None:
        """Report "not ready" from now on; requests are served until the listener closes.

        Args:
            on_idle: called whenever no request is open; on the loop, or at once. From any thread.
        """
        self.is_draining = True
        self.access.on_idle = on_idle
        if not self.access.open:
            on_idle()

    def _health(self, _: Request) -> Reply:
        return Reply(200, b"", b"")

    def _ready(self, request: Request) -> Reply:
        if self.is_draining:
            return error_reply(503, "this gateway is being drained", headers=(_RETRY_AFTER,))
        if not self._routing.models():
            return error_reply(503, "no engine is known yet", headers=(_RETRY_AFTER,))
        return Reply(200, b"", b"")

    def _models(self, _: Request) -> Reply:
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "kvindex"}
            for name, servings in sorted(self._routing.models().items())
            if not all(serving.is_silent for serving in servings)
        ]
        return json_reply(200, {"object": "list", "data": listed})

    async def _tokenize(self, request: Request) -> Reply:
        """Pass a request to an engine of its model, and to the next one if that does not answer."""
        try:
            call = read_call(request.path, request.body)
            servings = list(self._routing.servings(call.model))
        except CallError as error:
            return _call_error(error)
        except UnknownModelError as error:
            return no_place_reply(error)
        turn = next(self._numbers)
        for serving in (servings[turn % len(servings) :] + servings[: turn % len(servings)])[:3]:
            fields = request_headers(request.headers, passes_keys=self._passes_keys)
            asking = self._upstream.ask(
                serving.url, request.path, request.body, fields, within=self._head_within
            )
            try:
                return Reply(*await asking)
            except UpstreamError:
                continue
        return error_reply(503, "no engine answered", headers=(_RETRY_AFTER,))

    # A routed request ---------------------------------------------------------------------------

    def _serve(self, request: Request) -> Reply | Awaitable[Reply | Stream]:
        try:
            call = read_call(request.path, request.body)
        except CallError as error:
            self.access.count(request.path, error.status)
            return _call_error(error)
        return self._answer(call, request)

    async def _answer(self, call: Call, request: Request) -> Reply | Stream:
        unique = f"{self._prefix}-{next(self._numbers)}"
        own = request.header(b"x-request-id") or b""
        request_id = own.decode() if _ID.fullmatch(own) else unique
        exchange = Exchange(call, request_id, self._loop().time())
        fields = request_headers(request.headers, passes_keys=self._passes_keys)
        silence = Silence(self._silent_within)
        pieces = self._live(exchange, fields, unique, silence)
        await pieces.__anext__()
        assert exchange.answer is not None
        headers, length = answer_headers(exchange.answer.headers)
        headers.append((b"x-request-id", request_id.encode()))
        if exchange.stage is Stage.ENDED:
            body = b"".join([piece async for piece in pieces])
            return Reply(exchange.status, body, b"", headers)
        return Stream(
            pieces,
            headers,
            exchange.status,
            length=None if exchange.is_stream else length,
            on_open=partial(_pass_on, exchange, silence, self._loop().time),
        )

    async def _live(
        self, exchange: Exchange, fields: Headers, unique: str, silence: Silence
    ) -> AsyncGenerator[bytes, None]:
        """Run a request: yield b"" once the head may go, then the pieces that are not empty.

        Raises:
            RefusedError: there is no answer of an engine; it has the gateway's own.
            BrokenOffError: the engine broke off.
        """
        time = self._loop().time
        self.access.begin()
        try:
            piece = await self._first_piece(exchange, fields, unique, silence)
            yield b""
            if piece:
                yield piece
            answer: Any = exchange.answer
            while exchange.stage is Stage.FORWARDED:
                if piece := await _next(exchange, answer, silence, time):
                    yield piece
            if exchange.end is End.BROKEN:
                raise BrokenOffError
        except CallError as error:
            exchange.refused(error.status, time())
            raise RefusedError(_call_error(error)) from None
        except (RefusedError, BrokenOffError):
            raise
        except Exception:
            exchange.refused(500, time(), End.FAILED)
            raise
        finally:
            silence.end()
            exchange.left(time())  # unless it has ended
            self.access.end(exchange)

    async def _first_piece(
        self, exchange: Exchange, fields: Headers, unique: str, silence: Silence
    ) -> bytes:
        """Send a request until an engine's answer may be forwarded; return what is kept of it."""
        call, time = exchange.call, self._loop().time
        try:
            found = await self._tokenizing.tokens(call, self._routing.servings(call.model))
            ids = found.token_ids
            length = found.length(call)
            exchange.tokenized(length, found.reason)
            piece = b""
            while exchange.stage is Stage.WAITING:
                place = await self._routing.reserve(
                    call.model,
                    ids,
                    prompt_tokens=length,
                    salt=call.salt,
                    reads_cache=call.reads_cache,
                    exclude=exchange.excluded,
                    request_id=unique,
                    deadline=time() + self._queue_within,
                )
                exchange.reserved(place, time())
                piece = await self._try(exchange, fields, silence)
        except (UnknownModelError, NoRankError, ShedError) as error:
            if not exchange.failures or isinstance(error, ShedError):
                reply = no_place_reply(error)
                exchange.refused(reply.status, time())
                raise RefusedError(reply) from None
            exchange.given_up(time())
        if exchange.end is End.NO_ANSWER:
            raise RefusedError(_no_answer(exchange))
        return piece

    async def _try(self, exchange: Exchange, fields: Headers, silence: Silence) -> bytes:
        """Send a request to the engine of its place, and read the answer while it is kept back."""
        call, place, time = exchange.call, exchange.place, self._loop().time
        assert place is not None
        try:
            answer = await self._upstream.send(
                place.serving.url,
                call.path,
                with_fields(call.body, place.pin.body_fields),
                [*fields, *place.pin.headers, (b"x-request-id", _engine_id(exchange))],
                head_within=self._head_within,
            )
        except UpstreamError as error:
            return exchange.failed(error.reason, time())
        exchange.answered(answer, time())
        piece = b""
        while exchange.stage is Stage.KEPT:
            piece = await _next(exchange, answer, silence, time)
        return piece


def refusal_reply(refusal: Refusal) -> Reply:
    """Return the answer to a request that the guard refuses, in OpenAI's form."""
    headers = refusal.reply.headers
    return error_reply(refusal.status, refusal.message, code=refusal.reason, headers=headers)


async def _next(
    exchange: Exchange, answer: Answer, silence: Silence, time: Callable[[], float]
) -> bytes:
    """Read a piece of an answer; return what of it is forwarded now."""
    silence.begin(time())
    try:
        data = await answer.read()
    except UpstreamError as error:
        return exchange.failed(error.reason, time())
    except asyncio.CancelledError:
        if not silence.is_over:
            raise
        return exchange.failed("silent", time())
    finally:
        silence.pause()
    return exchange.received(data, time()) if data else exchange.completed(time())


def _pass_on(
    exchange: Exchange, silence: Silence, time: Callable[[], float], writer: Writer
) -> None:
    """Have the pieces of an answer written as they arrive, while its reader waits for them."""
    is_ready, write, received = writer.is_ready, writer.write, exchange.received

    def forward(data: bytes) -> bool:
        if not is_ready():
            return False
        silence.since = now = time()
        if piece := received(data, now):
            write(piece)
        return True

    answer: Any = exchange.answer
    answer.sink = forward


def _engine_id(exchange: Exchange) -> bytes:
    """Return the id for the engine: it may still know that of a try before."""
    tries = exchange.tries
    return (exchange.request_id if tries == 1 else f"{exchange.request_id}-{tries}").encode()


def _wrong_method(allowed: str) -> Callable[[Request], Reply]:
    def refuse(request: Request) -> Reply:
        message = f"{request.path} accepts {allowed}, not {request.method}"
        return error_reply(405, message, headers=((b"allow", allowed.encode()),))

    return refuse


def _call_error(error: CallError) -> Reply:
    return error_reply(error.status, str(error), param=error.param, code=error.code)


def no_place_reply(error: UnknownModelError | NoRankError | ShedError) -> Reply:
    """Return the answer to a request that has no rank, in OpenAI's form."""
    if isinstance(error, UnknownModelError) and not error.known:
        return error_reply(503, "no engine is known yet", code="no_rank", headers=(_RETRY_AFTER,))
    if isinstance(error, UnknownModelError):
        return error_reply(404, str(error), param="model", code="model_not_found")
    if isinstance(error, ShedError):
        after = (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))
        return error_reply(429, str(error), code="no_capacity", headers=(after,))
    return error_reply(503, str(error), code="no_rank", headers=(_RETRY_AFTER,))


def _no_answer(exchange: Exchange) -> Reply:
    """Return the answer to a request that no engine answered. It does not name the engines."""
    reasons = ", ".join(failure.reason for failure in exchange.failures)
    headers = (_RETRY_AFTER,) if exchange.status == 503 else ()
    message = f"no engine answered, after {len(exchange.failures)} tries: {reasons}"
    return error_reply(exchange.status, message, code="no_answer", headers=headers)
