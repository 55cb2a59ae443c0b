"""A queue's address: all that a reader needs to attach."""

from __future__ import annotations

import msgspec

from kvindex.shm.ring import RingHandle
from kvindex.wire.errors import UNREADABLE, DecodeError

_MAX_BYTES = 1 << 20


class Handle(msgspec.Struct, frozen=True, kw_only=True):
    """A queue's address, for its readers; any process that has it can read the queue.

    It pickles, and can be a dict's key; `to_bytes` and `from_bytes` carry it without pickle.

    Attributes:
        n_reader: readers in all.
        local_reader_ranks: the ranks that read through shared memory; the others by TCP.
        buffer_handle: of the ring, or None without local readers.
        remote_address: `tcp://…` for remote readers, or None without any.
        remote_curve_key: the writer's public CURVE key: only readers that know it are admitted.
        codec: name of the messages' codec.
        max_message_bytes: longest message that readers accept, in bytes.
    """

    n_reader: int
    local_reader_ranks: list[int]
    buffer_handle: RingHandle | None
    remote_address: str | None
    remote_curve_key: bytes | None
    codec: str
    max_message_bytes: int

    def to_bytes(self) -> bytes:
        """Return the handle in msgpack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Handle:
        """Return the handle that `to_bytes` encoded.

        Raises:
            DecodeError: these bytes are no handle.
        """
        if len(data) > _MAX_BYTES:
            raise DecodeError("no handle is as long as this", size=len(data))
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except UNREADABLE as error:
            raise DecodeError(f"not a queue's handle: {error}", size=len(data)) from error

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __repr__(self) -> str:
        remote = self.n_reader - len(self.local_reader_ranks)
        return f"<Handle of a queue for {len(self.local_reader_ranks)} local, {remote} remote>"
