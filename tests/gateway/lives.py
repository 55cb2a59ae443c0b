"""Places and answers that record what happens to them, in one list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvindex import Rank
from kvindex.gateway.calls import Call, read_call
from kvindex.gateway.routing import Pin, Reservation, Serving
from kvindex.routing import KvSource

HEAD = ((b"content-type", b"text/event-stream; charset=utf-8"),)
JSON = ((b"content-type", b"application/json"),)


def event(text: str) -> bytes:
    """Return an event of a chat with a piece of its answer; none for the role."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE_FIELDS = (
    b'"usage":{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13,'
    b'"prompt_tokens_details":{"cached_tokens":7}}'
)
USAGE = b'data: {"choices":[],' + USAGE_FIELDS + b"}\n\n"
DONE = b"data: [DONE]\n\n"
WHOLE = b'{"choices":[{"message":{"content":"xyz"}}],' + USAGE_FIELDS + b"}"


def call_of(path: str = "/v1/chat/completions", **fields: Any) -> Call:
    """Return a request that streams and wants its usage, by default."""
    import msgspec

    default = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return read_call(path, msgspec.json.encode({**default, **fields}))


class LoggedReservation(Reservation):
    """A place that notes its calls in `log`, with its name."""

    reason = "held"
    held = 8
    missing = 2

    def __init__(
        self,
        log: list[tuple[Any, ...]],
        rank: Rank,
        *,
        body_fields: Mapping[str, Any] = {},
        role: str = "",
    ) -> None:
        self.rank = rank
        self.serving = Serving(
            worker=rank.worker,
            url=f"http://{rank.worker}",
            kind="vllm",
            version="0.33.0",
            models=("m",),
            adapters=(),
            first_rank=0,
            ranks=2,
            role=role,
        )
        self.pin = Pin(((b"x-data-parallel-rank", b"%d" % rank.dp_rank),), body_fields)
        self.source: KvSource | None = None
        self.told = Pin()
        self.prompt_tokens = 10
        self._log = log
        self.outcomes: list[str] = []  # of the engine: what its ejection is judged by

    def is_misnumbered(self, refusal: bytes, body: bytes) -> bool:
        is_so = b"rank" in refusal
        if is_so:
            self._log.append(("misnumbered", self.rank, refusal))
        return is_so

    def made(self, response_id: str) -> None:
        self._log.append(("made", self.rank, response_id))

    def fetch(self) -> None:
        self._log.append(("fetch", self.rank))

    def compute(self) -> None:
        self._log.append(("compute", self.rank))

    def fetched(self) -> None:
        self.source, self.told = None, Pin()

    def prefilled(self) -> None:
        self._log.append(("prefilled", self.rank))

    def failed(self, reason: str) -> None:
        self.outcomes.append(reason)

    def answered(self) -> None:
        self.outcomes.append("answered")

    def first_token(self) -> None:
        self._log.append(("first_token", self.rank))

    def touch(self, output_tokens: int) -> None:
        self._log.append(("touch", self.rank, output_tokens))

    def finish(self, cached_tokens: int | None, *, counts: bool) -> None:
        self._log.append(("finish" if counts else "uncounted", self.rank, cached_tokens))

    def cancel(self) -> None:
        self._log.append(("cancel", self.rank))


class LoggedAnswer:
    """The head of an answer; notes in `log` that it is closed."""

    def __init__(
        self,
        log: list[tuple[Any, ...]],
        status: int = 200,
        headers: Sequence[tuple[bytes, bytes]] = HEAD,
    ) -> None:
        self.status = status
        self.headers = list(headers)
        self._log = log

    def close(self) -> None:
        self._log.append(("close",))
