"""One request's life: what happened goes in, what to forward comes out. No sockets, no clock.

```
WAITING ──reserved──▶ SENT ──answered──▶ KEPT ──first event──▶ FORWARDED ──completed──▶ ENDED
   ▲                    │ failed           │ failed                 │ failed: broken off
   └────────────────────┴──────────────────┘ on another rank, MOST_TRIES in all
```

The head of an answer is kept back until its first event, or until a whole answer is complete or
long. Until then nothing was forwarded, so that another engine can be asked. Each place is ended
exactly once, after the engine's answer is closed: an engine must not work on for a place that the
router takes for free.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from kvindex.gateway.calls import Call
from kvindex.gateway.events import Events, Usage, usage_of

if TYPE_CHECKING:
    from kvindex import Rank
    from kvindex.gateway.routing import Place

MOST_TRIES: Final = 3
_MOST_KEPT: Final = 64 << 10  # bytes of an answer that are kept back with its head
_MOST_READ: Final = 8 << 20  # bytes of a whole answer whose usage is read
_TOUCH_TOKENS: Final = 64  # tokens, and seconds, after which the place receives the number:
_TOUCH_SECONDS: Final = 1.0  # each report costs as much as a token
CLIENT_LEFT: Final = 499  # the status of a request whose client received none
_RETRIED: Final = frozenset({502, 503})
_UNAVAILABLE: Final = frozenset(
    {"refused", "timeout_connect", "timeout_head", "silent", "status_503"}
)


class Stage(str, enum.Enum):
    """How far a request has come.

    Attributes:
        WAITING: for its tokens, then for a rank.
        SENT: for the head of the engine's answer.
        KEPT: the head has arrived and is kept back.
        FORWARDED: the client receives the answer.
        ENDED: its place is released, and nothing more is forwarded.
    """

    WAITING = "waiting"
    SENT = "sent"
    KEPT = "kept"
    FORWARDED = "forwarded"
    ENDED = "ended"


class End(str, enum.Enum):
    """How a request ended.

    Attributes:
        WHOLE: the client has the whole answer.
        STATUS: the engine refused it, and the client has the engine's answer.
        EVENT: the engine's stream ended with an error event.
        BROKEN: the engine broke off after the first event.
        NO_ANSWER: no engine answered.
        REFUSED: the gateway refused it.
        LEFT: the client left.
        FAILED: the gateway failed.
        UNPICKED: Envoy sent it to an engine without asking the picker.
    """

    WHOLE = "whole"
    STATUS = "status"
    EVENT = "error_event"
    BROKEN = "broken_off"
    NO_ANSWER = "no_answer"
    REFUSED = "refused"
    LEFT = "client_left"
    FAILED = "failed"
    UNPICKED = "unpicked"

    def __str__(self) -> str:
        return self.value


class Failure(NamedTuple):
    """A try that brought no answer: on which rank, and why."""

    rank: Rank
    reason: str


class EngineAnswer(Protocol):
    """What the machine reads of an `Answer`."""

    @property
    def status(self) -> int:
        """The HTTP status code."""

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The fields, with names in lower case."""

    def close(self) -> None:
        """End the engine's connection, unless the answer is complete."""


class Exchange:
    """The life of one request. Calls that come too late change nothing.

    Args:
        call: the request.
        request_id: the id that client and engine see.
        now: monotonic seconds, as in every method.

    Attributes:
        call: as given.
        request_id: as given.
        began_at: the time of arrival.
        ended_at: the time of the end; that of arrival until then.
        stage: how far it has come.
        end: how it ended; None until then.
        status: the code that the client receives; 0 as long as it is open.
        place: the last that was reserved.
        tries: how often it was sent to an engine.
        answer: the last one whose head has arrived.
        failures: the tries that brought no answer.
        prompt_tokens: of the prompt, an estimate if it was not tokenized.
        tokens_from: where its tokens are from.
        waited: seconds from the arrival to the first place.
        first_token: seconds from the arrival to the first content; None until then.
        usage: as the engine reports it.

    Owner: one event loop. Complexity: O(bytes) for each piece, without allocations of its own.
    """

    def __init__(self, call: Call, request_id: str, now: float) -> None:
        self.call = call
        self.request_id = request_id
        self.began_at = self.ended_at = now
        self.stage = Stage.WAITING
        self.end: End | None = None
        self.status = 0
        self.place: Place | None = None
        self.tries = 0
        self.answer: EngineAnswer | None = None
        self.failures: list[Failure] = []
        self.prompt_tokens = 0
        self.tokens_from = ""
        self.waited: float | None = None
        self.first_token: float | None = None
        self.usage: Usage | None = None
        self._is_booked = False
        self._is_open = False  # the engine's answer is neither complete nor closed
        self._events: Events | None = None
        self._parts: list[bytes] = []  # kept back; of a whole answer also what was forwarded
        self._size = 0  # of them, in bytes
        self._touched = (0, now)  # output tokens, and when the place received them

    @property
    def excluded(self) -> Sequence[Rank]:
        """The ranks that are not tried again."""
        return [failure.rank for failure in self.failures]

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
    def unanswered_status(self) -> int:
        """The status for a request that no engine answered: by the last failure."""
        return 503 if self.failures[-1].reason in _UNAVAILABLE else 502

    # What happens -------------------------------------------------------------------------------

    def tokenized(self, prompt_tokens: int, source: str) -> None:
        """Note how long the prompt is, and where its tokens are from."""
        self.prompt_tokens, self.tokens_from = prompt_tokens, source

    def reserved(self, place: Place, now: float) -> None:
        """Accept a place: the request is sent to its engine."""
        if self.stage is not Stage.WAITING:
            place.cancel()
            return
        if self.waited is None:
            self.waited = now - self.began_at
        self.place, self._is_booked = place, True
        self.tries += 1
        self.stage = Stage.SENT

    def answered(self, answer: EngineAnswer, now: float) -> None:
        """Accept the head of an answer: it is kept back, or another rank is tried."""
        if self.stage is not Stage.SENT:
            answer.close()
            return
        self.answer, self._is_open = answer, True
        self._parts, self._size = [], 0
        if answer.status in _RETRIED:
            self.failed(f"status_{answer.status}", now)
            return
        kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
        is_stream = kind.lower().startswith(b"text/event-stream")
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
                self._touch(events.delivered, now)
            elif events.has_content:
                self._note_first(now)
            if stage is Stage.FORWARDED:
                return data
        elif self.first_token is None:
            self._note_first(now)
        self._size += len(data)
        if self._size <= _MOST_READ:
            self._parts.append(data)
        elif stage is Stage.FORWARDED:
            self._parts = []
        if stage is Stage.FORWARDED:
            return data
        is_due = self._size > _MOST_KEPT or (events is not None and events.has_event)
        return self._open() if is_due else b""

    def completed(self, now: float) -> bytes:
        """End with the answer, which is complete; return the rest that is forwarded."""
        if self.stage is not Stage.FORWARDED and self.stage is not Stage.KEPT:
            return b""
        self._is_open = False
        if self._events is not None:
            kept = self._events.end()
            if self.stage is Stage.KEPT:
                self._parts.append(kept)
                kept = self._open()
            self._end_as_reported(now)
            return kept
        kept = self._open() if self.stage is Stage.KEPT else b""
        if self._size <= _MOST_READ and self.status < 300:
            self.usage = usage_of(b"".join(self._parts))
        self._end(End.WHOLE if self.status < 300 else End.STATUS, self.status, now)
        return kept

    def failed(self, reason: str, now: float) -> bytes:
        """Accept that an engine does not answer, or not to the end.

        Until the answer is forwarded, the request waits for another rank, or ends after MOST_TRIES.

        Returns:
            What is forwarded last: in a stream an event with the error. The end of the answer must
            not look like a whole one.
        """
        if self.stage is Stage.FORWARDED:
            self._note_failure(reason)
            is_stream = self._events is not None
            self._end(End.BROKEN, self.status, now)
            return error_event(self.call.path, reason) if is_stream else b""
        if self.stage is Stage.SENT or self.stage is Stage.KEPT:
            self._note_failure(reason)
            self._release()
            self.first_token = None
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
        """End as the client leaves; which it may do once it has the last event."""
        if self.stage is Stage.FORWARDED and self._events is not None and self._events.is_done:
            self._end_as_reported(now)
        elif self.stage is not Stage.ENDED:
            self._end(End.LEFT, self.status or CLIENT_LEFT, now)

    # What a proxy reports that forwards answers by itself ---------------------------------------

    def begun(self, now: float) -> None:
        """Accept that the content of the answer has begun."""
        if self.stage is Stage.SENT and self.place is not None:
            self.stage, self.status = Stage.FORWARDED, 200
            self.first_token = now - self.began_at
            self.place.first_token()

    def reported(self, end: End, status: int, usage: Usage | None, now: float) -> None:
        """End as the proxy says."""
        if self.stage is not Stage.ENDED:
            self.usage = usage
            self._end(end, status, now)

    # Steps --------------------------------------------------------------------------------------

    def _open(self) -> bytes:
        """Let the head go; return what was kept back with it."""
        assert self.answer is not None
        self.status = self.answer.status
        self.stage = Stage.FORWARDED
        return b"".join(self._parts)

    def _note_first(self, now: float) -> None:
        assert self.place is not None
        assert self.answer is not None
        if self.answer.status < 300:
            self.first_token = now - self.began_at
            self._touched = (0, now)
            self.place.first_token()

    def _touch(self, tokens: int, now: float) -> None:
        touched, touched_at = self._touched
        if tokens - touched >= _TOUCH_TOKENS or now - touched_at >= _TOUCH_SECONDS:
            assert self.place is not None
            self._touched = (tokens, now)
            self.place.touch(tokens)

    def _note_failure(self, reason: str) -> None:
        assert self.place is not None
        self.failures.append(Failure(self.place.rank, reason))

    def _end_as_reported(self, now: float) -> None:
        """End a stream that has all its events."""
        events = self._events
        assert events is not None
        self.usage = events.usage
        if events.error is not None:
            self._end(End.EVENT, self.status, now)
        else:
            self._end(End.WHOLE if self.status < 300 else End.STATUS, self.status, now)

    def _end(self, end: End, status: int, now: float) -> None:
        self.stage, self.end, self.status, self.ended_at = Stage.ENDED, end, status, now
        self._parts = []
        self._release(is_whole=end is End.WHOLE)

    def _release(self, *, is_whole: bool = False) -> None:
        """Close the engine's answer, then end the place."""
        if self._is_open and self.answer is not None:
            self._is_open = False
            self.answer.close()
        if self._is_booked and self.place is not None:
            self._is_booked = False
            if is_whole:
                self.place.finish(None if self.usage is None else self.usage.cached_tokens)
            else:
                self.place.cancel()


def error_event(path: str, reason: str) -> bytes:
    """Return the event with which a stream ends that breaks off, as clients of its route read."""
    message = f"the engine broke off the answer ({reason}): send the request again"
    if path.endswith("/messages"):
        error = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    fields = {"message": message, "type": "server_error", "param": None, "code": "engine_broke_off"}
    return b"data: " + msgspec.json.encode({"error": fields}) + b"\n\n"
