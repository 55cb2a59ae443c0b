"""What identifies a prompt's blocks: its tokens, and besides them LoRAs, salts and extra keys.

Tokens are converted only as far as they are looked at. Every token is packed as its value modulo
2**64 in eight bytes, so that `int32`, `uint32`, `int64` and plain Python ints of the same value
give the same bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from kvindex.wire import BlockStored, text_token
from kvindex.wire.errors import TokenError


class TokenBuffer(Protocol):
    """A flat, contiguous buffer of 4- or 8-byte integers: `array`, `memoryview`, a numpy array."""

    @property
    def itemsize(self) -> int: ...

    def tobytes(self) -> bytes: ...

    def tolist(self) -> Any: ...

    def __len__(self) -> int: ...


TokenIds: TypeAlias = Sequence[int] | list[int | str] | tuple[int | str, ...] | TokenBuffer
"""The token ids of one prompt: a sequence of ints, or a flat buffer of 4- or 8-byte integers.

Buffers (`array`, numpy) are read without a copy, and are the quickest. Strings among the tokens are
for TensorRT-LLM, whose image digests are tokens. A `str` or `bytes` is not a prompt: it is refused.
A negative id is no error, since a check would cost time at each match: no rank holds it, and
`explain` says so.
"""

TEXT_TOKENS = range(2**62, 2**63)
"""What `text_token` makes of text; no vocabulary reaches there."""

TOKEN_BYTES = 8
_CHUNK = 1024  # tokens converted at a time: small enough to be lazy, large enough to be quick
_INTEGERS = frozenset("iIlLqQnN")
_NATIVE = "@=<" if sys.byteorder == "little" else "@=>!"  # prefixes of our own byte order
_NAMES = {  # of buffer formats, for people
    "b": "int8",
    "B": "uint8",
    "h": "int16",
    "H": "uint16",
    "?": "bool",
    "e": "float16",
    "f": "float32",
    "d": "float64",
}
_Code: TypeAlias = Literal["i", "I", "q", "Q"]
_CODES: dict[int, tuple[_Code, _Code]] = {4: ("i", "I"), 8: ("q", "Q")}


def pack_tokens(token_ids: Iterable[Any], *, text: Callable[[], bool] = lambda: True) -> bytes:
    """Return the tokens as packed 8-byte integers, or raise TokenError.

    `text` is called if there is a string: whether a string can be a token.
    """
    try:
        return array("q", token_ids).tobytes()
    # Token by token only where that fails: ids from 2**63 on, and text.
    except (OverflowError, TypeError):
        return array("q", [_signed(token, text) for token in token_ids]).tobytes()


def holds_text(token_ids: Sequence[Any]) -> bool:
    """Return whether an event's tokens include text, as TensorRT-LLM's do.

    Decoding has turned text into ints already (`text_token`); a program may also give strings.
    """
    try:
        most = max(token_ids, default=0)
        return most >= TEXT_TOKENS.start and any(token in TEXT_TOKENS for token in token_ids)
    except TypeError:
        return any(isinstance(token, str) for token in token_ids)


def _signed(token: Any, text: Callable[[], bool]) -> int:
    if isinstance(token, str):
        if text():
            return text_token(token)
        raise TokenError(
            f"token ids must be ints, not str ({token!r:.40}): no rank has stored text tokens. "
            "Pass the tokenizer's ids; for TensorRT-LLM's image digests, pass "
            "kvindex.wire.text_token(digest)"
        )
    try:
        value = int(token.__index__())
    except (AttributeError, TypeError):
        row = ": pass one prompt, e.g. row 0" if isinstance(token, Sequence) else ""
        raise TokenError(
            f"token ids must be ints, not {type(token).__name__} ({token!r:.40}){row}"
        ) from None
    if not -(1 << 63) <= value < 1 << 64:
        raise TokenError(f"token id {value} does not fit into 64 bits")
    return value - (1 << 64) if value >= 1 << 63 else value


class Prompt:
    """Token ids that a query brought, without those to recompute, packed lazily.

    `text` is called if there is a string: whether a string can be a token.
    """

    __slots__ = ("_packed", "_source", "_text", "length")

    def __init__(
        self, token_ids: TokenIds, recomputed: int = 0, *, text: Callable[[], bool] = lambda: True
    ) -> None:
        self._source = source = readable(token_ids)
        self._text = text
        self.length = max(0, len(source) - recomputed)
        self._packed: bytearray | memoryview = bytearray()
        if isinstance(source, memoryview):
            if self.length and source.itemsize == TOKEN_BYTES:
                self._packed = source.cast("B")
        else:
            # So that a prompt of floats or words is refused, however little of it is read.
            head = pack_tokens(source[: min(_CHUNK, max(self.length, 1))], text=text)
            self._packed = bytearray(head[: self.length * TOKEN_BYTES])

    def whole(self) -> array[int]:
        """Return all tokens that take part, as signed ints of 64 bits."""
        tokens = array("q")
        tokens.frombytes(self.packed(0, self.length))
        return tokens

    def packed(self, start: int, stop: int) -> bytes:
        """Return tokens `start` … `stop - 1` packed; both must lie within the prompt."""
        missing = stop * TOKEN_BYTES - len(self._packed)
        if missing > 0:
            assert isinstance(self._packed, bytearray)
            done = len(self._packed) // TOKEN_BYTES
            chunk_end = min((done // _CHUNK + 1) * _CHUNK, self.length)
            self._packed += pack_tokens(self._source[done : max(stop, chunk_end)], text=self._text)
        return bytes(self._packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])


def readable(token_ids: Any) -> Sequence[int] | memoryview[int]:
    if isinstance(token_ids, (list, tuple, range)):
        return token_ids
    if isinstance(token_ids, (bytes, bytearray)):
        raise TokenError(
            f"token_ids must not be plain {type(token_ids).__name__}: it may be text. Pass the "
            "tokenizer's ids; for 32-bit tokens in native byte order, pass "
            'memoryview(data).cast("I")'
        )
    try:
        view = memoryview(token_ids)
    except TypeError:
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, str):
            return list(token_ids)  # a deque cannot be sliced
        raise TokenError(
            "token_ids must be a sequence of ints or a buffer of 4- or 8-byte integers, "
            f"not {type(token_ids).__name__}{_advice(token_ids)}"
        ) from None
    if view.ndim != 1:
        raise TokenError(
            f"token_ids must be one-dimensional, not of shape {view.shape}: "
            "pass one prompt, e.g. row 0 (token_ids[0])"
        )
    if not view.c_contiguous:
        raise TokenError(
            f"token_ids must be contiguous, not of shape {view.shape} with strides "
            f"{view.strides}: pass a contiguous copy"
        )
    kind = view.format.lstrip(_NATIVE)
    if kind not in _INTEGERS or view.itemsize not in _CODES:
        name = _NAMES.get(kind, "no native integers")
        raise TokenError(
            f"token_ids are {name} (buffer format {view.format!r}, {view.itemsize} bytes an item); "
            "4- or 8-byte native integers are needed: pass token_ids.astype('int32') of a numpy "
            "array, array('i', [int(token) for token in token_ids]) of others"
        )
    signed, unsigned = _CODES[view.itemsize]
    code = signed if kind.islower() else unsigned
    # memoryview refuses to cast what is empty.
    return view.cast("B").cast(code) if view.nbytes else memoryview(array(code))


def _advice(token_ids: object) -> str:
    """Return how to get a list of tokens from a tokenizer's input or output."""
    if isinstance(token_ids, str):
        return "; pass tokenizer.encode(text)"
    if isinstance(token_ids, Mapping):
        return "; pass its ['input_ids']"
    if not hasattr(token_ids, "tolist"):
        return ""
    rows = getattr(token_ids, "ndim", 1) == 2
    return "; pass token_ids[0].tolist() (row 0)" if rows else "; pass token_ids.tolist()"


# Besides the tokens -----------------------------------------------------------------------------

Lora: TypeAlias = str | int | None
"""A LoRA adapter: its name, or its number for engines that send no names; None for none."""

ExtraKeys: TypeAlias = Sequence[Iterable[Any] | None]
"""For each block of a prompt what its identity covers besides tokens; None for nothing."""

_encode = msgspec.msgpack.Encoder().encode


class Namespace(NamedTuple):
    """The settings that separate prompts of equal tokens from the first block on.

    Attributes:
        block_size: tokens per block.
        lora: adapter name where the engine sends one, else its numeric id, else None.
        lookahead: tokens after a block that its identity covers too (0 for most engines).
    """

    block_size: int
    lora: Lora
    lookahead: int


def event_lora(event: BlockStored) -> Lora:
    """Return the adapter's name, else its id; an empty name and id 0 mean none, as in a query."""
    return event.lora_name or event.lora_id or None


def pack_extra(items: Iterable[Any] | None, *, lora: Lora = None, salt: str | None = None) -> bytes:
    """Return one block's extra keys in a canonical form: order does not matter, LoRA is left out.

    vLLM repeats the LoRA name in each block's extra keys and puts the cache salt among those of
    the first one; SGLang sends both apart. The canonical form is the same for both.
    """
    rest = without_lora(items, lora)
    if salt:
        rest.append(salt)
    return b"".join(sorted(_encode(item) for item in rest))


def without_lora(items: Iterable[Any] | None, lora: Lora) -> list[Any]:
    """Return a block's extra keys without the LoRA's name."""
    rest = list(items or ())
    if isinstance(lora, str) and lora in rest:
        rest.remove(lora)
    return rest


def lora_tag(lora: Lora) -> bytes:
    """Return the native name of a LoRA: apart for names, for numeric ids and for none.

    Examples:
        >>> lora_tag("sql"), lora_tag(7), lora_tag(None)
        (b'ssql', b'i7', b'')
    """
    if not lora:
        return b""
    return b"s" + lora.encode("utf-8", "surrogatepass") if isinstance(lora, str) else b"i%d" % lora


def tagged_lora(tag: bytes) -> Lora:
    """Return the LoRA that a native name means."""
    if not tag:
        return None
    return tag[1:].decode("utf-8", "surrogatepass") if tag[:1] == b"s" else int(tag[1:])
