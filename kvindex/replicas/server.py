"""The server: one subscriber that keeps other processes' replicas.

`Reception` is its thread for joining and leaving, which touches nothing of the subscriber's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvindex.client import Client, ClientOptions
from kvindex.index.snapshot import require_native
from kvindex.replicas.meeting_point import Listener
from kvindex.replicas.messages import (
    LENGTH,
    PROTOCOL,
    Admission,
    Attached,
    Frame,
    JoinRefusal,
    JoinRequest,
    Leave,
    RankSection,
    ReportRequest,
    ServerReport,
    decode_frame,
    encode_frame,
    frame_bytes,
)
from kvindex.replicas.outflow import Outflow, Snapshots, StreamTap, TakenRank
from kvindex.subscribe.discovery import Engines
from kvindex.wire.errors import ClosedError, ConfigurationError, DecodeError, KVIndexError
from kvindex.wire.log_rate import LogRate

if TYPE_CHECKING:  # no dependency: editors and type checkers have it
    from typing_extensions import Self, Unpack

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds for each step of a joiner
_EXTRA_GUESTS = 16  # connections beyond the places, so that a joiner gets its refusal
_MAX_FRAME_BYTES = 4096
_STEP = 1 << 18  # bytes that must go within the patience

_Result = TypeVar("_Result")
_Expected = TypeVar("_Expected", JoinRequest, Attached, Leave)


class ReplicaServer(ABC):
    """Serves until it is closed, or ends by itself: a fan-out or a relay.

    Thread safety: every method may be called from any thread.
    """

    _tap: StreamTap

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._closing = False
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why nothing is sent any more, or None."""
        return self._failure or self._tap.failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is closed; return whether it was in time.

        Args:
            timeout: longest wait, in seconds.

        Raises:
            ClosedError: it ended by itself; the message says why.
        """
        ended = self._ended.wait(timeout)
        if ended and not self._closing:
            raise ClosedError(self.failure or "the subscriber's thread has ended")
        return ended

    def close(self) -> None:
        """Stop serving and subscribing; replicas notice it, and show it. Idempotent.

        Done by itself when the process ends; a process that is killed does not.
        """
        if self._pid != os.getpid():
            return  # it is the parent's
        # First: who waits must not take this for an end by itself.
        self._closing = True
        self._close_parts()
        # Last: an interrupted close is made again, at the latest as the process ends.
        self._ended.set()
        atexit.unregister(self.close)

    @abstractmethod
    def _close_parts(self) -> None:
        """Close those that use others first; may be interrupted and called again."""

    def _stopped(self) -> None:
        """Note that the subscriber's thread has ended; on that thread."""
        self._tap.stop()
        self._ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class FanOut(ReplicaServer):
    """Subscribes once, and lets any number of processes on this machine ask.

    Each of them calls `kvindex.replicas.join(path)`, at any time, and has a replica of the
    index from then on. Linux only.

    Args:
        workers: as for `kvindex.connect`.
        path: where to listen for processes that join: a socket that is made there, in a directory
            that others cannot write to, and goes when this is closed.
        patience: seconds in all for which a slow replica may block the subscriber's thread; they
            grow back at a tenth of the time that passes. A replica that would block it for longer
            is evicted, and joins anew by itself.
        max_replicas: most processes at a time.
        chunk_bytes, chunks: size of the ring in shared memory, which takes their product.
        options: as for `kvindex.connect`. Replicas keep to `max_blocks_per_rank`, too.

    Attributes:
        client: the client that it fills; it can be asked as well, and workers added and removed.
        path: where it listens.

    Raises:
        ConfigurationError: a value cannot work, a living server is at `path`, others could write
            there, or the index is the Python one.
        SegmentError: the shared memory cannot be made.
        OSError: the socket cannot be made.

    Thread safety: every method may be called from any thread.

    Examples:
        >>> import tempfile
        >>> from kvindex import Worker
        >>> from kvindex import replicas
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/kvindex.sock"
        ...     with replicas.FanOut([Worker("vllm-0", "tcp://127.0.0.1:5557")], path):
        ...         with replicas.join(path) as replica:  # in another process
        ...             print(replica.ranks, replica.match([1, 2, 3]).best)
        (Rank(worker='vllm-0', dp_rank=0),) None
    """

    def __init__(
        self,
        workers: Engines,
        path: str | os.PathLike[str],
        *,
        patience: float = 1.0,
        max_replicas: int = 64,
        chunk_bytes: int = 64 << 10,
        chunks: int = 256,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__()
        if not 0 < patience < math.inf:
            raise ConfigurationError(f"patience must be above 0 s, not {patience!r}")
        require_native()
        self.path = os.fspath(path)
        with ExitStack() as opened:  # closed again if something goes wrong
            # First: a path that cannot be used is refused before any memory is taken.
            listener = Listener(path)
            opened.callback(listener.close)
            self._outflow = Outflow(max_replicas, chunk_bytes, chunks, patience)
            opened.callback(self._outflow.close)
            self._tap = StreamTap(self._outflow, self._ended.set)
            self.client = Client(workers, tap=self._tap, on_stop=self._stopped, **options)
            opened.callback(self.client.close)
            self._reception = Reception(
                listener,
                self.client,
                self._tap,
                self._outflow,
                max_replicas,
                self.report,
                self._fail,
            )
            self._reception.start()  # at once somebody may ask for the report, which needs it
            opened.pop_all()
        # Before the finalizers of the ring, whose hook is older: its memory must not go while the
        # subscriber's thread sends. Not before the end: its threads keep this alive.
        atexit.register(self.close)

    def statistics(self) -> dict[str, Any]:
        """Return counters as plain JSON-ready values; those of `client` are its own.

        `replicas`, `joining`: processes now. `joined`, `left`, `died`, `evicted`: processes so far
        that joined, left, ended without leaving, and were removed for being slow. `turned_away`:
        connections that did not become replicas, by reason. `messages`, `bytes`, `chunks`: sent, to
        all at once; `entries`, `heartbeats`: in them. `blocked_seconds`: for which the sending
        thread waited for slow replicas. `sections_taken`: copies of ranks made for joiners;
        joiners at one time share them. `snapshots_begun_again`: because ranks were renamed.
        """
        return {
            **self._reception.statistics(),
            **self._outflow.statistics(),
            **self._tap.statistics(),
        }

    def report(self) -> dict[str, Any]:
        """Return `statistics()` and those of `client` in one.

        `kvindex.replicas.ask(path)` returns the same in any other process.
        """
        return {**self.statistics(), **self.client.statistics()}

    def _close_parts(self) -> None:
        self._reception.close()
        self.client.close()
        self._outflow.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._ended.set()

    def __repr__(self) -> str:
        replicas = self._reception.statistics()["replicas"]
        return f"<FanOut at {self.path} to {replicas} replicas of {self.client!r}>"


class Guest:
    """A connection, and how far it is. Owner: the reception's event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.place: int | None = None  # in the ring
        self.following = False  # whether it has the whole snapshot
        self.left = False  # whether it sent `Leave`
        self.answered = False  # and gets no more frames: it was refused, or got its report
        self.pid = 0  # as it says
        self._received = bytearray()

    async def receive(self) -> Frame:
        """Return its next frame. OSError: the connection has ended. DecodeError: it is none."""
        size = frame_bytes(await self._read(LENGTH.size), _MAX_FRAME_BYTES)
        return decode_frame(await self._read(size))

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

    async def send(self, data: bytes) -> None:
        """Send bytes; TimeoutError if they do not move, OSError if the connection has ended."""
        view = memoryview(data)
        # In steps: a section may be of gigabytes, and a guest is slow if nothing moves, not if
        # all of it takes long.
        for at in range(0, len(view), _STEP):
            send = asyncio.get_running_loop().sock_sendall
            await self.in_time(send(self.connection, view[at : at + _STEP]))

    async def in_time(self, step: Coroutine[Any, Any, _Result]) -> _Result:
        """Return a step's result; TimeoutError if it is not taken within the patience."""
        task = asyncio.ensure_future(step)
        try:
            # Not `wait_for`: frames that came while another guest blocked the loop came in time.
            await asyncio.wait({task}, timeout=_PATIENCE)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        raise TimeoutError(f"it took over {_PATIENCE:g} s for a step")


class Reception:
    """Lets processes join, and notes when they are gone.

    It closes the listener. `report` answers `ReportRequest`, `on_failure` is called once if the
    thread fails. Thread safety: `close` and `statistics` from any thread.
    """

    def __init__(
        self,
        listener: Listener,
        client: Client,
        tap: StreamTap,
        outflow: Outflow,
        max_replicas: int,
        report: Callable[[], dict[str, Any]],
        on_failure: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._client = client
        self._tap = tap
        self._outflow = outflow
        self._places = range(max_replicas)
        self._report = report
        self._on_failure = on_failure
        self._snapshots = Snapshots(client, tap)
        self._counters: Counter[str] = Counter()
        self._turned_away: Counter[str] = Counter()  # by reason
        self._log_rate = LogRate()
        self._guests: dict[Guest, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kvindex-fanout", daemon=True)

    def start(self) -> None:
        """Begin to accept connections."""
        self._thread.start()

    def statistics(self) -> dict[str, Any]:
        """Return how many replicas there are, and how many came and went in which way."""
        guests = list(self._guests)
        return {
            "replicas": sum(
                guest.following and guest.place not in self._outflow.evicted for guest in guests
            ),
            "joining": sum(not (guest.following or guest.answered) for guest in guests),
            **{name: self._counters[name] for name in ("joined", "left", "died")},
            "sections_taken": self._snapshots.counters["sections_taken"],
            "snapshots_begun_again": self._snapshots.counters["snapshots_begun_again"],
            "turned_away": dict(self._turned_away),
        }

    def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._stop)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _stop(self) -> None:
        if not self._ending.done():
            self._ending.set_result(None)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._receive_guests())
        except BaseException as error:
            logger.exception("the fan-out's reception failed: nobody can join any more")
            self._counters["thread_failures"] += 1
            self._on_failure(f"the fan-out's reception failed: {error!r}")
        finally:
            self._listener.close()
            self._loop.close()

    async def _receive_guests(self) -> None:
        accepting = asyncio.ensure_future(self._accept())
        accepting.add_done_callback(self._check)
        try:
            await self._ending
        finally:
            tasks = [accepting, *self._guests.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for guest in self._guests:  # whose task had not begun
                guest.connection.close()

    def _check(self, task: asyncio.Task[None]) -> None:
        """Let a failure of ours in one task end all."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ending.done():
            self._ending.set_exception(error)

    async def _accept(self) -> None:
        while True:
            connection = await self._listener.accept()
            # Whoever only connects, and says nothing, is not to fill this process's descriptors.
            if len(self._guests) >= len(self._places) + _EXTRA_GUESTS:
                self._turned_away["crowded"] += 1
                connection.close()
                continue
            guest = Guest(connection)
            self._guests[guest] = task = asyncio.ensure_future(self._serve(guest))
            task.add_done_callback(self._check)

    async def _serve(self, guest: Guest) -> None:
        try:
            await self._converse(guest)
            self._see_off(guest)
        except DecodeError as error:
            self._turn_away(guest, "nonsense", error)
        except KVIndexError as error:  # the next part of its snapshot cannot be made
            self._turn_away(guest, "not_served", error)
        except TimeoutError as error:  # before OSError, of which it is one
            self._turn_away(guest, "too_slow", error)
        except OSError:
            self._see_off(guest)
        finally:
            guest.connection.close()
            del self._guests[guest]
        if guest.place is not None:
            self._outflow.evicted.discard(guest.place)
            # If the subscriber is busy or gone: it notices the dead when it waits for them.
            with suppress(ClosedError, TimeoutError):
                self._client.subscriber.call(self._tap.recount)

    async def _converse(self, guest: Guest) -> None:
        """Serve a guest until it leaves, or has its one answer: the protocol of `messages`."""
        frame = await guest.in_time(guest.receive())
        if isinstance(frame, ReportRequest):
            # Before it is sent: who has it may hang up at once, and did not give up.
            guest.answered = True
            report = json.dumps(self._report()).encode()
            await guest.send(encode_frame(ServerReport(len(report))) + report)
            return
        request = _expected(JoinRequest, frame)
        guest.pid = request.pid
        answer = self._admit(request)
        if isinstance(answer, Admission):
            guest.place = answer.place
        else:
            guest.answered = True
        await guest.send(encode_frame(answer))
        if guest.answered:
            return
        frame = await guest.in_time(guest.receive())
        if not isinstance(frame, Leave):
            _expected(Attached, frame)
            with closing(self._snapshots.parts()) as parts:  # made one by one as they are sent
                for part in parts:
                    if not isinstance(part, TakenRank):
                        await guest.send(encode_frame(part))
                        continue
                    size = len(part.section)
                    head = RankSection(part.rank, part.number, part.status, size)
                    await guest.send(encode_frame(head))
                    await guest.send(part.section)
            guest.following = True
            self._counters["joined"] += 1
            logger.info("process %d has joined at place %s", guest.pid, guest.place)
            # Without a time-out: from here on the connection is only a sign that it lives.
            frame = await guest.receive()
        _expected(Leave, frame)
        guest.left = True

    def _admit(self, request: JoinRequest) -> Admission | JoinRefusal:
        """Give a joiner a place, or refuse it with the reason."""
        index, refusal = self._client.index, None
        if request.protocol != PROTOCOL:
            refusal = JoinRefusal(
                f"the server speaks protocol {PROTOCOL}, not {request.protocol}: run the same "
                "kvindex in all processes",
                final=True,
            )
        elif request.backend != index.backend:
            refusal = JoinRefusal(
                f"the server has the {index.backend} index, this process the {request.backend} "
                "one, and their prefix keys differ: build the native module for both, or set "
                f"KVINDEX_BACKEND={index.backend} here",
                final=True,
            )
        elif self._tap.failure is not None:
            refusal = JoinRefusal(self._tap.failure, final=False)
        if refusal is not None:
            self._turned_away["refused"] += 1
            return refusal
        # Both are asked: one that was admitted may not have attached to the ring yet, and one whose
        # connection has ended may still hold its end.
        taken = {guest.place for guest in self._guests}
        for place in self._places:
            if place not in taken and self._outflow.is_free(place):
                seed = index.seed.to_bytes(16, "little")
                return Admission(place, self._outflow.handle, seed, index.max_blocks_per_rank)
        self._turned_away["full"] += 1
        return JoinRefusal(
            f"all {len(self._places)} places are taken: start the server with a larger "
            "max_replicas",
            final=False,
        )

    def _turn_away(self, guest: Guest, kind: str, reason: Exception) -> None:
        """Note that a connection is ended because of its peer's error."""
        self._turned_away[kind] += 1
        if self._log_rate.allows(kind):
            logger.warning("process %d could not join: %s", guest.pid, reason)

    def _see_off(self, guest: Guest) -> None:
        """Note that a connection has ended by itself."""
        if guest.place in self._outflow.evicted or guest.answered:
            pass  # counted as such
        elif not guest.following:
            self._turned_away["gave_up"] += 1
        elif guest.left:
            self._counters["left"] += 1
        else:
            self._counters["died"] += 1
            logger.warning("process %d at place %s is gone", guest.pid, guest.place)


def _expected(kind: type[_Expected], frame: Frame) -> _Expected:
    if not isinstance(frame, kind):
        raise DecodeError(f"{type(frame).__name__} while {kind.__name__} should come")
    return frame
