"""One request's ext_proc stream: the proxy's messages in, the picker's answers out.

A request's body is FULL_DUPLEX_STREAMED: nothing is answered until it has come; then come the
headers' answer and the body. Or it is BUFFERED: the head is answered at once, and the answer to the
body has all changes.

The body of its answer is FULL_DUPLEX_STREAMED. Then the stream ends with the request, whatever its
reason: its booking ends with it. Other modes are refused, since the end of a request would not be
known. Our own Envoy sends no answers, it reports them (`Reports`): its Lua program when the content
of a stream begins, its access log each request's end, and open ones each minute. Both name the
request by the metadata that the picker gave with its head.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import Any, Final

import msgspec

from kvindex import Rank
from kvindex.gateway.access import Access
from kvindex.gateway.calls import (
    RESPONSES,
    ROUTES,
    Call,
    CallError,
    error_reply,
    read_call,
    reads_long,
    with_fields,
)
from kvindex.gateway.events import Usage, is_failure, usage_of
from kvindex.gateway.front import (
    call_error_reply,
    in_form,
    maker_of,
    makers_of,
    no_rank_reply,
)
from kvindex.gateway.picker import messages
from kvindex.gateway.picker.messages import NOTES
from kvindex.gateway.request_life import CLIENT_LEFT, MOST_TRIES, End, Exchange, Failure, Stage
from kvindex.gateway.routing import (
    NoRankError,
    Reservation,
    Routing,
    Serving,
    UnknownModelError,
    pin,
)
from kvindex.gateway.tokens import Tokenizing
from kvindex.gateway.waiting import ShedError
from kvindex.service.http import Headers, Reply

_BUFFERED, _DUPLEX = 2, 4  # ProcessingMode.BUFFERED, FULL_DUPLEX_STREAMED
_SERVED_BY: Final = "x-conformance-test-served-endpoint"


class _Head(msgspec.Struct):
    """An answer's head, as the exchange reads it; the proxy has the connection."""

    status: int
    headers: Headers

    def close(self) -> None:
        """Leave the connection to the proxy."""


class Picker:
    """What all streams share; settings as in `PickerSettings`. Owner: one event loop."""

    def __init__(
        self,
        routing: Routing,
        tokenizing: Tokenizing,
        *,
        most_bytes: int,
        queue_within: float = 30.0,
        access: Access | None = None,
        engine_token: Callable[[], str | None] = lambda: None,
        most_endpoints: int = MOST_TRIES,
        has_reports: bool = False,
        explains: bool = False,
        is_conformance: bool = False,
        trusts_clients: bool = True,
    ) -> None:
        self.routing = routing
        self.read = partial(read_call, is_trusted=trusts_clients)
        self.tokenizing = tokenizing
        self.most_bytes = most_bytes
        self.queue_within = queue_within
        self.access = access or Access()
        self.engine_token = engine_token
        self.most_endpoints = min(most_endpoints, MOST_TRIES)
        self.explains = explains
        self.is_conformance = is_conformance
        self.reports: Reports | None = None  # our own Envoy's: other proxies send the answers here
        if has_reports:
            # The loop's own, once it runs: exchanges that the picker's streams begin have its time.
            self.reports = Reports(
                self.access, self.move, lambda: asyncio.get_running_loop().time()
            )
        self._prefix = secrets.token_hex(6)
        self._numbers = count(1)

    def new_id(self) -> str:
        """Return an id for a booking."""
        return f"{self._prefix}-{next(self._numbers)}"

    def move(self, exchange: Exchange, endpoint: str) -> None:
        """Move the load if the proxy has sent the request to another engine."""
        reservation = exchange.reservation
        if (
            not endpoint
            or reservation is None
            or endpoint == messages.endpoint_of(reservation.serving.url)
        ):
            return
        try:
            servings = self.routing.servings(exchange.call.model)
        except UnknownModelError:  # the last of its engines has gone meanwhile
            return
        for serving in servings:
            if messages.endpoint_of(serving.url) == endpoint:
                reservation.move(serving)

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
    """One stream."""

    # Messages out of order or twice change nothing but what they say themselves.

    def __init__(self, picker: Picker) -> None:
        self.is_over = False  # the request has the picker's own answer
        self._picker = picker
        self._key = picker.new_id()
        self._modes = (_DUPLEX, _DUPLEX)  # of the bodies, unless the proxy says otherwise
        self._path = ""
        self._request_id = ""
        self._headers: Headers = ()
        self._brings_key = False
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] | None = []  # until it is whole
        self._size = 0
        self._exchange: Exchange | None = None
        self._is_counted = False  # by this stream, and not yet at its end
        self._time = asyncio.get_running_loop().time

    async def answers(self, message: Any) -> AsyncIterator[Any]:
        """Yield the answers to one message."""
        if message.HasField("protocol_config"):  # of newer proxies, in their first message
            modes = message.protocol_config
            self._modes = (modes.request_body_mode, modes.response_body_mode)
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            async for answer in self._head(message):
                yield answer
        elif kind == "request_body":
            async for answer in self._part(message.request_body):
                yield answer
        elif kind == "response_headers":
            self._answered(message)
            fields = {}
            if self._picker.is_conformance:
                fields[_SERVED_BY] = messages.served_by(message)
            if self._picker.explains and self._exchange and self._exchange.reservation:
                fields |= self._exchange.reservation.explained
            yield messages.with_fields(fields)
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
        if exchange is not None and self._is_counted:
            self._is_counted = False
            exchange.left(self._time())
            self._picker.access.end(exchange)

    # The request --------------------------------------------------------------------------------

    @property
    def _is_buffered(self) -> bool:
        return self._modes[0] == _BUFFERED

    async def _head(self, message: Any) -> AsyncIterator[Any]:
        self._headers = messages.headers_of(message.request_headers)
        fields = dict(self._headers)
        self._path = fields.get(b":path", b"").decode("latin-1").partition("?")[0]
        self._request_id = fields.get(b"x-request-id", b"").decode("latin-1")[:128]
        self._brings_key = b"authorization" in fields
        self._subset = messages.subset_of(message)
        if self._picker.is_conformance and (wish := fields.get(messages.STEERS.encode())):
            self._subset = frozenset(part.strip() for part in wish.decode("latin-1").split(","))
        # The streamed head is not answered yet: where it goes depends on the body.
        if message.request_headers.end_of_stream:  # a GET: any engine
            self._body = None
            async for answer in self._anywhere():
                yield answer
        elif self._modes[0] not in (_BUFFERED, _DUPLEX) or not (
            self._modes[1] == _DUPLEX or self._picker.reports is not None
        ):
            text = (
                "this picker needs bodies of requests that are FULL_DUPLEX_STREAMED or BUFFERED, "
                "and of answers that are FULL_DUPLEX_STREAMED"
            )
            yield self._refuse(error_reply(500, text, code="ext_proc_mode"))
        elif self._picker.reports is not None:
            yield messages.noted("request_headers", {BOOKING: self._key})
        elif self._is_buffered:
            yield messages.nothing("request_headers")

    async def _part(self, part: Any) -> AsyncIterator[Any]:
        if self._body is None:
            return
        self._body.append(part.body)
        self._size += len(part.body)
        if self._size > self._picker.most_bytes:
            text = f"the body is longer than {self._picker.most_bytes} bytes"
            yield self._refuse(error_reply(413, text, code="body"))
        elif part.end_of_stream or self._is_buffered:  # whose trailers are still to come
            async for answer in self._whole(is_end=True):
                yield answer

    async def _whole(self, *, is_end: bool) -> AsyncIterator[Any]:
        """Send a request, whose body is whole, to its rank."""
        body, self._body = b"".join(self._body or ()), None
        # Other paths, such as /v1/models, need no prompt, and so any engine.
        try:
            call = None
            if self._path in ROUTES and reads_long(body):
                call = await asyncio.to_thread(self._picker.read, self._path, body)
            elif self._path in ROUTES:
                call = self._picker.read(self._path, body)
            picked = None if call is None else await self._reserve(call)
        except CallError as error:
            yield self._refuse(call_error_reply(error))
            return
        except (UnknownModelError, NoRankError, ShedError) as error:
            yield self._refuse(no_rank_reply(error))
            return
        if call is None or picked is None:
            async for answer in self._anywhere(body, is_end=is_end):
                yield answer
            return
        reservation, others = picked
        assert self._exchange is not None
        sent = with_fields(call.body, self._exchange.own_fields)
        servings = (reservation.serving, *others)
        endpoints = [messages.endpoint_of(serving.url) for serving in servings]
        fields = [*self._exchange.own_headers]
        key = None if self._brings_key else self._picker.engine_token()
        if key is not None:
            fields.append((b"authorization", b"Bearer " + key.encode()))
        for answer in self._sent(",".join(endpoints), fields, body, sent, is_end):
            if self._picker.reports is not None:
                answer.dynamic_metadata[NOTES] = self._notes(call, reservation, endpoints)
            yield answer

    def _notes(self, call: Call, reservation: Reservation, endpoints: list[str]) -> dict[str, str]:
        """Return what our own Envoy has to know when the answer comes."""
        notes = {HIDES: "yes"} if call.hides_usage else {}
        if call.path == RESPONSES:
            notes[MAKES] = "yes"
        if self._picker.explains:
            # Envoy may have tried another engine: then these would not be true.
            notes |= {EXPLAINS: endpoints[0], **reservation.explained}
        return notes

    def _sent(
        self, endpoints: str, fields: Headers, body: bytes | None, sent: bytes | None, is_end: bool
    ) -> Iterator[Any]:
        """Yield the answers that send a request, with this body, to the first of some endpoints."""
        # A proxy that is told no new length sends the client's: too few bytes, or a wait for more.
        length = len(sent) if sent is not None and sent != body else None
        if self._is_buffered and sent is not None:
            answer = messages.destination(endpoints, fields, length, "request_body")
            if length is not None:
                answer.request_body.response.body_mutation.body = sent
            yield answer
            return
        yield messages.destination(endpoints, fields, length)
        if sent is not None:
            yield from messages.pieces("request_body", sent, is_last=is_end)

    async def _reserve(self, call: Call) -> tuple[Reservation, list[Serving]]:
        """Reserve a rank; return it, and the engines that may serve the request instead."""
        picker, time = self._picker, self._time
        # From here on it is counted, and must be ended by whoever has it.
        exchange = Exchange(call, self._request_id or self._key, time())
        self._exchange = exchange
        picker.access.begin(exchange, self._headers)
        self._is_counted = True
        try:
            servings = await picker.routing.known(call.model)
            prompt = await picker.tokenizing.tokens(call, servings)
            length = prompt.length(call)
            exchange.tokenized(length, prompt.reason)
            reachable = [serving for serving in servings if messages.endpoint_of(serving.url)]
            if not reachable:  # a proxy reaches engines by their addresses only
                raise NoRankError({"named without an address": len(servings)})
            makers = await makers_of(call, picker.routing)
            eligible = [
                serving
                for serving in reachable
                if self._may_go_to(serving) and (makers is None or serving.worker in makers)
            ]
            if not eligible:
                raise NoRankError({"not in the request's subset": len(reachable)})
            reservation = await picker.routing.reserve(
                call.model,
                prompt.token_ids,
                prompt_tokens=length,
                salt=call.salt,
                reads_cache=call.reads_cache,
                exclude=(),
                request_id=self._key,
                deadline=time() + picker.queue_within,
                workers=None if len(eligible) == len(servings) else {e.worker for e in eligible},
                media=prompt.media,
                may_pull=call.may_pull,
            )
        except (UnknownModelError, NoRankError, ShedError, CallError) as error:
            status = error.status if isinstance(error, CallError) else no_rank_reply(error).status
            exchange.refused(status, time())
            raise
        exchange.reserved(reservation, time())
        if picker.reports is not None:  # from now on Envoy reports the end, not this stream
            self._is_counted = False
            picker.reports.begin(self._key, exchange)
        others = _others(reservation, eligible, picker.routing)
        return reservation, list(islice(others, picker.most_endpoints - 1))

    def _may_go_to(self, serving: Serving) -> bool:
        subset = self._subset
        if serving.role == "prefill":  # who has it prefill for others is `kvindex gateway` alone
            return False
        return subset is None or messages.is_in(messages.endpoint_of(serving.url), subset)

    async def _anywhere(
        self, body: bytes | None = None, *, is_end: bool = True
    ) -> AsyncIterator[Any]:
        """Yield the answers that send a request without a prompt to an engine."""
        routing = self._picker.routing
        try:
            maker = await maker_of(self._path, routing)
        except CallError as error:
            yield self._refuse(call_error_reply(error))
            return
        servings = [maker] if maker else chain.from_iterable(routing.models().values())
        urls = {serving.url for serving in servings if self._may_go_to(serving)}
        endpoints = sorted({messages.endpoint_of(url) for url in urls} - {""})
        if not endpoints:
            yield self._refuse(error_reply(503, "no engine is known for this request"))
        else:
            endpoint = endpoints[secrets.randbelow(len(endpoints))]
            for answer in self._sent(endpoint, (), body, body, is_end):
                yield answer

    def _refuse(self, reply: Reply) -> Any:
        self.is_over = True
        return messages.refusal(in_form(self._path, reply))

    # The answer ---------------------------------------------------------------------------------

    def _answered(self, message: Any) -> None:
        exchange = self._exchange
        if exchange is None or exchange.stage is not Stage.SENT:
            return
        # The proxy may have tried another of the endpoints that it was given.
        self._picker.move(exchange, messages.served_by(message))
        fields = messages.headers_of(message.response_headers)
        status = next((value for name, value in fields if name == b":status"), b"0")
        head = _Head(int(status) if status.isdigit() else 0, fields)
        exchange.answered(head, self._time())
        if exchange.failures:  # there is no other try here: the proxy tries again, or not
            exchange.given_up(self._time())
            return
        exchange.passed_on()
        if message.response_headers.end_of_stream:
            self._completed()

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


def _others(
    reservation: Reservation, eligible: Sequence[Serving], routing: Routing
) -> Iterator[Serving]:
    """Yield the engines after a request's own, in turn, that its pin is right for, too."""
    drained = routing.drained()
    left = [serving for serving in eligible if serving.worker not in drained]
    names = [serving.worker for serving in left]
    own = reservation.serving
    at = names.index(own.worker) if own.worker in names else 0
    number = reservation.rank.dp_rank - own.first_rank
    source = reservation.source
    for serving in (*left[at + 1 :], *left[:at]):
        if source is not None and serving.worker == source.rank.worker:
            continue  # it would be told to pull from itself
        # A proxy that tries again sends the same head: the DP rank in it has to exist there.
        same = Rank(serving.worker, serving.first_rank + number)
        if serving.ranks == own.ranks and pin(serving, same) == reservation.pin:
            yield serving


# What our own Envoy reports -----------------------------------------------------------------------


BOOKING: Final = "booking"
"""The note that names a request."""
HIDES: Final = "hides"
"""The note that the client did not ask for the usage event."""
MAKES: Final = "makes"
"""The note that the answer has an id, by which a client may go on from it."""
EXPLAINS: Final = "explains"
"""The note of the engine of which the fields that explain the choice are true."""

ENGINES: Final = "engines"
"""The name of the engines' cluster."""

_EARLY_SECONDS: Final = 60.0  # for which a request may be placed after its client has left
_MOST_EARLY: Final = 4096
_SILENT_SECONDS: Final = 200.0  # after which an open request, reported each minute, is given up
_GONE: Final = 502


class Reports:
    """The requests that our own Envoy has open. Owner: one event loop."""

    def __init__(
        self,
        access: Access,
        move: Callable[[Exchange, str], None],
        time: Callable[[], float],
    ) -> None:
        self._access = access
        self._move = move
        self._time = time
        self._open: dict[str, Exchange] = {}  # by the key of the booking
        self._heard: dict[str, float] = {}
        # Lines about requests that are not followed, with the time: a client may leave while its
        # request is placed. Else they are another picker's, which has died.
        self._early: OrderedDict[str, tuple[float, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, key: str, exchange: Exchange) -> None:
        """Follow a request that goes to an engine."""
        self._open[key], self._heard[key] = exchange, self._time()
        if (early := self._early.pop(key, None)) is not None:
            self.logged(early[1])

    def first(self, message: bytes) -> None:
        """Accept the report that content has begun: the request's key, and who serves it."""
        key, _, served = message.decode("latin-1").partition(" ")
        if (exchange := self._open.get(key)) is not None:
            self._move(exchange, served)
            exchange.begun(self._time())

    def logged(self, entry: Any) -> None:
        """Accept a line of the access log (envoy.data.accesslog.v3.HTTPAccessLogEntry)."""
        common = entry.common_properties
        notes = common.metadata.filter_metadata.get(NOTES)
        key = notes.fields[BOOKING].string_value if notes and BOOKING in notes.fields else ""
        exchange = self._open.get(key)
        if exchange is None:
            if key and not common.intermediate_log_entry:
                self._early[key] = self._time(), entry
                if len(self._early) > _MOST_EARLY:
                    self._count_unpicked(self._early.popitem(last=False)[1][1])
            elif not common.intermediate_log_entry:
                self._count_unpicked(entry)
            return
        if common.intermediate_log_entry:
            self._heard[key] = self._time()
            if exchange.reservation is not None:
                exchange.reservation.touch(0)  # else the booking would expire
            return
        if common.upstream_remote_address.HasField("socket_address"):
            address = common.upstream_remote_address.socket_address
            host = f"[{address.address}]" if ":" in address.address else address.address
            self._move(exchange, f"{host}:{address.port_value}")
        if exchange.reservation is not None:
            again = common.upstream_request_attempt_count - 1  # Envoy does not say which failed
            exchange.tries = max(1, again + 1)
            exchange.failures += [Failure(exchange.reservation.rank, "retried_by_envoy")] * again
        noted = {name: notes.fields[name].string_value for name in notes.fields}
        if exchange.reservation is not None and "made" in noted:
            exchange.reservation.made(noted["made"])
        end, status = _ending(entry, noted)
        # By Envoy's clock: its line comes a moment after the end.
        taken = common.time_to_last_downstream_tx_byte.ToTimedelta().total_seconds()
        # The first token's report arrives a moment after it was sent.
        ended = (
            exchange.began_at + max(taken, exchange.first_token or 0.0) if taken else self._time()
        )
        if "refusal" in noted:
            exchange.note_refusal(noted["refusal"].encode())
        reason = ""
        if end is End.BROKEN:
            reason = "empty" if "empty" in noted else "reset"
        elif end is End.EVENT and is_failure(b'{"error":%b}' % noted["error"].encode()):
            reason = "error_event"
        self._end(key, end, status, usage_noted(noted), min(ended, self._time()), reason)

    def _count_unpicked(self, entry: Any) -> None:
        # The picker was away, and Envoy has chosen an engine by itself.
        if entry.common_properties.upstream_cluster == ENGINES:
            path = entry.request.path.partition("?")[0]
            self._access.count(path, entry.response.response_code.value, End.UNPICKED)

    def abandon(self) -> None:
        """End all requests: their Envoy is gone, and will report none of them."""
        for key, exchange in list(self._open.items()):
            self._end(key, End.FAILED, exchange.status or _GONE, None, self._time())

    def sweep(self) -> None:
        """End requests that Envoy has not reported for minutes: it has lost their reports."""
        while self._early and self._time() - next(iter(self._early.values()))[0] > _EARLY_SECONDS:
            self._count_unpicked(self._early.popitem(last=False)[1][1])
        for key, heard in list(self._heard.items()):
            if self._time() - heard > _SILENT_SECONDS:
                exchange = self._open[key]
                if exchange.reservation is not None:
                    exchange.failures.append(Failure(exchange.reservation.rank, "not_reported"))
                self._end(key, End.FAILED, exchange.status or _GONE, None, self._time())

    def _end(
        self,
        key: str,
        end: End,
        status: int,
        usage: Usage | None,
        now: float,
        reason: str = "",
    ) -> None:
        exchange = self._open.pop(key)
        del self._heard[key]
        exchange.reported(end, status, usage, now, reason)
        self._access.end(exchange)


def _ending(entry: Any, noted: dict[str, str]) -> tuple[End, int]:
    """Return how a request ended, and its status."""
    flags, status = entry.common_properties.response_flags, entry.response.response_code.value
    details = entry.response.response_code_details
    has_left = flags.downstream_connection_termination or flags.downstream_remote_reset
    # Many clients close at the last event: they have the whole answer.
    if has_left and "last" not in noted:
        return End.LEFT, status or CLIENT_LEFT
    if details.startswith("upstream_reset_after_response_started") or "empty" in noted:
        return End.BROKEN, status
    if "error" in noted:
        return End.EVENT, status
    if details != "via_upstream" and not has_left:  # Envoy's own answer, or the picker's
        return (End.NO_ANSWER if status >= 500 else End.REFUSED), status
    return (End.WHOLE if status < 300 else End.STATUS), status


def usage_noted(notes: Mapping[str, str]) -> Usage | None:
    """Return the usage in the notes: what the first report says, and the last."""
    usage = None
    for name in ("usage", "usage_at_end"):
        if name in notes:
            usage = usage_of(b'{"usage":%b}' % notes[name].encode(), usage)
    return usage
