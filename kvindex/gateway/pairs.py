"""Prefill and decode apart: one engine (P) prefills a prompt, another one (D) answers it.

As vLLM's NIXL connector pulls: P is asked for one token, and keeps the prompt's blocks; what it
says of them (`kv_transfer_params`) goes to D with the request, and D fetches the blocks that it
lacks. D is reserved first. If it misses little, or P does not do it, D prefills by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvindex.gateway.calls import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Call, with_fields
from kvindex.gateway.events import usage_of
from kvindex.gateway.request_life import Failure
from kvindex.gateway.upstream import Answer, Upstream, UpstreamError
from kvindex.service.http import Headers
from kvindex.wire.errors import UNREADABLE

if TYPE_CHECKING:
    from kvindex.gateway.request_life import EngineAnswer, Exchange
    from kvindex.gateway.routing import Reservation, Routing
    from kvindex.gateway.tokens import Tokens

LEASE: Final = 30.0
"""Seconds for which P keeps blocks that no D fetches: vLLM's `kv_lease_duration` by default."""

_MOST_ASKED: Final = 2  # engines that one try asks to prefill
_MOST_SECONDS: Final = 60.0  # for each: one token needs less, and D can do without one that hangs
_TOLD_SECONDS: Final = 1.0  # for D to accept a request whose client has left
_LOST: Final = frozenset({"status_500", "error_event", "error_body"})
# As vLLM 0.32 and 0.33 read them (entrypoints/openai/*/protocol.py, entrypoints/anthropic): what
# makes a request one of a single token. These routes pass `kv_transfer_params` on and back.
_SINGLE_TOKEN: Final[Mapping[str, Mapping[str, Any]]] = {
    CHAT: {"max_tokens": 1, "max_completion_tokens": 1},
    COMPLETIONS: {"max_tokens": 1},
    MESSAGES: {"max_tokens": 1},
    RESPONSES: {"max_output_tokens": 1, "store": False},
}
_KEEP: Final = {
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
}


class Prefill:
    """What became of a prompt's prefill in one try of its request. Owner: one event loop."""

    def __init__(self) -> None:
        self.reason = ""  # one word: why P has done it, or why not
        self.reservation: Reservation | None = None  # of P, if it has done it
        self.moved = 0  # tokens that D fetches, as predicted
        self.fields: Mapping[str, Any] = {}  # of the body, for D
        self._cached: int | None = None  # tokens that P found
        self._lease: asyncio.TimerHandle | None = None

    def done(
        self, reservation: Reservation, moved: int, params: msgspec.Raw, answer: bytes
    ) -> None:
        """Accept that P has done it: its blocks are pinned until `end`, or until the lease ends."""
        usage = usage_of(answer)
        self.reason, self.reservation, self.moved = "apart", reservation, moved
        self.fields = {"kv_transfer_params": params}
        self._cached = None if usage is None else usage.cached_tokens
        self._lease = asyncio.get_running_loop().call_later(LEASE, self.end)

    def end(self) -> None:
        """Release P: D has the blocks, or will not have them. Idempotent."""
        if self._lease is not None and self.reservation is not None:
            self._lease.cancel()
            self._lease = None
            self.reservation.finish(self._cached, counts=True)

    def close(self, answer: EngineAnswer) -> None:
        """Close D's answer whose client has left, but not before D has P free its blocks."""
        if self.reservation is None:
            answer.close()
        else:
            asyncio.get_running_loop().call_later(_TOLD_SECONDS, answer.close)

    def lost(self, reason: str) -> Failure | None:
        """Accept D's failure; return P's if the blocks did not arrive: P may have died."""
        if self.reservation is None or reason not in _LOST:
            return None
        self.reason, self.moved = "lost", 0
        return Failure(self.reservation.rank, reason)


class Pairs:
    """Has prompts prefilled by engines that are for it; settings as in `GatewaySettings`.

    Owner: one event loop.
    """

    def __init__(
        self, routing: Routing, upstream: Upstream, local_tokens: int, head_within: float
    ) -> None:
        self._routing = routing
        self._upstream = upstream
        self._local_tokens = local_tokens
        self._within = min(head_within, _MOST_SECONDS)

    async def prefill(
        self, exchange: Exchange, prompt: Tokens, fields: Headers, request_id: str
    ) -> None:
        """Have P prefill what the reserved D misses, if that is worth it; note why, or why not.

        `fields` are the request's, `request_id` is that of P's booking.
        """
        call, decoder, prefill = exchange.call, exchange.reservation, Prefill()
        assert decoder is not None
        exchange.prefill, failures = prefill, 0
        prefill.reason = exchange.alone or unfit(call)
        if not prefill.reason and decoder.missing <= self._local_tokens:
            prefill.reason = "local"
        while not prefill.reason:
            place = failures < _MOST_ASKED and self._routing.reserve_prefill(
                call.model,
                prompt.token_ids,
                prompt_tokens=exchange.prompt_tokens,
                salt=call.salt,
                exclude=[failure.rank for failure in exchange.prefill_failures],
                request_id=request_id,
            )
            if not place:
                prefill.reason = "failed" if failures else "no_prefill"
            elif await self._asked(exchange, place, fields):
                return
            else:
                failures += 1
        if failures:
            exchange.alone = prefill.reason
            decoder.compute()

    async def _asked(self, exchange: Exchange, place: Reservation, fields: Headers) -> bool:
        """Ask P; return whether it has done it."""
        call, decoder, prefill = exchange.call, exchange.reservation, exchange.prefill
        assert decoder is not None
        assert prefill is not None
        # At once after it was reserved: nothing waits on D for a moment that others could see.
        decoder.fetch()
        number = len(exchange.prefill_failures)
        spans = () if exchange.spans is None else exchange.spans.headers
        # Its id is no other try's: this engine, too, may still know that.
        own = (b"x-request-id", f"{exchange.request_id}-p{exchange.tries}-{number}".encode())
        status, answer = 0, b""
        try:
            status, answer = await self._upstream.ask(
                place.serving.url,
                call.path,
                with_fields(single_token(call), {**place.pin.body_fields, **_KEEP}),
                [*fields, *place.pin.headers, *spans, own],
                within=self._within,
            )
        except UpstreamError as error:
            reason = error.reason
        except BaseException as error:
            # The end of the connection has P stop.
            prefill.reason = "left" if isinstance(error, asyncio.CancelledError) else "failed"
            place.cancel()
            raise
        else:
            params = params_of(answer) if status == 200 else None
            if params is not None:
                place.answered()
                place.prefilled()
                decoder.fetched()
                prefill.done(place, decoder.missing, params, answer)
                return True
            reason = "no_params" if status == 200 else f"status_{status}"
        if status == 400:
            place.is_misnumbered(answer, call.body)
        if 300 <= status < 500 or status == 501:  # it is the request, not the engine
            place.answered()
        else:
            place.failed(reason)
        place.cancel()
        exchange.prefill_failures.append(Failure(place.rank, reason))
        return False

    async def told(self, sending: Coroutine[Any, Any, Answer]) -> Answer:
        """Send D what P has prefilled, even if the client leaves: only D has P free its blocks."""
        task = asyncio.ensure_future(sending)

        def close() -> None:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                task.result().close()

        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Not at once, nor with the head: vLLM knows of a stream's request a moment after that.
            asyncio.get_running_loop().call_later(_TOLD_SECONDS, close)
            raise


def unfit(call: Call) -> str:
    """Return why P cannot prefill a request, in one word; "" if it can.

    Examples:
        >>> from kvindex.gateway.calls import read_call
        >>> unfit(read_call("/v1/completions", b'{"prompt": "a", "n": 2}'))
        'several'
    """
    fields = call.fields
    # A response goes on from what one engine has; one in the background is answered before it is.
    is_kept = call.path == RESPONSES and (
        fields.get("previous_response_id") or fields.get("background")
    )
    if call.path not in _SINGLE_TOKEN or is_kept:
        return "route"
    if not call.is_single or fields.get("use_beam_search"):
        return "several"
    if call.has_kv_fields:
        return "own_params"
    return "" if call.reads_cache else "no_cache"


def single_token(call: Call) -> bytes:
    """Return a request's body as P receives it, without `kv_transfer_params`.

    Examples:
        >>> from kvindex.gateway.calls import read_call
        >>> single_token(read_call("/v1/completions", b'{"prompt": "a", "min_tokens": 5}'))
        b'{"prompt": "a", "min_tokens": 5,"max_tokens":1,"stream":false,"min_tokens":0}'
    """
    limits = {**_SINGLE_TOKEN[call.path], "stream": False}
    if "min_tokens" in call.fields:
        limits["min_tokens"] = 0
    if call.is_stream:  # vLLM refuses them without a stream
        limits["stream_options"] = None
    return with_fields(call.body, limits)


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Prefilled).decode


def params_of(answer: bytes) -> msgspec.Raw | None:
    """Return what P says of the blocks that it keeps, as it stands there; None if it says nothing.

    Examples:
        >>> bytes(params_of(b'{"id": "x", "kv_transfer_params": {"a": [1.0]}}'))
        b'{"a": [1.0]}'
    """
    try:
        params = bytes(_decode(answer).kv_transfer_params)  # a copy: the rest need not be kept
    except UNREADABLE:
        return None
    return msgspec.Raw(params) if params[:1] == b"{" and b'"' in params else None
