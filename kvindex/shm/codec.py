"""How an object becomes a message's body, and back.

msgpack by default: a stranger's bytes can only be refused. pickle runs any code in the bytes, so
both sides must choose it by name.

Large buffers need not pass through the encoder: wrap them in `pickle.PickleBuffer`, and with either
codec they go straight into the chunk, and return as `bytearray` (with pickle, inside the object
that they were part of: numpy arrays do this by themselves). Such a body begins with the count of
buffers (u32) and the length of the encoded object and of each buffer (u64), all little-endian.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvindex.shm.ring import RAW, Buffer
from kvindex.wire.errors import UNREADABLE, ConfigurationError, DecodeError, EncodeError

ENCODED, BUFFERS = 1, 2
"""Kinds of messages beside `RAW`: an encoded object, and one with buffers beside it."""

_COUNT = struct.Struct("<I")
_MAX_BUFFERS = 1 << 16
_WORTH_A_BUFFER = 4096  # bytes from which copying twice costs more than keeping an entry for it
_BUFFER = 1  # the msgpack extension for an out-of-band buffer, with its number


class Codec(Protocol):
    """Turns objects into bytes. For one thread at a time.

    The author of `decode` must make it safe against hostile bytes: a remote reader's bytes come
    over a network, and can be changed on the way unless the connection is encrypted.

    Attributes:
        name: the name in a handle, so that both sides use the same codec.
    """

    name: str

    def encode(self, obj: Any) -> tuple[bytes, Sequence[Buffer]]:
        """Return an object's bytes, and the buffers that go beside them.

        Raises:
            EncodeError: the object cannot be encoded.
        """

    def decode(self, data: Buffer, buffers: Sequence[bytearray]) -> Any:
        """Return the object; it must not keep `data`, which is overwritten later.

        Raises:
            DecodeError: these are not bytes of this codec.
        """


class MsgpackCodec:
    """msgpack through msgspec: plain values, bytes, lists, dicts, and msgspec's Structs.

    Tuples and sets return as lists, bytes-like objects as bytes, Structs as dicts unless `type`
    names another type.

    Args:
        type: the type that messages are decoded to, as for `msgspec.msgpack.Decoder`.

    Examples:
        >>> codec = MsgpackCodec()
        >>> codec.decode(*codec.encode({"block": 7, "tokens": (1, 2)}))
        {'block': 7, 'tokens': [1, 2]}
    """

    name = "msgpack"

    def __init__(self, type: Any = Any) -> None:  # noqa: A002 (as msgspec names it)
        self._out: list[Buffer] = []
        self._in: Sequence[bytearray] = ()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._set_aside)
        self._decoder = msgspec.msgpack.Decoder(type, ext_hook=self._put_back)

    def encode(self, obj: Any) -> tuple[bytes, Sequence[Buffer]]:
        # A buffer that is not contiguous is a BufferError, from `raw`.
        try:
            data = self._encoder.encode(obj)
        except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
            raise EncodeError(f"msgpack cannot carry this: {error}") from error
        finally:  # whatever was raised, nothing is left over for the next message
            buffers, self._out = self._out, []
        return data, buffers or ()

    def decode(self, data: Buffer, buffers: Sequence[bytearray] = ()) -> Any:
        self._in = buffers
        try:
            return self._decoder.decode(data)
        except UNREADABLE as error:
            raise DecodeError(f"not a message in msgpack: {error}", size=len(data)) from error
        finally:
            self._in = ()

    def _set_aside(self, obj: Any) -> Any:
        if isinstance(obj, pickle.PickleBuffer):
            self._out.append(obj.raw())
            return msgspec.msgpack.Ext(_BUFFER, (len(self._out) - 1).to_bytes(4, "big"))
        raise TypeError(
            f"a {type(obj).__name__}; send plain values or Structs, wrap buffers in "
            'pickle.PickleBuffer, or make the queue with codec="pickle"'
        )

    def _put_back(self, code: int, data: memoryview) -> Any:
        number = int.from_bytes(data, "big")
        if code != _BUFFER or number >= len(self._in):
            raise ValueError(f"extension {code} with buffer {number} of {len(self._in)}")
        return self._in[number]


class PickleCodec:
    """pickle, protocol 5, with out-of-band buffers; decoding runs any code in the bytes."""

    name = "pickle"

    def encode(self, obj: Any) -> tuple[bytes, Sequence[Buffer]]:
        buffers: list[pickle.PickleBuffer] = []

        def keep_inside(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _WORTH_A_BUFFER:
                return True
            buffers.append(buffer)
            return False

        try:
            data = pickle.dumps(obj, protocol=5, buffer_callback=keep_inside)
        except Exception as error:  # an object's own __reduce__ raises what it likes
            raise EncodeError(f"pickle cannot carry this: {error}") from error
        return data, [buffer.raw() for buffer in buffers]

    def decode(self, data: Buffer, buffers: Sequence[bytearray] = ()) -> Any:
        try:
            return pickle.loads(data, buffers=buffers)
        except Exception as error:  # likewise
            raise DecodeError(f"not a message in pickle: {error!r}", size=len(data)) from error


def choose_codec(codec: str | Codec) -> Codec:
    """Return the codec of that name, or the one given; ConfigurationError if there is none."""
    if isinstance(codec, type):
        raise ConfigurationError(
            f"codec must be a Codec, not the class of one: pass {codec.__name__}()"
        )
    if codec == "msgpack":
        return MsgpackCodec()
    if codec == "pickle":
        return PickleCodec()
    if isinstance(codec, str) or not all(hasattr(codec, a) for a in ("name", "encode", "decode")):
        raise ConfigurationError(f'codec must be "msgpack", "pickle" or a Codec, not {codec!r}')
    return codec


def body_of(obj: Any, codec: Codec) -> tuple[int, Buffer | list[Buffer], int]:
    """Return an object's kind, its body as a buffer or as several, and the body's length."""
    if type(obj) is bytes:  # whatever the codec: already what is sent
        return RAW, obj, len(obj)
    data, buffers = codec.encode(obj)
    if not buffers:
        return ENCODED, data, len(data)
    if len(buffers) > _MAX_BUFFERS:
        raise EncodeError(f"{len(buffers)} buffers in a message: at most {_MAX_BUFFERS}")
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    lengths = [len(data), *map(len, views)]
    head = _COUNT.pack(len(views)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    parts: list[Buffer] = [head, data, *views]
    return BUFFERS, parts, len(head) + sum(lengths)


def decoder_of(codec: Codec) -> Callable[[int, Any], Any]:
    """Return a function that makes an object from a kind and a body, and keeps nothing of the body.

    The body is a buffer; or, for `BUFFERS`, a list of them.
    """

    def decode(kind: int, body: Any) -> Any:
        if kind == ENCODED:
            return codec.decode(body, ())
        if kind == RAW:
            # Copied out of a ring: the chunk is written again once this returns.
            return body if type(body) is bytes else bytes(body)
        if kind == BUFFERS:
            data, *buffers = body if type(body) is list else _split(memoryview(body))
            return codec.decode(data, [bytearray(buffer) for buffer in buffers])
        raise DecodeError(f"a message of unknown kind {kind}", size=len(body))

    return decode


def _split(body: memoryview) -> list[memoryview]:
    size = len(body)
    # All lengths are checked against the body before a part is cut: they are a stranger's words.
    if size < _COUNT.size:
        raise DecodeError("a message with buffers that does not say how many", size=size)
    (count,) = _COUNT.unpack_from(body)
    start = _COUNT.size + 8 * (count + 1)
    if count > _MAX_BUFFERS or start > size:
        raise DecodeError(f"a message of {size} bytes with {count} buffers", size=size)
    lengths = struct.unpack_from(f"<{count + 1}Q", body, _COUNT.size)
    if start + sum(lengths) != size:
        raise DecodeError(f"buffers of {sum(lengths)} bytes in a message of {size}", size=size)
    parts: list[memoryview] = []
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    return parts
