"""A prompt's tokens, converted only as far as they are looked at.

Every token is packed as its value modulo 2**64 in eight bytes, so that `int32`, `uint32`, `int64`
and plain Python ints of the same value give the same bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from kvindex.errors import TokenError
from kvindex.wire import text_token

__all__ = ["Prompt", "TokenIds", "pack_tokens"]

TokenIds: TypeAlias = Any
"""Token ids: a sequence of ints, or a flat contiguous buffer of 4- or 8-byte integers."""

TOKEN_BYTES = 8
_CHUNK = 1024  # tokens converted at a time: small enough to be lazy, large enough to be quick
_INTEGERS = frozenset("iIlLqQnN")
_NATIVE = "@=<" if sys.byteorder == "little" else "@=>!"  # prefixes of our own byte order
_Code: TypeAlias = Literal["i", "I", "q", "Q"]
_CODES: dict[int, tuple[_Code, _Code]] = {4: ("i", "I"), 8: ("q", "Q")}


def pack_tokens(token_ids: Iterable[Any]) -> bytes:
    """Return the tokens as packed 8-byte integers.

    Raises:
        TokenError: a token is not an int (or a string of TensorRT-LLM), or leaves 64 bits.
    """
    try:
        return array("q", token_ids).tobytes()
    except (OverflowError, TypeError):
        return array("q", [_signed(token) for token in token_ids]).tobytes()


def _signed(token: Any) -> int:
    if isinstance(token, str):
        return text_token(token)
    try:
        value = int(token.__index__())
    except AttributeError:
        raise TokenError(
            f"token ids must be ints, not {type(token).__name__} ({token!r:.40})"
        ) from None
    if not -(1 << 63) <= value < 1 << 64:
        raise TokenError(f"token id {value} does not fit into 64 bits")
    return value - (1 << 64) if value >= 1 << 63 else value


class Prompt:
    """Token ids that a query brought, packed lazily.

    Args:
        token_ids: list, tuple, `array`, or any contiguous one-dimensional buffer of 4- or 8-byte
            integers (numpy arrays without a copy). Plain `bytes` are native-endian 32-bit tokens.

    Raises:
        TokenError: the type, the item size or the layout cannot be read as token ids.
    """

    __slots__ = ("_packed", "_source", "length")

    def __init__(self, token_ids: TokenIds) -> None:
        self._source = source = _readable(token_ids)
        self.length = len(source)
        self._packed: bytearray | memoryview = bytearray()
        if self.length and not isinstance(source, memoryview):
            # So that a prompt of floats or words is refused, however little of it is looked at.
            self._packed = bytearray(pack_tokens(source[:1]))
        if self.length and isinstance(source, memoryview) and source.itemsize == TOKEN_BYTES:
            self._packed = source.cast("B")

    def packed(self, start: int, stop: int) -> bytes:
        """Return tokens `start` … `stop - 1` packed; both must lie within the prompt."""
        missing = stop * TOKEN_BYTES - len(self._packed)
        if missing > 0:
            assert isinstance(self._packed, bytearray)
            done = len(self._packed) // TOKEN_BYTES
            chunk_end = (done // _CHUNK + 1) * _CHUNK
            self._packed += pack_tokens(self._source[done : max(stop, chunk_end)])
        return bytes(self._packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])


def _readable(token_ids: TokenIds) -> Sequence[int] | memoryview[int]:
    if isinstance(token_ids, (list, tuple, range)):
        return token_ids
    try:
        view = memoryview(token_ids)
    except TypeError:
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
            return token_ids
        raise TokenError(
            "token_ids must be a sequence of ints or a buffer of 4- or 8-byte integers, "
            f"not {type(token_ids).__name__}"
        ) from None
    if not isinstance(token_ids, (bytes, bytearray)):
        return _checked_view(view)
    if len(view) % 4:
        raise TokenError(
            f"{len(view)} bytes are no whole number of 32-bit tokens; "
            "pass 4 bytes per token, native byte order"
        )
    return _cast(view, "I")


def _checked_view(view: memoryview) -> memoryview[int]:
    if view.ndim != 1 or not view.c_contiguous:
        raise TokenError(
            f"token_ids must be one-dimensional and contiguous, not of shape {view.shape} with "
            f"strides {view.strides}; pass a contiguous copy"
        )
    kind = view.format.lstrip(_NATIVE)
    if kind not in _INTEGERS or view.itemsize not in _CODES:
        raise TokenError(
            f"token_ids of buffer format {view.format!r} with {view.itemsize} bytes an item; "
            "4- or 8-byte native integers are needed"
        )
    signed, unsigned = _CODES[view.itemsize]
    return _cast(view, signed if kind.islower() else unsigned)


def _cast(view: memoryview, code: _Code) -> memoryview[int]:
    """Read a view as integers of another code; memoryview refuses to cast empty ones."""
    return view.cast("B").cast(code) if view.nbytes else memoryview(array(code))
