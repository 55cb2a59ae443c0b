"""One request's life: what happened goes in, what to forward comes out. No sockets, no clock.

```
WAITING ──reserved──▶ SENT ──answered──▶ KEPT ──first event──▶ FORWARDED ──completed──▶ ENDED
   ▲                    │ failed           │ failed                 │ failed: broken off
   └────────────────────┴──────────────────┘ on another rank, MOST_TRIES in all
```

The head of an answer is kept back until its first event, but not for long (`held`), or until a
whole answer is complete or long. Until then nothing was forwarded, so that another engine can be
asked: also if the first event is an error, or there is none at all. Each reservation is
ended exactly once, after the engine's answer is closed: an engine must not work on for a rank that
the router takes for free.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from kvindex.gateway.calls import RESPONSES, Call
from kvindex.gateway.events import Events, Usage, is_failure, response_id_of, usage_of

if TYPE_CHECKING:
    from kvindex import Rank
    from kvindex.gateway.pairs import Prefill
    from kvindex.gateway.routing import Reservation
    from kvindex.gateway.tracing import Spans
    from kvindex.service.http import Headers

MOST_TRIES: Final = 3
_MOST_KEPT: Final = 64 << 10  # bytes of an answer that are kept back with its head
_MOST_READ: Final = 8 << 20  # bytes of a whole answer whose usage is read
# Tokens, and seconds, after which the reservation receives the number: each report costs as much as
# a token.
_TOUCH_TOKENS: Final = 64
_TOUCH_SECONDS: Final = 1.0
CLIENT_LEFT: Final = 499  # the status of a request whose client received none
_RETRIED: Final = frozenset({502, 503})
_UNAVAILABLE: Final = frozenset(
    {"refused", "timeout_connect", "timeout_head", "silent", "status_503", "no_descriptor"}
)


class Stage(str, enum.Enum):
    """How far a request has come."""

    WAITING = "waiting"  # for its tokens, then for a rank
    SENT = "sent"  # waits for the head of the engine's answer
    KEPT = "kept"  # the head has arrived and is kept back
    FORWARDED = "forwarded"  # the client receives the answer
    ENDED = "ended"  # its rank is released, and nothing more is forwarded


class End(str, enum.Enum):
    """How a request ended."""

    WHOLE = "whole"  # the client has the whole answer
    STATUS = "status"  # the engine refused it, and the client has the engine's answer
    EVENT = "error_event"  # the engine's stream ended with one
    BROKEN = "broken_off"  # the engine broke off after the first event
    NO_ANSWER = "no_answer"  # no engine answered
    REFUSED = "refused"  # by the gateway
    LEFT = "client_left"
    FAILED = "failed"  # the gateway did
    UNPICKED = "unpicked"  # Envoy sent it to an engine without asking the picker

    def __str__(self) -> str:
        return self.value


class Failure(NamedTuple):
    """A try that brought no answer: on which rank, and why."""

    rank: Rank
    reason: str


class EngineAnswer(Protocol):
    """What the machine reads of an `Answer`: a proxy that has the connection makes its own."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    def close(self) -> None:
        """End the engine's connection, unless the answer is complete."""


class Exchange:
    """The life of one request. Calls that come too late change nothing.

    `now` is in monotonic seconds in every method. Owner: one event loop. Complexity: O(bytes) for
    each piece, without allocations of its own.
    """

    def __init__(self, call: Call, request_id: str, now: float) -> None:
        self.call = call
        self.request_id = request_id  # that client and engine see
        self.tenant: str | None = None  # whom its tokens are counted for
        self.spans: Spans | None = None  # if it is traced
        self.began_at = self.ended_at = now
        self.stage = Stage.WAITING
        self.end: End | None = None
        self.status = 0  # that the client receives; 0 as long as it is open
        self.reservation: Reservation | None = None
        self.tries = 0
        self.prefill: Prefill | None = None  # of this try, where engines have roles
        self.prefill_failures: list[Failure] = []  # of all tries
        self.alone = ""  # why no other engine is to prefill it any more
        self.answer: EngineAnswer | None = None  # the last whose head has arrived
        self.failures: list[Failure] = []
        self.prompt_tokens = 0  # an estimate if it was not tokenized
        self.tokens_from = ""
        self.waited: float | None = None  # seconds from the arrival to the first reservation
        self.first_token: float | None = None  # and to the first content
        self.usage: Usage | None = None
        self._is_booked = False
        self._is_made = False  # the id of its response is noted
        self._is_open = False  # the engine's answer is neither complete nor closed
        self._is_opaque = False
        self._events: Events | None = None
        self._parts: list[bytes] = []  # kept back; of a whole answer all of it
        self._size = 0  # of them, in bytes
        self._touched = (0, now)  # output tokens, and when they were reported

    @property
    def excluded(self) -> Sequence[Rank]:
        """The ranks that are not tried again."""
        return [failure.rank for failure in self.failures]

    @property
    def own_headers(self) -> Headers:
        """The fields that this try's engine receives from us: for rank, source and spans."""
        assert self.reservation is not None
        pin, told = self.reservation.pin, self.reservation.told
        spans = () if self.spans is None else self.spans.headers
        return [*pin.headers, *told.headers, *spans]

    @property
    def own_fields(self) -> Mapping[str, Any]:
        """The fields of the body that it receives from us: for its rank, and for what it pulls."""
        assert self.reservation is not None
        fields = {**self.reservation.pin.body_fields, **self.reservation.told.body_fields}
        return fields if self.prefill is None else {**fields, **self.prefill.fields}

    @property
    def prefiller(self) -> Reservation | None:
        """The reservation of the rank that computes the prompt: its hit is the one reported."""
        apart = None if self.prefill is None else self.prefill.reservation
        return self.reservation if apart is None else apart

    @property
    def is_stream(self) -> bool:
        """Whether the engine's answer is a stream of events."""
        return self._events is not None

    @property
    def output_tokens(self) -> int:
        """The tokens generated: as reported, else one for each event."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return 0 if self._events is None else self._events.delivered

    @property
    def delivered(self) -> int | None:
        """The tokens of the prompt that the engine found cached; None if it does not say."""
        # Of several prompts or answers it reports one's hit, and not whose.
        if self.usage is None or not self.call.is_single:
            return None
        return self.usage.cached_tokens

    @property
    def unanswered_status(self) -> int:
        """The status for a request that no engine answered: by the last failure."""
        return 503 if self.failures[-1].reason in _UNAVAILABLE else 502

    # What happens -------------------------------------------------------------------------------

    def tokenized(self, prompt_tokens: int, source: str) -> None:
        """Note how long the prompt is, and where its tokens are from."""
        self.prompt_tokens, self.tokens_from = prompt_tokens, source

    def reserved(self, reservation: Reservation, now: float) -> None:
        """Accept a reservation: the request is sent to its engine."""
        if self.stage is not Stage.WAITING:  # the client has left while it was made
            reservation.cancel()
            return
        if self.waited is None:
            self.waited = now - self.began_at
        self.reservation, self._is_booked, self.prefill = reservation, True, None
        self.tries += 1
        self.stage = Stage.SENT
        if self.spans is not None:
            self.spans.reserved(self, now)

    def answered(self, answer: EngineAnswer, now: float) -> None:
        """Accept the head of an answer: it is kept back, or another rank is tried."""
        if self.stage is not Stage.SENT:
            answer.close()  # else the engine would generate it for nobody
            return
        self.answer, self._is_open = answer, True
        self._parts, self._size = [], 0
        # Other statuses would be the same on any rank: they are the client's to see.
        is_lost = answer.status == 500 and self.prefiller is not self.reservation
        if answer.status in _RETRIED or is_lost:
            self.failed(f"status_{answer.status}", now)
            return
        assert self.reservation is not None
        if answer.status >= 500 and answer.status != 501:
            self.reservation.failed(f"status_{answer.status}")
        elif answer.status >= 300:  # it is the request, not the engine
            self.reservation.answered()
        fields = dict(answer.headers)
        # Compressed by something before the engine: nothing can be read of it.
        self._is_opaque = fields.get(b"content-encoding", b"identity").lower() != b"identity"
        kind = fields.get(b"content-type", b"").lower()
        is_stream = kind.startswith(b"text/event-stream") and not self._is_opaque
        self._events = Events(hides_usage=self.call.hides_usage) if is_stream else None
        self.stage = Stage.KEPT

    def received(self, data: bytes, now: float) -> bytes:
        """Accept a piece of the answer; return what is forwarded now, b"" if nothing is."""
        stage = self.stage
        if stage is not Stage.FORWARDED and stage is not Stage.KEPT:
            return b""
        events = self._events
        if events is not None:
            data = events.feed(data)
            if self.first_token is not None:
                # A booking expires without news, so a long answer must give some.
                tokens, (touched, touched_at) = events.delivered, self._touched
                if tokens - touched >= _TOUCH_TOKENS or now - touched_at >= _TOUCH_SECONDS:
                    assert self.reservation is not None
                    self._touched = (tokens, now)
                    self.reservation.touch(tokens)
            elif events.has_content:
                self._note_first(now)
            if events.response_id and not self._is_made:
                self._note_made(events.response_id)
            if stage is Stage.FORWARDED:
                return data
        elif self.first_token is None:
            self._note_first(now)
        # Of a whole answer also what was forwarded is kept: its usage stands at the end.
        self._size += len(data)
        if self._size <= _MOST_READ:
            self._parts.append(data)
        elif stage is Stage.FORWARDED:
            self._parts = []
        if stage is Stage.FORWARDED:
            return data
        if events is not None and events.has_failed and not events.has_content:
            return self.failed("error_event", now)
        # A comment is no event: servers send some at once, and an engine may still fail then.
        is_due = self._size > _MOST_KEPT or self._is_opaque
        return self._open() if is_due or (events is not None and events.has_event) else b""

    def held(self) -> bytes:
        """Let the head of a stream go that was kept back for long enough; return what goes with it.

        Who waits for a long prefill must see that somebody is there: balancers cut off silent ones.
        """
        is_stream = self._events is not None or self._is_opaque
        return self._open() if self.stage is Stage.KEPT and is_stream else b""

    def completed(self, now: float) -> bytes:
        """End with the answer, which is complete; return the rest that is forwarded."""
        if self.stage is not Stage.FORWARDED and self.stage is not Stage.KEPT:
            return b""
        self._is_open = False
        if self._events is not None:
            kept = self._events.end()
            if not self._events.has_event:
                return self.failed("empty", now)
            if self.stage is Stage.KEPT:
                self._parts.append(kept)
                kept = self._open()
            self._end_as_reported(now)
            return kept
        status = self.status if self.answer is None else self.answer.status
        short = b"".join(self._parts) if self._size <= _MOST_KEPT else b""
        reason = ""
        if status == 400 and self.note_refusal(short):
            reason = "rank_number"
        elif status < 300 and b'"error"' in short and is_failure(short):
            reason = "error_body"
        if reason and self.stage is Stage.KEPT:
            return self.failed(reason, now)
        kept = self._open() if self.stage is Stage.KEPT else b""
        # A longer one, such as of embeddings, is not worth its memory.
        if self._size <= _MOST_READ and self.status < 300:
            whole = b"".join(self._parts)
            self.usage = usage_of(whole)
            if self.call.path == RESPONSES:
                self._note_made(response_id_of(whole))
        if reason == "error_body":
            self._note_failure(reason, now)
            self._end(End.EVENT, self.status, now)
        else:
            self._end(End.WHOLE if self.status < 300 else End.STATUS, self.status, now)
        return kept

    def failed(self, reason: str, now: float) -> bytes:
        """Accept that an engine does not answer, or breaks off; return what is forwarded last."""
        if self.stage is Stage.FORWARDED:
            # Another engine would go on with other words. So a stream ends with an event that says
            # so: its end must not look like that of a whole answer.
            self._note_failure(reason, now)
            last = b"" if self._events is None else self._events.last()
            is_stream = self._events is not None
            self._end(End.BROKEN, self.status, now)
            return last + error_event(self.call.path, reason) if is_stream else b""
        if self.stage is Stage.SENT or self.stage is Stage.KEPT:
            self._note_failure(reason, now)
            self._release()
            self.first_token = None  # it was another engine's, and is generated again
            self.stage = Stage.WAITING
            if len(self.failures) >= MOST_TRIES:
                self.given_up(now)
        return b""

    def given_up(self, now: float) -> None:
        """End without an answer: no other rank can be tried."""
        if self.stage is not Stage.ENDED:
            self._end(End.NO_ANSWER, self.unanswered_status, now)

    def refused(self, status: int, now: float, end: End = End.REFUSED) -> None:
        """End with an answer of the gateway's own."""
        if self.stage is not Stage.ENDED:
            self._end(end, self.status or status, now)

    def left(self, now: float) -> None:
        """End as the client leaves."""
        if self.stage is Stage.FORWARDED and self._events is not None and self._events.is_done:
            self._end_as_reported(now)  # many clients close at the last event, before the body ends
        elif self.stage is not Stage.ENDED:
            self._end(End.LEFT, self.status or CLIENT_LEFT, now)

    # What a proxy reports that forwards answers by itself ---------------------------------------

    def passed_on(self) -> None:
        """Accept that the head has gone out: nothing is kept back, since nothing can be retried."""
        if self.stage is Stage.KEPT:
            self._open()

    def note_refusal(self, refusal: bytes) -> bool:
        """Return whether an engine's 400 shows that its ranks are numbered otherwise; note that."""
        reservation = self.reservation
        return reservation is not None and reservation.is_misnumbered(refusal, self.call.body)

    def begun(self, now: float) -> None:
        """Accept that the content of the answer has begun."""
        # Nothing is kept back there: the proxy has forwarded the head.
        if self.stage is Stage.SENT and self.reservation is not None:
            self.stage, self.status = Stage.FORWARDED, 200
            self.first_token = now - self.began_at
            self.reservation.first_token()

    def reported(
        self, end: End, status: int, usage: Usage | None, now: float, reason: str = ""
    ) -> None:
        """End as the proxy says; `reason`: why the engine has failed, whatever the status."""
        if self.stage is not Stage.ENDED:
            self.usage = usage
            if self.reservation is not None and end is not End.LEFT:
                if reason or (status >= 500 and status != 501):
                    self.reservation.failed(reason or f"status_{status}")
                elif end is not End.WHOLE:
                    self.reservation.answered()
            self._end(end, status, now)

    # Steps --------------------------------------------------------------------------------------

    def _open(self) -> bytes:
        """Let the head go; return what was kept back with it."""
        assert self.answer is not None
        self.status = self.answer.status
        self.stage = Stage.FORWARDED
        return b"".join(self._parts)

    def _note_first(self, now: float) -> None:
        assert self.reservation is not None
        assert self.answer is not None
        if self.answer.status < 300:  # an error has no tokens, and took no prefill
            self.first_token = now - self.began_at
            self._touched = (0, now)
            self.reservation.first_token()
            if self.prefill is not None:
                self.prefill.end()

    def _note_made(self, response_id: str) -> None:
        assert self.reservation is not None
        self._is_made = True
        self.reservation.made(response_id)

    def _note_failure(self, reason: str, now: float) -> None:
        assert self.reservation is not None
        if not self._note_loss(reason):
            self.failures.append(Failure(self.reservation.rank, reason))
            self.reservation.failed(reason)
        if self.spans is not None:
            self.spans.failed(self, reason, now)

    def _note_loss(self, reason: str) -> bool:
        """Note a failure if it is another engine's, whose blocks did not arrive; return whether."""
        # Once there is content, they have arrived.
        if self.prefill is None or (self._events is not None and self._events.has_content):
            return False
        if (loss := self.prefill.lost(reason)) is not None:
            # No fault of this engine, which may well compute the prompt by itself.
            self.prefill_failures.append(loss)
            self.alone = "lost"
        return loss is not None

    def _end_as_reported(self, now: float) -> None:
        """End a stream that has all its events."""
        events = self._events
        assert events is not None
        self.usage = events.usage
        failed = events.has_failed and not self._note_loss("error_event")
        if failed and self.reservation is not None:
            self.reservation.failed("error_event")
        if events.error is not None:
            self._end(End.EVENT, self.status, now)
        else:
            self._end(End.WHOLE if self.status < 300 else End.STATUS, self.status, now)

    def _end(self, end: End, status: int, now: float) -> None:
        if end is End.WHOLE and self.reservation is not None:
            self.reservation.answered()
        self.stage, self.end, self.status, self.ended_at = Stage.ENDED, end, status, now
        self._parts = []
        self._release(is_whole=end is End.WHOLE)

    def _release(self, *, is_whole: bool = False) -> None:
        """Close the engine's answer, then end the reservations: the ranks are free from then on."""
        if self._is_open and self.answer is not None:
            self._is_open = False
            if self.end is End.LEFT and self.first_token is None and self.prefill is not None:
                self.prefill.close(self.answer)
            else:
                self.answer.close()
        if self._is_booked and self.reservation is not None:
            self._is_booked = False
            if is_whole:
                self.reservation.finish(self.delivered, counts=self.call.is_single)
            else:
                self.reservation.cancel()
        if self.prefill is not None:
            self.prefill.end()


def error_event(path: str, reason: str) -> bytes:
    """Return the event with which a stream ends that breaks off, as clients of its route read."""
    message = f"the engine broke off the answer ({reason}): send the request again"
    if path.endswith("/messages"):
        error = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    fields = {"message": message, "type": "server_error", "param": None, "code": "engine_broke_off"}
    return b"data: " + msgspec.json.encode({"error": fields}) + b"\n\n"
