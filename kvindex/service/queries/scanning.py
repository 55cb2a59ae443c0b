"""A query's JSON taken apart by msgspec, for where the native module was not built.

The tokens, the rest and what is refused are those of native/core/query_reader.hpp. Of a body with
several faults it may name another one, and of malformed JSON another byte.
"""

from __future__ import annotations

import enum
import json
import re
from array import array
from typing import Annotated, Final, NoReturn, TypeAlias

import msgspec

__all__ = ["Fault", "Scanned", "scan_in_python"]

_MAX_DEPTH: Final = 100
_FIELD: Final = "token_ids"


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

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUES = msgspec.json.Decoder(list[msgspec.Raw])
_TOKENS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]])
_TOKEN = re.compile(rb"0|[1-9][0-9]{0,9}")
_SPACE: Final = b" \n\r\t"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_PLACE = re.compile(r"\(byte (\d+)\)")


def scan_in_python(body: bytes | bytearray | memoryview, max_tokens: int) -> Scanned:
    """Return a body's tokens and its rest, or a fault of it.

    Raises:
        TypeError: `body` has no row of bytes to give.
    """
    if not isinstance(body, bytes | bytearray | memoryview) or not memoryview(body).c_contiguous:
        raise TypeError("a body is bytes, a bytearray or a memoryview")
    text = bytes(body)
    try:
        members = _members(text)
        given = members.pop(_FIELD, None)
        if given is None:
            return None, text
        return _tokens(text, bytes(given), max_tokens), msgspec.json.encode(members)
    except _FaultError as error:
        return error.fault.value, error.at, error.index


class _FaultError(Exception):
    def __init__(self, fault: Fault, at: int = 0, index: int = 0) -> None:
        super().__init__(fault, at, index)
        self.fault = fault
        self.at = at
        self.index = index


def _members(text: bytes) -> dict[str, msgspec.Raw]:
    """Return the values of a body by their names."""
    begin = len(text) - len(text.lstrip(_SPACE))
    if text[begin : begin + 1] != b"{":
        raise _FaultError(Fault.NO_OBJECT, begin)
    _check_depth(text)
    try:
        text.decode()
        members = _MEMBERS.decode(text)
    except UnicodeDecodeError:
        raise _FaultError(Fault.NO_TEXT, len(text)) from None
    except msgspec.DecodeError as error:
        place = _PLACE.search(str(error))  # of what follows the object, the byte behind
        at = len(text) if place is None else min(int(place[1]), len(text) - 1)
        raise _FaultError(Fault.SYNTAX, at) from None
    names: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        names[:] = [name for name, _ in pairs]  # the outermost object is the last one to end

    # A dict holds the last of two values; this shows both. Numbers are not read: they may be long.
    json.loads(text, object_pairs_hook=note, parse_int=len, parse_float=len)
    if names.count(_FIELD) > 1:
        raise _FaultError(Fault.REPEATED)
    return members


def _check_depth(text: bytes) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(lambda string: b" " * len(string[0]), text)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > _MAX_DEPTH + 1:
            raise _FaultError(Fault.TOO_DEEP, bracket.start())


def _tokens(text: bytes, given: bytes, max_tokens: int) -> bytes:
    """Return the packed tokens of `given`, which stands in the body."""
    try:
        tokens = _TOKENS.decode(given)
        is_good = b"-0" not in given  # msgspec takes that for 0
    except msgspec.DecodeError:
        is_good = False
    if not is_good:
        _raise_fault(text, given, max_tokens)
    if len(tokens) > max_tokens:
        raise _FaultError(Fault.TOO_MANY, index=max_tokens)
    return array("I", tokens).tobytes()


def _raise_fault(text: bytes, given: bytes, max_tokens: int) -> NoReturn:
    """Say which of the tokens is none."""
    place = re.search(b":[%b]*(%b)[%b]*[,}]" % (_SPACE, re.escape(given), _SPACE), text)
    assert place is not None
    at = place.start(1)
    if not given.startswith(b"["):
        raise _FaultError(Fault.NO_ARRAY, at)
    at += 1
    for index, value in enumerate(map(bytes, _VALUES.decode(given))):
        at = text.index(value, at)
        if index == max_tokens:
            raise _FaultError(Fault.TOO_MANY, at, index)
        if not _TOKEN.fullmatch(value) or int(value) >= 2**32:
            raise _FaultError(Fault.BAD_TOKEN, at, index)
        at += len(value)
    raise AssertionError("all are tokens")
