"""What an engine's answer says while it passes: the first content, the usage, an error, the end.

Streams are server-sent events (HTML standard, 9.2.6). Their bytes are forwarded as they are, whole
events at a time; only the usage event that the gateway itself asked for is left out. vLLM then puts
its fingerprint there, and not into the event before: so that one is kept back until its fingerprint
is known.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from kvindex.wire.errors import UNREADABLE

MOST_KEPT: Final = 1 << 20
"""Bytes of an event that has no end yet; a longer one is forwarded without being read."""

# A carriage return at the end may be half a line end: `feed` keeps it back.
_LINE_END: Final = rb"(?:\r\n|\n|\r(?!\n))"
_EVENT_END: Final = re.compile(_LINE_END + _LINE_END)
_LOOK_BACK: Final = 3  # bytes of a blank line that may have come before
_DONE: Final = frozenset(
    {"response.completed", "response.failed", "response.incomplete", "message_stop"}
)
_FAILED: Final = frozenset({"response.failed", "error"})
_CONTENT: Final = frozenset({"content_block_delta"})
# Types of errors that another engine would answer, too.
_CLIENTS: Final = ("invalid", "badrequest", "not_found", "notfound", "too_large", "unprocessable")


class Usage(msgspec.Struct, frozen=True):
    """The tokens of a request, as its engine reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, if the engine reports them


# Whatever an engine sends as a number, its event must stay readable.
_Number = Any
_MOST_TOKENS: Final = 1 << 32  # of one request: more is none


class _Details(msgspec.Struct):
    cached_tokens: _Number = None


class _Reported(msgspec.Struct):
    """Usage under the names of OpenAI's two APIs, and of Anthropic's."""

    prompt_tokens: _Number = None
    completion_tokens: _Number = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Number = None
    output_tokens: _Number = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Number = None
    cache_creation_input_tokens: _Number = None


class _Delta(msgspec.Struct):
    """The parts of a delta that are content, if they are not empty."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None

    def __bool__(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.function_call
            or self.refusal
        )


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: Any = None


class _Holder(msgspec.Struct):
    """A whole answer within an event."""

    usage: _Reported | None = None
    id: Any = None
    error: Any = None


class _Event(msgspec.Struct):
    """What is read of an event, or of a whole answer."""

    choices: list[_Choice] | None = None
    usage: _Reported | None = None
    error: Any = None
    type: str | None = None
    response: _Holder | None = None
    system_fingerprint: str | None = None


class _Started(msgspec.Struct):
    """The first event of Anthropic's API; elsewhere `message` may be text."""

    message: _Holder | None = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_holder = msgspec.json.Decoder(_Holder).decode
_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode
_decode_started = msgspec.json.Decoder(_Started).decode


class Events:
    r"""Reads the event stream of one answer. Owner: one event loop.

    With `hides_usage`, the event that has the usage and no choices is left out.

    Complexity: O(bytes), whatever the pieces are. At most `MOST_KEPT` bytes are kept.

    Examples:
        >>> events = Events(hides_usage=True)
        >>> events.feed(b'data: {"choices": [{"delta": {"content": "Hel')
        b''
        >>> events.feed(b'lo"}}]}\n\ndata: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n')
        b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n'
        >>> events.delivered, events.usage.prompt_tokens
        (1, 3)
    """

    def __init__(self, *, hides_usage: bool) -> None:
        self.has_event = False  # comments are none, nor is the end
        self.has_content = False  # some of the generated text: also reasoning, tool calls
        self.is_done = False  # the last event has arrived
        self.delivered = 0  # events with content; engines send one for a token, or for a few
        self.unread = 0  # events that were too long or no JSON, and were forwarded unread
        self.usage: Usage | None = None
        self.error: str | None = None  # the engine's message, reported instead of going on
        self.has_failed = False  # by the error it is the engine's fault, and not the request's
        self.response_id = ""  # of the responses API
        self._hides_usage = hides_usage
        self._kept = bytearray()  # of an event without its end
        self._last = b""  # a choice's last event, which waits for the fingerprint
        self._ends_choice = False  # the present event is the last of a choice
        self._is_overlong = False  # the rest of the present event is forwarded unread

    def feed(self, data: bytes) -> bytes:
        """Accept a piece; return the whole events that are forwarded now."""
        kept = self._kept
        # First the form in which engines write one token: a piece that is one event of one line.
        if not kept and not self._is_overlong and data.endswith(b"\n\n"):
            is_one = data.find(b"\n") == len(data) - 2 and data.startswith(b"data: ")
            if is_one and data.find(b"\r") < 0:
                return self._shown(data, data[6:-2])
        begin = max(0, len(kept) - _LOOK_BACK)  # not from the start: that would be O(bytes²)
        kept += data
        end = 0
        # Only whole events go on: half of one could not be taken back if the engine then fails.
        for match in _EVENT_END.finditer(kept, begin, len(kept) - kept.endswith(b"\r")):
            end = match.end()
        whole = bytes(kept[:end])
        del kept[:end]
        if self._is_overlong:
            return self._pass(whole)
        forwarded = self._forward(whole) if whole else b""
        if len(kept) > MOST_KEPT:  # an engine gone mad must not cost the gateway its memory
            self._is_overlong = True
            self.unread += 1
            return forwarded + self._pass(b"")
        return forwarded

    def end(self) -> bytes:
        """Accept the end of the answer; return the rest, which ends within an event or a line."""
        rest = bytes(self._kept)
        self._kept.clear()
        if rest and not self._is_overlong:
            rest = self._forward(rest)
        return self.last() + rest

    def last(self) -> bytes:
        """Return the event that is kept back, for a stream that breaks off."""
        last, self._last = self._last, b""
        return last

    def _pass(self, whole: bytes) -> bytes:
        """Forward the rest of an overlong event, and read what follows it."""
        self.has_event = True
        if not whole:
            rest = bytes(self._kept[:-_LOOK_BACK])  # a blank line may begin in the last bytes
            del self._kept[:-_LOOK_BACK]
            return self.last() + rest
        self._is_overlong = False
        end = _EVENT_END.search(whole)
        assert end is not None
        rest, following = whole[: end.end()], whole[end.end() :]
        return rest + self._forward(following) if following else rest

    def _forward(self, whole: bytes) -> bytes:
        """Read events; return them without those that are hidden."""
        if whole.find(b"\n\n") == len(whole) - 2 and whole.find(b"\r") < 0:
            return self._read(whole)
        shown: list[bytes] = []
        begin = 0
        while begin < len(whole):
            match = _EVENT_END.search(whole, begin)
            end = len(whole) if match is None else match.end()
            shown.append(self._read(whole[begin:end]))
            begin = end
        return b"".join(shown)

    def _read(self, event: bytes) -> bytes:
        """Note what an event reports; return what is forwarded now."""
        lines = [line for line in event.splitlines() if line.startswith(b"data:")]
        if not lines:  # a comment, with which servers keep connections open
            return self.last() + event
        return self._shown(event, b"\n".join(line[5:].removeprefix(b" ") for line in lines))

    def _shown(self, event: bytes, data: bytes) -> bytes:
        """Note what an event with data reports; return what is forwarded now."""
        read, last = self._read_data(data), self._last
        self._last = b""
        if self._hides_usage and read is not None:
            if read.usage is not None and not (read.choices or read.type) and read.error is None:
                return _stamped(last, read.system_fingerprint)
            if self._ends_choice and read.system_fingerprint is None:
                self._last = event
                return last
        return last + event if last else event

    def _read_data(self, data: bytes) -> _Event | None:
        if len(data) < 9 and data.strip() == b"[DONE]":
            self.is_done = True
            return None
        self.has_event = True
        try:
            read = _decode(data)
        except UNREADABLE:
            self.unread += 1
            return None
        choices, usage, error = read.choices, read.usage, read.error
        self._ends_choice = False
        if choices:
            for choice in choices:
                if choice.delta or choice.text:
                    self.has_content = True
                    self.delivered += 1
                if choice.finish_reason is not None:
                    self._ends_choice = True
        elif read.type:
            self._read_typed(read.type, read.response, data)
            if error is None and read.type in _FAILED:
                error = _error_of(read, data)
        if error is not None:
            self._note_error(error)
        if usage is not None:
            self.usage = _merged(self.usage, usage)
            # Nobody has asked for usage with each piece: the engine sends it to all, unasked, and
            # so this client expects it.
            if choices:
                self._hides_usage = False
        return read

    def _note_error(self, error: Any) -> None:
        fields = error if isinstance(error, dict) else {"message": error}
        self.error = str(fields.get("message"))[:200]
        code = fields.get("code")
        kind = f"{fields.get('type')} {code}".lower()
        is_clients = isinstance(code, int) and 400 <= code < 500
        self.has_failed = not (is_clients or any(word in kind for word in _CLIENTS))

    def _read_typed(self, kind: str, holder: _Holder | None, data: bytes) -> None:
        """Note what an event of the responses or messages API reports."""
        if kind in _CONTENT or (kind.startswith("response.") and kind.endswith(".delta")):
            self.has_content = True
            self.delivered += 1
        self.is_done = self.is_done or kind in _DONE
        if holder is not None and not self.response_id and isinstance(holder.id, str):
            self.response_id = holder.id
        if kind == "message_start":  # Anthropic's prompt tokens stand in the first event only
            try:
                holder = _decode_started(data).message
            except UNREADABLE:
                holder = None
        if holder is not None and holder.usage is not None:
            self.usage = _merged(self.usage, holder.usage)


def _error_of(read: _Event, data: bytes) -> Any:
    """Return the error that an event of the responses API has by its type."""
    if read.type == "response.failed":
        return None if read.response is None else read.response.error
    try:
        return _decode_fields(data)  # the error's fields stand beside the type
    except UNREADABLE:
        return read.type


def usage_of(body: bytes, before: Usage | None = None) -> Usage | None:
    """Return the usage in a whole JSON answer, after what was reported before. O(bytes).

    Examples:
        >>> usage_of(b'{"usage": {"input_tokens": 5, "output_tokens": 2}}')
        Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=None)
    """
    try:
        usage = _decode(body).usage
    except UNREADABLE:
        return before
    return before if usage is None else _merged(before, usage)


def is_failure(body: bytes) -> bool:
    """Return whether a JSON answer says that the engine has failed. O(bytes).

    Examples:
        >>> is_failure(b'{"error": {"code": 500}}'), is_failure(b'{"error": {"code": 404}}')
        (True, False)
    """
    events = Events(hides_usage=False)
    events.feed(b"data: %b\n\n" % body.replace(b"\n", b" "))
    return events.has_failed and not events.has_content


def response_id_of(body: bytes) -> str:
    """Return the id of a whole response; "" if it has none. O(bytes)."""
    try:
        response_id = _decode_holder(body).id
    except UNREADABLE:
        return ""
    return response_id if isinstance(response_id, str) else ""


def _merged(before: Usage | None, reported: _Reported) -> Usage:
    """Return the usage after a further report, which may be of some of its numbers only."""
    before = before or Usage()
    prompt, completion = _tokens(reported.prompt_tokens), _tokens(reported.completion_tokens)
    details = reported.prompt_tokens_details or reported.input_tokens_details
    cached = None if details is None else _tokens(details.cached_tokens)
    read, made = map(
        _tokens, (reported.cache_read_input_tokens, reported.cache_creation_input_tokens)
    )
    if read is not None:
        cached = read
    if prompt is None and (given := _tokens(reported.input_tokens)) is not None:
        # Anthropic's do not count what was read from the cache.
        prompt = given + (read or 0) + (made or 0)
    if completion is None:
        completion = _tokens(reported.output_tokens)
    # Reports may be of some numbers only: the rest stays as reported before.
    return Usage(
        before.prompt_tokens if prompt is None else prompt,
        before.completion_tokens if completion is None else completion,
        before.cached_tokens if cached is None else cached,
    )


def _tokens(value: Any) -> int | None:
    """Return a number of tokens, within bounds; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return int(min(max(value, 0), _MOST_TOKENS))


def _stamped(event: bytes, fingerprint: str | None) -> bytes:
    """Return an event with the fingerprint of the model's server."""
    end = event.rfind(b"}")
    if fingerprint is None or end < 0:
        return event
    return b'%b,"system_fingerprint":%b%b' % (
        event[:end],
        msgspec.json.encode(fingerprint),
        event[end:],
    )
