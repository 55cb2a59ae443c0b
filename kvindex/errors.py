"""Every error that kvindex raises, as one tree.

```
KVIndexError
├── ConfigurationError   (also ValueError)    a value given by the caller cannot work
│   └── DuplicatePublisherError (also KeyError)  a publisher of that name is registered already
├── UnknownRankError     (also KeyError)      a rank or worker that nobody added
├── TokenError           (also ValueError)    tokens whose type, shape or range cannot be read
├── DecodeError          (also ValueError)    bytes that are not an event batch
├── EncodeError          (also ValueError)    an event batch that the chosen dialect cannot carry
├── BusyError            (also TimeoutError)  a thread did not come to a call in time
├── ClosedError          (also RuntimeError)  the object was closed
├── NotLiveError         (also TimeoutError)  ranks that did not become live in time, and why
└── InvariantError       (also AssertionError)  a structure failed its own `check()`: our bug
```

Each also inherits the builtin that a stranger would catch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvindex.rank import Rank

__all__ = [
    "BusyError",
    "ClosedError",
    "ConfigurationError",
    "DecodeError",
    "DuplicatePublisherError",
    "EncodeError",
    "InvariantError",
    "KVIndexError",
    "NotLiveError",
    "TokenError",
    "UnknownRankError",
]


class KVIndexError(Exception):
    """Base of every error raised by kvindex."""


class ConfigurationError(KVIndexError, ValueError):
    """A value given by the caller cannot work; the message says which and what would."""


class DuplicatePublisherError(ConfigurationError, KeyError):
    """A publisher of that name is registered already."""

    __str__ = Exception.__str__  # KeyError would show the message quoted


class UnknownRankError(KVIndexError, KeyError):
    """A rank (or worker) that is not known here.

    Attributes:
        name: what was asked for.
        known: what is known, sorted.
    """

    def __init__(self, name: object, known: Iterable[object] = ()) -> None:
        self.name = name
        self.known = tuple(sorted(known, key=str))
        super().__init__(name)

    def __str__(self) -> str:
        listed = ", ".join(str(item) for item in self.known[:8]) or "none"
        more = f" and {len(self.known) - 8} more" if len(self.known) > 8 else ""
        return f"{self.name!s} is not known; known: {listed}{more}"


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


class EncodeError(KVIndexError, ValueError):
    """An event batch that the chosen dialect cannot carry."""


class BusyError(KVIndexError, TimeoutError):
    """The owning thread did not come to a call in time; the call was not carried out.

    Attributes:
        timeout: how long was waited, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        super().__init__(
            f"the subscriber's thread was busy for {timeout:g} s: its sink has not returned; "
            "nothing was done"
        )


class ClosedError(KVIndexError, RuntimeError):
    """The object was closed and takes no more calls."""


class NotLiveError(KVIndexError, TimeoutError):
    """Some ranks did not become live in time.

    Attributes:
        timeout: how long was waited, in seconds.
        reasons: for each rank that is not live, what is wrong and what to try.
    """

    def __init__(self, timeout: float, reasons: Mapping[Rank, str]) -> None:
        self.timeout = timeout
        self.reasons = dict(reasons)
        lines = "".join(f"\n  {rank}: {reason}" for rank, reason in sorted(self.reasons.items()))
        super().__init__(f"{len(self.reasons)} rank(s) not live after {timeout:g} s:{lines}")


class InvariantError(KVIndexError, AssertionError):
    """A structure failed its own `check()`: please report it, it is a bug in kvindex."""
