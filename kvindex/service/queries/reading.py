"""A query's JSON body to its tokens and the rest."""

from __future__ import annotations

import enum
import re

import msgspec

from kvindex.wire._native import read_query as _scan
from kvindex.wire.errors import UNREADABLE, ConfigurationError, QueryError

_FIELD = "token_ids"
_NO_LIMIT = 2**62
_SHOWN = 40  # bytes of what was found


class Fault(enum.IntEnum):
    """What is wrong with a body; the native core has the same numbers."""

    NO_OBJECT = 1
    SYNTAX = 2
    NO_ARRAY = 3
    BAD_TOKEN = 4
    REPEATED = 5
    TOO_MANY = 6
    TOO_DEEP = 7
    NO_TEXT = 8


class Query(msgspec.Struct, frozen=True):
    """What a query's body holds.

    Attributes:
        token_ids: the tokens, as a memoryview of uint32 that `match` reads in place; None if the
            body has no such field.
        rest: the same JSON object without them, to be decoded, and so checked, by msgspec.
    """

    token_ids: memoryview | None
    rest: bytes


def read_query(body: bytes | bytearray | memoryview, *, max_tokens: int | None = None) -> Query:
    """Return the tokens of a query's JSON, and the rest of it.

    The body is one JSON object in UTF-8. Its field `token_ids` is read by a single pass to numbers
    in memory, without a Python int for each. All other fields are left to the caller: decode
    `rest` with msgspec, which finds what is wrong there. A body that is no JSON leaves a rest that
    is none.

    Args:
        body: the bytes of the request.
        max_tokens: refuse more tokens than that; None: take as many as there are.

    Raises:
        QueryError: the body is no JSON object, or `token_ids` is no array of whole numbers from 0
            to 4294967295. The first fault of the body is reported. Values more than 100 levels
            deep count as malformed, and a second `token_ids` as a fault.
        ConfigurationError: `max_tokens` is negative.
        TypeError: `body` has no row of bytes to give.

    Complexity: O(bytes of the body) in time and in memory: 8,192 tokens take some 40 µs.
        The GIL is released for bodies of 256 KiB and more.

    Thread safety: any thread may call it.

    Examples:
        >>> query = read_query(b'{"model_name":"m", "token_ids": [1, 2, 3]}')
        >>> query.token_ids.tolist(), query.rest
        ([1, 2, 3], b'{"model_name":"m"}')
        >>> read_query(b'{"token_ids": [1, 2.5]}')
        Traceback (most recent call last):
        ...
        kvindex.wire.errors.QueryError: token_ids[1] is 2.5: a token is a whole number from 0 to ...
    """
    limit = _NO_LIMIT
    if max_tokens is not None:
        if max_tokens < 0:
            raise ConfigurationError(f"max_tokens is {max_tokens}: it is 0 or more, or None")
        limit = min(max_tokens, limit)
    scanned = _scan(body, limit)
    if len(scanned) == 3:
        raise _error(bytes(body), Fault(scanned[0]), scanned[1], scanned[2])
    tokens, rest = scanned
    return Query(None if tokens is None else memoryview(tokens).cast("I"), rest)


def _error(body: bytes, fault: Fault, at: int, index: int) -> QueryError:
    if fault is Fault.BAD_TOKEN:
        return _bad_token(body, at, index)
    if fault is Fault.TOO_MANY:
        return _about_tokens(f"more than {index} tokens: send fewer", "too_many", index)
    if fault is Fault.REPEATED:
        return _about_tokens("given more than once: send it once", "repeated")
    kind = None if fault in (Fault.SYNTAX, Fault.TOO_DEEP, Fault.NO_TEXT) else _kind(body, at)
    if fault is Fault.NO_ARRAY and kind is not None:
        return _about_tokens(f"{kind}: it must be an array of tokens", "type")
    if fault is Fault.NO_OBJECT and kind is not None and _is_json(body):
        return QueryError(f"the body is {kind}: it must be a JSON object", reason="type")
    return _malformed(body, fault, at)


def _malformed(body: bytes, fault: Fault, at: int) -> QueryError:
    if fault is Fault.NO_OBJECT and at < len(body):
        why = f"it begins with {_shown(body, at)}"
    elif fault is Fault.TOO_DEEP:
        why = f"at byte {at} values are nested more than 100 levels deep"
    elif fault is Fault.NO_TEXT:
        why = "it has bytes that are not UTF-8"
    elif at < len(body):
        why = f"at byte {at} stands {_shown(body, at)}, which cannot be there"
    else:
        why = f"it ends at byte {at}, within a value" if body else "it is empty"
    return QueryError(f"the body is not JSON: {why}", reason="malformed")


def _bad_token(body: bytes, at: int, index: int) -> QueryError:
    kind = _kind(body, at)
    if kind is None:
        return _malformed(body, Fault.SYNTAX, at)
    return QueryError(
        f"{_FIELD}[{index}] is {kind}: a token is a whole number from 0 to 4294967295",
        reason="range" if _OUT_OF_RANGE.match(body, at) else "type",
        field=_FIELD,
        position=index,
    )


def _about_tokens(what: str, reason: str, position: int | None = None) -> QueryError:
    return QueryError(f"{_FIELD} is {what}", reason=reason, field=_FIELD, position=position)


# Of a number that is no token: it has no fraction, no exponent, and is not "-0".
_OUT_OF_RANGE = re.compile(rb"-?[1-9][0-9]*(?![0-9.eE])")
_SCALAR = re.compile(
    rb"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)"
    rb"(?=[ \n\r\t,\]}]|\Z)"
)
_KINDS = {b'"': "a string", b"[": "an array", b"{": "an object"}


def _kind(body: bytes, at: int) -> str | None:
    """Return what kind of value begins at a byte, in words; None if it is no JSON."""
    scalar = _SCALAR.match(body, at)
    return _shown(scalar[0], 0) if scalar else _KINDS.get(body[at : at + 1])


def _shown(body: bytes, at: int) -> str:
    """Return what stands at a byte, fit for a line of a log."""
    text = repr(body[at : at + _SHOWN])[2:-1]
    return f"{text}…" if len(body) - at > _SHOWN else text


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except UNREADABLE:
        return False
    return True
