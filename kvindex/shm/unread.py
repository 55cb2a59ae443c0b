"""The writing end of a queue without readers, as a process group of one rank makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvindex.shm.codec import Buffer, Codec
from kvindex.shm.ends import WritingEnd
from kvindex.shm.handle import Handle
from kvindex.shm.messages import RAW
from kvindex.shm.turn import Turn

__all__ = ["UnreadWritingEnd", "open_unread_end"]


class UnreadWritingEnd:
    """The `WritingEnd` of a queue that nobody reads: a message goes to all of nobody at once."""

    def __init__(self) -> None:
        self._turn = Turn()

    @property
    def sender(self) -> UnreadWritingEnd:
        return self

    def send(
        self, kind: int, body: Buffer | Sequence[Buffer], size: int, timeout: float | None
    ) -> None:
        with self._turn.taken():
            pass

    @contextmanager
    def chunk(self, length: int, timeout: float | None) -> Iterator[memoryview]:
        with self._turn.taken():
            memory = bytearray(length)
        yield memoryview(memory)
        self.send(RAW, memory, length, timeout)

    def wait_ready(self, timeout: float | None) -> None:
        with self._turn.taken():
            pass

    def evict(self, rank: int) -> bool:
        return False

    def statistics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._turn.end(lambda: None)


def open_unread_end(codec: Codec, max_message_bytes: int) -> tuple[WritingEnd, Handle]:
    """Return the end of such a queue's writer, and the handle, by which nobody can attach."""
    handle = Handle(
        n_reader=0,
        local_reader_ranks=[],
        buffer_handle=None,
        remote_address=None,
        remote_token=None,
        remote_curve_key=None,
        codec=codec.name,
        max_message_bytes=max_message_bytes,
    )
    return UnreadWritingEnd(), handle
