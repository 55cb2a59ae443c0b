"""One pass over a query's JSON that finds its tokens; native/core/query_reader.hpp says how.

`scan_in_python` is its twin, for where the native module was not built.
"""

from __future__ import annotations

import enum
import re
from array import array
from typing import NamedTuple, TypeAlias

__all__ = ["Fault", "Scanned", "scan_in_python"]

_MAX_DEPTH = 100


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


Scanned: TypeAlias = tuple[bytes | None, bytes] | tuple[int, int, int]
"""The tokens as packed uint32 and the rest; or the fault, its byte, and the tokens before it."""


def scan_in_python(body: bytes | bytearray | memoryview, max_tokens: int) -> Scanned:
    """Return a body's tokens and its rest, or its first fault.

    Raises:
        TypeError: `body` has no row of bytes to give.
    """
    text = body if isinstance(body, bytes) else _bytes(body)
    tokens = array("I")
    try:
        cut = _object(text, tokens, max_tokens)
    except _FoundError as found:
        return found.fault.value, found.at, len(tokens)
    rest = text if cut is None else text[: cut.start] + text[cut.stop :]
    try:
        rest.decode()
    except UnicodeDecodeError:
        return Fault.NO_TEXT.value, len(text), len(tokens)
    return (None if cut is None else tokens.tobytes()), rest


def _bytes(body: bytearray | memoryview) -> bytes:
    try:
        view = memoryview(body)
    except TypeError:
        view = None
    if view is None or not view.c_contiguous:
        raise TypeError("a body is bytes, a bytearray or a memoryview")
    return view.tobytes()


class _FoundError(Exception):
    def __init__(self, fault: Fault, at: int) -> None:
        super().__init__(fault, at)
        self.fault = fault
        self.at = at


class _Member(NamedTuple):
    """Where a member begins and ends, the comma that goes with it included."""

    start: int
    stop: int


_SPACE = re.compile(rb"[ \n\r\t]*")
_UNESCAPED = re.compile(rb'[^"\\]*')
_SCALAR = re.compile(rb"[^,} \n\r\t]*")
_PLAIN = re.compile(rb'[^"\[\]{}]*')
_TOKEN = re.compile(rb"(0|[1-9][0-9]{0,9})(?=[ \n\r\t,\]])")
_DIGITS = re.compile(rb"[0-9]{0,11}")
# A letter stands as it is, or as \u and four hexadecimal digits.
_NAME = re.compile(b"".join(rb"(?:%c|\\u00(?i:%02x))" % (c, c) for c in b"token_ids"))


def _object(text: bytes, tokens: array[int], max_tokens: int) -> _Member | None:
    """Read the whole body; return what to leave out of it, None if there are no tokens."""
    at = _skip_space(text, 0)
    if text[at : at + 1] != b"{":
        raise _FoundError(Fault.NO_OBJECT, at)
    at = _skip_space(text, at + 1)
    cut = None
    if text[at : at + 1] == b"}":
        at += 1
    else:
        at, cut = _members(text, at, tokens, max_tokens)
    at = _skip_space(text, at)
    if at != len(text):
        raise _FoundError(Fault.SYNTAX, at)
    return cut


def _members(
    text: bytes, at: int, tokens: array[int], max_tokens: int
) -> tuple[int, _Member | None]:
    cut = None
    comma = None
    while True:
        start = at
        name, at = _string(text, at)
        is_tokens = _NAME.fullmatch(name) is not None
        if is_tokens and cut is not None:
            raise _FoundError(Fault.REPEATED, start)
        at = _skip_space(text, _take(text, _skip_space(text, at), b":"))
        at = _tokens(text, at, tokens, max_tokens) if is_tokens else _skip_value(text, at)
        value_end = at
        at = _skip_space(text, at)
        is_last = text[at : at + 1] != b","
        if is_tokens and is_last:
            cut = _Member(start if comma is None else comma, value_end)
        elif is_tokens:
            cut = _Member(start, at + 1)
        if is_last:
            return _take(text, at, b"}"), cut
        comma = at
        at = _skip_space(text, at + 1)


def _tokens(text: bytes, at: int, tokens: array[int], max_tokens: int) -> int:
    if at == len(text):
        raise _FoundError(Fault.SYNTAX, at)
    if text[at : at + 1] != b"[":
        raise _FoundError(Fault.NO_ARRAY, at)
    at = _skip_space(text, at + 1)
    if text[at : at + 1] == b"]":
        return at + 1
    while True:
        at = _token(text, at, tokens, max_tokens)
        at = _skip_space(text, at)
        if text[at : at + 1] == b"]":
            return at + 1
        at = _skip_space(text, _take(text, at, b","))


def _token(text: bytes, at: int, tokens: array[int], max_tokens: int) -> int:
    if at == len(text):
        raise _FoundError(Fault.SYNTAX, at)
    if len(tokens) == max_tokens:
        raise _FoundError(Fault.TOO_MANY, at)
    found = _TOKEN.match(text, at)
    if found is None or (value := int(found[1])) >= 2**32:
        end = _skip(_DIGITS, text, at)
        if end == len(text):
            raise _FoundError(Fault.SYNTAX, end)
        raise _FoundError(Fault.BAD_TOKEN, at)
    tokens.append(value)
    return found.end()


def _skip_value(text: bytes, at: int) -> int:
    first = text[at : at + 1]
    if first == b'"':
        return _string(text, at)[1]
    if first in (b"{", b"["):
        return _skip_nested(text, at)
    end = _skip(_SCALAR, text, at)
    if end == at:
        raise _FoundError(Fault.SYNTAX, at)
    return end


def _skip_nested(text: bytes, at: int) -> int:
    depth = 0
    while True:
        at = _skip(_PLAIN, text, at)
        found = text[at : at + 1]
        if found == b'"':
            at = _string(text, at)[1]
            continue
        if not found:
            raise _FoundError(Fault.SYNTAX, at)
        depth += 1 if found in b"{[" else -1
        if depth > _MAX_DEPTH:
            raise _FoundError(Fault.TOO_DEEP, at)
        at += 1
        if depth == 0:
            return at


def _string(text: bytes, at: int) -> tuple[bytes, int]:
    """Return what stands between the quotes, and where the string ends."""
    first = _take(text, at, b'"')
    at = _skip(_UNESCAPED, text, first)
    while text[at : at + 1] == b"\\":
        at = _skip(_UNESCAPED, text, at + 2)
    if at >= len(text):
        raise _FoundError(Fault.SYNTAX, len(text))
    return text[first:at], at + 1


def _take(text: bytes, at: int, wanted: bytes) -> int:
    if text[at : at + 1] != wanted:
        raise _FoundError(Fault.SYNTAX, at)
    return at + 1


def _skip_space(text: bytes, at: int) -> int:
    return _skip(_SPACE, text, at)


def _skip(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # each of these matches nothing at all, too
    return found.end()
