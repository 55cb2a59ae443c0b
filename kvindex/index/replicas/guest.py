"""One joiner at the server: the frames in both directions, in order, on one event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Generator
from contextlib import closing
from typing import Any, TypeVar

from kvindex.index.replicas.frames import (
    LENGTH,
    Ask,
    Attached,
    Hello,
    JoinersFrame,
    Leave,
    Refused,
    Report,
    Welcome,
    decode_joiners,
    encode_frame,
    frame_bytes,
)
from kvindex.wire.errors import DecodeError

__all__ = ["Guest"]

T = TypeVar("T")

_MAX_FRAME_BYTES = 4096
_STEP = 1 << 18  # bytes that must go within the patience


class Guest:
    """A connection and its state.

    Args:
        connection: non-blocking.
        welcome: returns the answer to a `Hello`.
        report: returns the server's counters, as JSON.
        make_snapshot: returns the parts of a snapshot, made one by one as they are sent.
        patience: seconds in which each next step must be taken, and bytes must move.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        welcome: Callable[[Hello], Welcome | Refused],
        report: Callable[[], bytes],
        make_snapshot: Callable[[], Generator[bytes, None, None]],
        patience: float,
    ) -> None:
        self.connection = connection
        self.place: int | None = None  # in the ring
        self.following = False  # whether it has the whole snapshot
        self.left = False  # whether it sent `Leave`
        self.answered = False  # and gets no more frames: it was refused, or got its report
        self.pid = 0  # as it says
        self._welcome = welcome
        self._report = report
        self._make_snapshot = make_snapshot
        self._patience = patience
        self._received = bytearray()

    async def converse(self, on_joined: Callable[[Guest], None]) -> None:
        """Serve it until it leaves, or has its one answer; call `on_joined` when it follows.

        Raises:
            DecodeError: it sent a frame that may not come now.
            KVIndexError: the next part of its snapshot cannot be made.
            TimeoutError: it took too long for a step.
            OSError: the connection has ended.
        """
        frame = await self._in_time(self._receive())
        if isinstance(frame, Ask):
            self.answered = True
            report = self._report()
            await self._send(encode_frame(Report(len(report))) + report)
            return
        hello = _expected(Hello, frame)
        self.pid = hello.pid
        answer = self._welcome(hello)
        if isinstance(answer, Welcome):
            self.place = answer.place
        else:
            self.answered = True
        await self._send(encode_frame(answer))
        if self.answered:
            return
        frame = await self._in_time(self._receive())
        if not isinstance(frame, Leave):
            _expected(Attached, frame)
            with closing(self._make_snapshot()) as parts:
                for part in parts:
                    await self._send(part)
            self.following = True
            on_joined(self)
            frame = await self._receive()
        _expected(Leave, frame)
        self.left = True

    async def _receive(self) -> JoinersFrame:
        size = frame_bytes(await self._read(LENGTH.size), _MAX_FRAME_BYTES)
        return decode_joiners(await self._read(size))

    async def _read(self, size: int) -> bytes:
        receive = asyncio.get_running_loop().sock_recv
        while len(self._received) < size:
            piece = await receive(self.connection, _MAX_FRAME_BYTES)
            if not piece:
                raise ConnectionResetError("the joiner closed the connection")
            self._received += piece
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    async def _send(self, data: bytes) -> None:
        view = memoryview(data)
        for at in range(0, len(view), _STEP):
            send = asyncio.get_running_loop().sock_sendall
            await self._in_time(send(self.connection, view[at : at + _STEP]))

    async def _in_time(self, step: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(step)
        try:
            # Not `wait_for`: frames that came while another guest blocked the loop came in time.
            await asyncio.wait({task}, timeout=self._patience)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        raise TimeoutError(f"it took over {self._patience:g} s for a step")


_Frame = TypeVar("_Frame", Hello, Attached, Leave)


def _expected(kind: type[_Frame], frame: JoinersFrame) -> _Frame:
    if not isinstance(frame, kind):
        raise DecodeError(f"{type(frame).__name__} while {kind.__name__} should come")
    return frame
