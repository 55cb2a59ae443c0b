"""Every error that kvindex raises; all are below `KVIndexError`.

Each also inherits the builtin that a stranger would catch. Three have branches of their own:

```
ConfigurationError ── DuplicatePublisherError
ClosedError ── QueueClosedError
PeerDiedError ── WriterDiedError, ReaderDiedError, ReaderEvictedError
```

`kvindex` exports those that its own names raise, and each other room likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Final

from kvindex.wire.rank import Rank

__all__ = [
    "BusyError",
    "ClosedError",
    "ConfigurationError",
    "DecodeError",
    "DiscoveryError",
    "DuplicateBookingError",
    "DuplicatePublisherError",
    "EncodeError",
    "EndpointRefusedError",
    "InUseError",
    "InvariantError",
    "KVIndexError",
    "NatsError",
    "NoCandidateError",
    "NotLiveError",
    "PeerDiedError",
    "QueryError",
    "QueueClosedError",
    "QueueTimeoutError",
    "ReaderDiedError",
    "ReaderEvictedError",
    "RegistrationError",
    "SegmentError",
    "SnapshotError",
    "TokenError",
    "UnknownBookingError",
    "UnknownRankError",
    "WaitCancelledError",
    "WriterDiedError",
]

UNREADABLE: Final = (ValueError, RecursionError)
"""What decoders raise for bytes of strangers: also for invalid UTF-8 and for deep nesting.

msgspec's own errors are ValueErrors (from 0.21 on).
"""


def how_to_install(extra: str) -> str:
    """Return what brings the packages of an extra, for a message that names a missing one."""
    return f"in kvindex's checkout, `pip install -e '.[{extra}]'`"


def check_options(function: str, options: Mapping[str, Any], known: Any) -> None:
    """Raise TypeError in the name of the function that was called, not of one behind it.

    `known` is a TypedDict of the options that there are.
    """
    for name in options:
        if name not in known.__annotations__:
            # At run time `**options` takes any name: a misspelled one would count as unset.
            close = get_close_matches(name, known.__annotations__, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


class KVIndexError(Exception):
    """Base of every error raised by kvindex; all of them pickle, attributes included."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are unpickled by calling their class, which wants more than the message.
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(
    kind: type[KVIndexError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> KVIndexError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class _ReasonedError(KVIndexError):
    """An error of one of several kinds."""

    def __init__(self, message: str, *, reason: str) -> None:
        self.reason = reason
        super().__init__(message)


class _RequestError(KVIndexError):
    """An error about one request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(self._text.format(request_id))

    _text: ClassVar[str]
    __str__ = Exception.__str__  # KeyError would show the message quoted


class ConfigurationError(KVIndexError, ValueError):
    """A value given by the caller cannot work; the message names it, and what would work."""


class DuplicatePublisherError(ConfigurationError, KeyError):
    """A publisher of that name is registered already."""

    __str__ = Exception.__str__  # KeyError would show the message quoted


class EndpointRefusedError(_ReasonedError, PermissionError):
    """An endpoint that came in a registration over HTTP, and that this server does not dial.

    Attributes:
        reason: "transport" (not tcp), "form", "name" (it has no address) or "network" (its address
            is in none of the allowed networks).
    """


class RegistrationError(_ReasonedError, ValueError):
    """A worker that a server does not accept, or does not know; the message is the whole answer.

    Attributes:
        reason: "conflict" (with another registration), "unknown" (there is none to remove),
            "invalid" (it cannot work) or "room" (there are too many).
    """


class UnknownRankError(KVIndexError, KeyError):
    """A rank (or worker) that is not known here, or a name that several ranks have.

    Attributes:
        name: the name that was given.
        known: what is known, or has that name, sorted.
        ambiguous: whether several have it.
    """

    def __init__(
        self, name: object, known: Iterable[object] = (), *, ambiguous: bool = False
    ) -> None:
        self.name = name
        self.known = tuple(sorted(known, key=str))
        self.ambiguous = ambiguous
        super().__init__(name)

    def __str__(self) -> str:
        # Eight: a message of thousands of ranks would fill a log.
        listed = ", ".join(str(item) for item in self.known[:8]) or "none"
        more = f" and {len(self.known) - 8} more" if len(self.known) > 8 else ""
        if isinstance(self.name, Rank):
            return f"{self.name} is not known; known: {listed}{more}"
        kind = "" if isinstance(self.name, str) else f" ({type(self.name).__name__})"
        name = f"{self.name!r}{kind}"
        if self.ambiguous:
            return f"{name} stands for several: {listed}{more}; give one as Rank(WORKER, DP_RANK)"
        return f"{name} is not known; known: {listed}{more}"


class TokenError(KVIndexError, ValueError):
    """Tokens that cannot be matched: wrong type, shape or range."""


class DecodeError(KVIndexError, ValueError):
    """Bytes that are not an event batch.

    Attributes:
        size: length of the refused payload in bytes.
    """

    def __init__(self, message: str, *, size: int = 0) -> None:
        self.size = size
        super().__init__(message)


class QueryError(_ReasonedError, ValueError):
    """A query's body that is no JSON, or not the JSON that a query is.

    Attributes:
        reason: "malformed" (no JSON), "type" (JSON of another kind than is wanted), "range" (a
            number that no token can have), "repeated" (a field that is there twice) or "too_many"
            (more tokens than are allowed).
        field: the field that is wrong; "" for the body as a whole.
        position: which of the field's values is wrong, counted from 0; None for all of it.
    """

    def __init__(
        self, message: str, *, reason: str, field: str = "", position: int | None = None
    ) -> None:
        self.field = field
        self.position = position
        super().__init__(message, reason=reason)

    @property
    def malformed(self) -> bool:
        """Whether the body is no JSON (HTTP 400), not merely the wrong one (HTTP 422)."""
        return self.reason == "malformed"


class EncodeError(KVIndexError, ValueError):
    """An event batch that the chosen dialect cannot carry."""


class BusyError(KVIndexError, TimeoutError):
    """The owning thread was too busy to carry out a call in time, or to finish it.

    Attributes:
        timeout: how long the call waited, in seconds.
        begun: whether the call has begun: then it is finished as soon as the sink returns. If
            not, it will not be carried out.
    """

    def __init__(self, timeout: float, *, begun: bool = False) -> None:
        self.timeout = timeout
        self.begun = begun
        outcome = "the call has begun and ends when that does" if begun else "nothing was done"
        super().__init__(
            f"the subscriber's thread was busy for {timeout:g} s: its sink has not returned; "
            f"{outcome}"
        )


class InUseError(KVIndexError, RuntimeError):
    """Another call is running, in another thread or interrupted by this one; nothing was done."""


class ClosedError(KVIndexError, RuntimeError):
    """The object was closed and accepts no more calls."""


class QueueClosedError(ClosedError):
    """The writer closed the queue, and this reader has read everything that was in it."""


class SnapshotError(_ReasonedError, ValueError):
    """Bytes that cannot be restored as an index.

    Attributes:
        reason: "format" (not a snapshot), "version", "truncated", "checksum", "backend" (made
            under another seed, or by a release with other prefix keys), "content" (well-formed
            bytes with contradictory content) or "room" (it exceeds the limits of the index).
    """


class SegmentError(KVIndexError, OSError):
    """Shared memory that cannot be created or attached; the message has the cause and a remedy."""


class QueueTimeoutError(KVIndexError, TimeoutError):
    """A queue had no room for a message, or no message came, in time.

    Attributes:
        timeout: how long the call waited, in seconds.
    """

    def __init__(self, message: str, *, timeout: float) -> None:
        self.timeout = timeout
        super().__init__(message)


class WaitCancelledError(KVIndexError, RuntimeError):
    """`cancel`, or `close` in another thread, ended a wait; no message was received."""


class PeerDiedError(KVIndexError, ConnectionError):
    """A party of a queue died without closing: it was killed, or crashed."""


class WriterDiedError(PeerDiedError):
    """The writer died; every message that it completed was read, and nothing more will come."""


class ReaderDiedError(PeerDiedError):
    """Readers died with messages unread and were removed; the others were sent the message.

    Attributes:
        ranks: the readers' ranks, sorted.
    """

    def __init__(self, message: str, *, ranks: Iterable[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(message)


class ReaderEvictedError(PeerDiedError):
    """The writer removed this reader: it was too slow, or seemed dead; attach again."""


class DiscoveryError(_ReasonedError, ConnectionError):
    """A source of engines (an engine, a file, a name, an API server) gave no list of them.

    Attributes:
        reason: "name" (no such host), "refused" (nothing listens), "unreachable", "timeout", "tls",
            "denied" (it wants another token), "status" (it answers an error), "content" (what it
            answers cannot be used), "off" (the engine publishes no events), "unsaid"
            (the engine does not report where it publishes) or "expired" (its list is out of date).
        url: the source.
    """

    def __init__(self, message: str, *, url: str, reason: str) -> None:
        super().__init__(message, reason=reason)
        self.url = url


class NatsError(KVIndexError, ConnectionError):
    """NATS cannot be reached, or refuses what was asked; the message has its reason."""


class NotLiveError(KVIndexError, TimeoutError):
    """Some ranks did not become live in time.

    Attributes:
        timeout: how long the call waited, in seconds.
        reasons: for each rank that is not live, what is wrong and what to try.
        engines: for each engine (by its URL) or source of engines that has not reported where
            to subscribe, why: its ranks are not known.
    """

    def __init__(
        self, timeout: float, reasons: Mapping[Rank, str], engines: Mapping[str, str] | None = None
    ) -> None:
        self.timeout = timeout
        self.reasons = dict(reasons)
        self.engines = dict(engines or {})
        lines = [f"\n  {rank}: {reason}" for rank, reason in sorted(self.reasons.items())]
        lines += [f"\n  {engine}: {reason}" for engine, reason in sorted(self.engines.items())]
        ranks = "1 rank is" if len(self.reasons) == 1 else f"{len(self.reasons)} ranks are"
        # Engines that discovery could not read have no ranks yet: they are named beside them.
        trouble = [f"{ranks} not live"] if self.reasons else []
        if self.engines:
            count = len(self.engines)
            trouble.append("1 engine is not found" if count == 1 else f"{count} are not found")
        what = " and ".join(trouble) or "no rank is known"
        super().__init__(f"{what} after {timeout:g} s:{''.join(lines)}".removesuffix(":"))


class NoCandidateError(KVIndexError, LookupError):
    """No rank may be chosen for a request.

    Attributes:
        ranks: how many ranks are known.
        refused: by reason (a filter's name, "drained", "ranks"), how many ranks it refused.
    """

    def __init__(self, ranks: int, refused: Mapping[str, int]) -> None:
        why = ", ".join(f"{reason} refuses {count}" for reason, count in refused.items())
        super().__init__(
            f"none of {ranks} ranks may be chosen: {why}"
            if ranks
            else "no rank is known yet: wait for the client to be live, or add ranks to the index"
        )
        self.ranks = ranks
        self.refused = dict(refused)


class DuplicateBookingError(_RequestError, ValueError):
    """A request id that an open booking has already: `request_id`."""

    _text = "request {!r} has an open booking: finish or cancel it, or give another id"


class UnknownBookingError(_RequestError, KeyError):
    """A request id that no open booking has (never booked, ended, or expired): `request_id`."""

    _text = "no open booking of request {!r}: it ended, or has expired"


class InvariantError(KVIndexError, AssertionError):
    """A structure is not whole.

    It failed its own `check()`: please report it, it is a bug in kvindex. Or a change of it was cut
    short, as the message shows: by an exception of a signal's handler, for instance.
    """
