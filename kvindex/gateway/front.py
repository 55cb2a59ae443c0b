"""The handlers of the gateway's routes: from a client's request to an engine's answer.

The task of a request waits for what it must decide: for a rank, for the head of an engine's
answer, for its first event, for a client that reads slowly, and for the end. The pieces of an
answer pass it by: the engine's connection gives each to the request's `Exchange`, and writes what
that forwards to the client. While a client does not read, its own engine's connection is held back,
and no other. A client that leaves cancels the task, at any stage; nothing else does.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final

import msgspec

from kvindex.gateway.access import Access
from kvindex.gateway.calls import (
    BY_LOAD,
    MESSAGES,
    RESPONSES,
    ROUTES,
    TOKENIZE,
    Call,
    CallError,
    answer_headers,
    error_reply,
    inflated,
    read_call,
    reads_long,
    request_headers,
    with_fields,
)
from kvindex.gateway.pairs import Pairs
from kvindex.gateway.request_life import End, Exchange, Stage
from kvindex.gateway.routing import NoRankError, Routing, Serving, UnknownModelError
from kvindex.gateway.settings import MOST_BODY
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.tracing import TRACE_FIELDS
from kvindex.gateway.upstream import Answer, Upstream, UpstreamError
from kvindex.gateway.waiting import ShedError
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
_RESPONSE: Final = re.compile(rf"{RESPONSES}/([A-Za-z0-9_.:-]{{1,128}})(?:/cancel|/input_items)?")
_FOLLOWS: Final = ("GET", "POST", "DELETE")  # methods of requests about a response
_RETRY_AFTER: Final = (b"retry-after", b"1")


class Front:
    """Serves OpenAI's API in front of engines; settings as in `GatewaySettings`.

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
        trusts_clients: bool = True,
        queue_within: float = 30.0,
        head_within: float = 600.0,
        head_hold: float = 1.0,
        explains: bool = False,
        most_body: int = MOST_BODY,
        silent_within: float = 300.0,
        local_tokens: int = 2_048,
    ) -> None:
        self.access = access or Access()
        self.is_draining = False
        self._routing = routing
        self._upstream = upstream
        self._tokenizing = tokenizing
        # Engines receive the clients' `authorization`, unless it is the gateway's own.
        self._passes_keys = passes_keys
        # Who needs a key is not trusted to name hosts that engines connect to.
        self._read = partial(read_call, is_trusted=trusts_clients)
        self._queue_within = queue_within
        self._head_within = head_within
        self._head_hold = head_hold
        self._explains = explains
        self._most_body = most_body  # bytes, once they are inflated
        self._silent_within = silent_within
        self._pairs = Pairs(routing, upstream, local_tokens, head_within)
        self._prefix = secrets.token_hex(6)
        self._numbers = count(1)
        self._loop = asyncio.get_running_loop

    # Routes -------------------------------------------------------------------------------------

    def routes(self) -> list[Route]:
        """Return the routes; another method on one of their paths is a 405."""
        routes = [Route("POST", path, self._serve, cancels=True) for path in (*ROUTES, *BY_LOAD)]
        routes += [
            *(
                Route(method, f"{RESPONSES}/*", self._follow_up, cancels=True)
                for method in _FOLLOWS
            ),
            Route("POST", TOKENIZE, self._tokenize, cancels=True),
            Route("GET", "/v1/models", self._models),
            Route("GET", "/v1/models/*", self._model),
            Route("GET", "/health", lambda _: Reply(200, b"", b"")),
            Route("GET", "/ready", self._ready),
        ]

        def refuse(request: Request, allowed: str) -> Reply:
            message = f"{request.path} accepts {allowed}, not {request.method}"
            return error_reply(405, message, headers=((b"allow", allowed.encode()),))

        # The server's own 405 has no body: clients of this API read errors in OpenAI's form.
        methods: dict[str, list[str]] = {}
        for route in routes:
            methods.setdefault(route.path, []).append(route.method)
        others = [
            Route(method, path, partial(refuse, allowed=", ".join(allowed)))
            for path, allowed in methods.items()
            for method in _METHODS
            if method not in allowed
        ]
        return routes + others

    def not_found(self, request: Request) -> Reply:
        """Answer a path without a route."""
        self.access.count("(other)", 404)
        return error_reply(404, f"this gateway has no route {request.method} {request.path[:200]}")

    def drain(self, on_idle: Callable[[], object] = lambda: None) -> None:
        """Report "not ready" from now on, and call `on_idle` whenever no request is open.

        Requests are still served, until the listener closes. From any thread.
        """
        self.is_draining = True
        self.access.on_idle = on_idle
        if not self.access.open:
            on_idle()

    def _ready(self, request: Request) -> Reply:
        if self.is_draining:
            return error_reply(503, "this gateway is being drained", headers=(_RETRY_AFTER,))
        # It would refuse every request: a balancer in front has others to send them to.
        if not self._routing.is_ready:
            text = "no engine is there that would answer"
            return error_reply(503, text, headers=(_RETRY_AFTER,))
        return Reply(200, b"", b"")

    def _models(self, _: Request) -> Reply:
        return json_reply(200, {"object": "list", "data": self._routing.listed()})

    def _model(self, request: Request) -> Reply:
        name = request.path.removeprefix("/v1/models/")
        listed = self._routing.listed()
        entry = next((entry for entry in listed if entry["id"] == name), None)
        if entry is None:
            return no_rank_reply(UnknownModelError(name, [entry["id"] for entry in listed]))
        return json_reply(200, entry)

    async def _follow_up(self, request: Request) -> Reply | Stream:
        """Pass a question about a response on to the engine that has made it.

        Its answer passes as it comes: it may be the stream of a response that is still generated.
        """
        try:
            serving = await maker_of(request.path, self._routing)
        except CallError as error:
            return call_error_reply(error)
        if serving is None:  # the path was decoded: anything may stand in it
            return self.not_found(request)
        fields = request_headers(request.headers, passes_keys=self._passes_keys)
        query = b"?" + request.query if request.query else b""
        try:
            answer = await self._upstream.send(
                serving.url,
                request.path + query.decode("latin-1"),
                request.body,
                fields,
                method=request.method,
                head_within=self._head_within,
                purpose="followed",
            )
        except UpstreamError as error:
            return error_reply(502, f"its engine did not answer: {error.reason}", code="no_answer")

        async def pass_all(writer: Writer) -> None:
            def receive(piece: bytes) -> bool:
                writer.write(piece)
                return writer.is_ready()

            try:
                while await answer.pass_to(receive, self._silent_within):
                    await writer.drain()
            except UpstreamError:
                raise BrokenOffError from None
            finally:
                answer.close()

        headers, length = answer_headers(answer.headers)
        return Stream(pass_all, headers, answer.status, length=length)

    async def _tokenize(self, request: Request) -> Reply:
        """Pass a request to an engine of its model, and to the next one if that does not answer."""
        try:
            call = read_call(request.path, request.body)
            servings = list(self._routing.servings(call.model))
        except CallError as error:
            return call_error_reply(error)
        except UnknownModelError as error:
            return no_rank_reply(error)
        turn = next(self._numbers) % len(servings)  # each time another one first
        for serving in (servings[turn:] + servings[:turn])[:3]:
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
        coding = request.header(b"content-encoding")
        if coding is not None and coding.strip().lower() != b"identity":
            return self._serve_coded(request, coding.strip().lower())
        if reads_long(request.body):
            return self._serve_long(request)
        # At once, without a task: what is refused costs the least.
        try:
            call = self._read(request.path, request.body)
        except CallError as error:
            return self._refused(request, error)
        return self._answer(call, request)

    async def _serve_coded(self, request: Request, coding: bytes) -> Reply | Stream:
        """Inflate a body first: engines receive it plain, since not all of them read gzip."""
        try:
            if coding != b"gzip":
                text = f"bodies may be gzip or plain, not {coding.decode('latin-1')[:40]}"
                raise CallError(415, text, param="content-encoding")
            body = await asyncio.to_thread(inflated, request.body, self._most_body)
            if not request.hold(len(body)):
                raise CallError(503, "too many bytes of bodies are being served", code="bodies")
        except CallError as error:
            return self._refused(request, error)
        headers = [field for field in request.headers if field[0] != b"content-encoding"]
        plain = replace(request, body=body, headers=headers)
        return await self._serve_long(plain)

    async def _serve_long(self, request: Request) -> Reply | Stream:
        try:
            call = await asyncio.to_thread(self._read, request.path, request.body)
        except CallError as error:
            return self._refused(request, error)
        return await self._answer(call, request)

    def _refused(self, request: Request, error: CallError) -> Reply:
        self.access.count(request.path, error.status)
        return in_form(request.path, call_error_reply(error))

    async def _answer(self, call: Call, request: Request) -> Reply | Stream:
        # Two open requests may have the same id of their client, and bookings must not.
        unique = f"{self._prefix}-{next(self._numbers)}"
        own = request.header(b"x-request-id") or b""
        request_id = own.decode() if _ID.fullmatch(own) else unique
        exchange = Exchange(call, request_id, self._loop().time())
        fields = request_headers(request.headers, passes_keys=self._passes_keys)
        self.access.begin(exchange, request.headers)
        if exchange.spans is not None:
            fields = [field for field in fields if field[0] not in TRACE_FIELDS]
        try:
            answer, kept = await self._begun(exchange, fields, unique)
        except RefusedError as error:
            self._end(exchange, error)
            return in_form(call.path, error.reply)
        except BaseException as error:
            self._end(exchange, error)
            raise
        headers, length = answer_headers(answer.headers)
        headers.append((b"x-request-id", request_id.encode()))
        if self._explains and (reservation := exchange.reservation) is not None:
            explained = reservation.explained.items()
            headers += [(name.encode(), value.encode()) for name, value in explained]
            if (prefiller := exchange.prefiller) is not None and prefiller is not reservation:
                headers.append((b"x-kvindex-prefill", str(prefiller.rank).encode()))
        # A short whole answer is complete by now: one write, and no chunks.
        if exchange.stage is Stage.ENDED:
            self._end(exchange)
            return Reply(exchange.status, kept, b"", headers)
        return Stream(
            partial(self._forward, exchange, answer, kept),
            headers,
            exchange.status,
            length=None if exchange.is_stream else length,
        )

    async def _begun(
        self, exchange: Exchange, fields: Headers, unique: str
    ) -> tuple[Answer, bytes]:
        """Send a request until an engine's answer may be forwarded; return what is kept of it."""
        call, time = exchange.call, self._loop().time
        try:
            prompt = await self._tokenizing.tokens(call, await self._routing.known(call.model))
            length = prompt.length(call)
            exchange.tokenized(length, prompt.reason)
            workers = await makers_of(call, self._routing)
            kept: list[bytes] = []
            while exchange.stage is Stage.WAITING:
                reservation = await self._routing.reserve(
                    call.model,
                    prompt.token_ids,
                    prompt_tokens=length,
                    salt=call.salt,
                    reads_cache=call.reads_cache,
                    exclude=exchange.excluded,
                    request_id=unique,
                    deadline=time() + self._queue_within,
                    workers=workers,
                    media=prompt.media,
                    may_pull=call.may_pull,
                )
                exchange.reserved(reservation, time())
                if reservation.serving.role == "decode":
                    await self._pairs.prefill(exchange, prompt, fields, f"{unique}-p")
                # The engine may still know the id of a try before, and refuse it.
                tries = exchange.tries
                request_id = exchange.request_id if tries == 1 else f"{exchange.request_id}-{tries}"
                sending = self._upstream.send(
                    reservation.serving.url,
                    call.path,
                    with_fields(call.body, exchange.own_fields),
                    [*fields, *exchange.own_headers, (b"x-request-id", request_id.encode())],
                    head_within=self._head_within,
                )
                is_apart = exchange.prefiller is not exchange.reservation
                try:
                    answer = await (self._pairs.told(sending) if is_apart else sending)
                except UpstreamError as error:
                    exchange.failed(error.reason, time())
                    continue
                exchange.answered(answer, time())
                await self._keep_back(exchange, answer, kept)
        except CallError as error:
            exchange.refused(error.status, time())
            raise RefusedError(call_error_reply(error)) from None
        except (UnknownModelError, NoRankError, ShedError) as error:
            # After failures there may be no other rank: then they are the reason, not "no rank".
            if not exchange.failures or isinstance(error, ShedError):
                reply = no_rank_reply(error)
                exchange.refused(reply.status, time())
                raise RefusedError(reply) from None
            exchange.given_up(time())
        if exchange.end is End.NO_ANSWER:
            # Not the engines' names: clients must not learn of what is behind.
            reasons = ", ".join(failure.reason for failure in exchange.failures)
            message = f"no engine answered, after {len(exchange.failures)} tries: {reasons}"
            headers = (_RETRY_AFTER,) if exchange.status == 503 else ()
            reply = error_reply(exchange.status, message, code="no_answer", headers=headers)
            raise RefusedError(reply)
        return answer, b"".join(kept)

    async def _keep_back(self, exchange: Exchange, answer: Answer, kept: list[bytes]) -> None:
        """Keep an answer back until it may be forwarded, or has failed: for a while, a stream."""

        def is_kept() -> bool:
            return exchange.stage is Stage.KEPT

        timer = self._loop().call_later(self._head_hold, answer.stop)
        try:
            await self._pass_on(exchange, answer, kept.append, is_kept)
        finally:
            timer.cancel()
        if is_kept():  # its time is over
            kept.append(exchange.held())
        if is_kept():  # a whole answer is kept back to its end
            await self._pass_on(exchange, answer, kept.append, is_kept)

    async def _forward(
        self, exchange: Exchange, answer: Answer, kept: bytes, writer: Writer
    ) -> None:
        """Write an answer to the client; raises BrokenOffError if the engine breaks off."""
        try:
            if kept:  # an empty chunk would end the body
                writer.write(kept)
            while exchange.stage is Stage.FORWARDED:
                await writer.drain()  # raises once the client has gone
                await self._pass_on(exchange, answer, writer.write, writer.is_ready)
            if exchange.end is End.BROKEN:  # else the server would end the body as a whole one
                raise BrokenOffError
        except BaseException as error:
            self._end(exchange, error)
            raise
        self._end(exchange)

    async def _pass_on(
        self,
        exchange: Exchange,
        answer: Answer,
        write: Callable[[bytes], None],
        is_ready: Callable[[], bool],
    ) -> None:
        """Write what is forwarded of an answer while `is_ready`, at most to the answer's end."""
        if exchange.stage not in (Stage.KEPT, Stage.FORWARDED):  # its status is no answer
            return
        # Bound once: what follows runs for each token.
        time, received = self._loop().time, exchange.received

        def receive(data: bytes) -> bool:
            if piece := received(data, time()):
                write(piece)
            return is_ready()

        try:
            if await answer.pass_to(receive, self._silent_within):
                return
            last = exchange.completed(time())
        except UpstreamError as error:
            last = exchange.failed(error.reason, time())
        if last:
            write(last)

    def _end(self, exchange: Exchange, error: BaseException | None = None) -> None:
        """Log and count a request, which ends as its client leaves unless it has ended before."""
        now = self._loop().time()
        # What clients do is no failure of the gateway; an exchange that has ended stays as it is.
        if isinstance(error, Exception) and not isinstance(error, ConnectionAbortedError):
            exchange.refused(500, now, End.FAILED)
        exchange.left(now)
        self.access.end(exchange)


async def maker_of(path: str, routing: Routing) -> Serving | None:
    """Return the engine with the response that a path is about; None: about none.

    Raises CallError if it is not known which engine that is.
    """
    if (found := _RESPONSE.fullmatch(path)) is None:
        return None
    if (serving := await routing.maker(found[1])) is None:
        raise _unknown_response(found[1])
    return serving


async def makers_of(call: Call, routing: Routing) -> Collection[str] | None:
    """Return the engines that can go on from the response before; None: any. Raises CallError."""
    before = call.fields.get("previous_response_id") if call.path == RESPONSES else None
    if not isinstance(before, str) or not before:
        return None
    if sum(serving.role != "prefill" for serving in routing.servings(call.model)) < 2:
        return None  # it knows best what it has
    if (serving := await routing.maker(before)) is None:
        raise _unknown_response(before)
    return [serving.worker]


def _unknown_response(response_id: str) -> CallError:
    """Return the error for a response of which it is not known which engine has made it."""
    text = (
        f"no engine is known to have the response {response_id[:128]!r}: it was made before this "
        "gateway began, by another gateway, or by an engine that has gone"
    )
    return CallError(404, text, param="previous_response_id", code="response_not_found")


def in_form(path: str, reply: Reply) -> Reply:
    """Return an error of ours in the form that clients of a route read."""
    if not path.startswith(MESSAGES) or reply.status < 400:
        return reply
    error = msgspec.json.decode(reply.body)["error"]
    kind = _ANTHROPICS.get(reply.status, "api_error" if reply.status >= 500 else error["type"])
    body = {"type": "error", "error": {"type": kind, "message": error["message"]}}
    return reply._replace(body=msgspec.json.encode(body))


_ANTHROPICS: Final = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def refusal_reply(refusal: Refusal, path: str) -> Reply:
    """Return the answer to a request that the guard refuses, in the form of its route."""
    headers = refusal.reply.headers
    reply = error_reply(refusal.status, refusal.message, code=refusal.reason, headers=headers)
    return in_form(path, reply)


def call_error_reply(error: CallError) -> Reply:
    """Return the answer to a request that is refused for what it asks."""
    return error_reply(error.status, str(error), param=error.param, code=error.code)


def no_rank_reply(error: UnknownModelError | NoRankError | ShedError) -> Reply:
    """Return the answer to a request that has no rank, in OpenAI's form."""
    if isinstance(error, UnknownModelError) and not error.known:
        return error_reply(503, "no engine is known yet", code="no_rank", headers=(_RETRY_AFTER,))
    if isinstance(error, UnknownModelError):
        return error_reply(404, str(error), param="model", code="model_not_found")
    if isinstance(error, ShedError):
        after = (b"retry-after", b"%d" % max(1, math.ceil(error.retry_after)))
        return error_reply(429, str(error), code="no_capacity", headers=(after,))
    return error_reply(503, str(error), code="no_rank", headers=(_RETRY_AFTER,))
