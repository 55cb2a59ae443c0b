"""The server: one subscriber that keeps other processes' replicas."""

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
from collections.abc import Callable, Coroutine, Generator
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
    JoinRequest,
    Leave,
    RankSection,
    Refused,
    ReportRequest,
    ServerReport,
    decode_frame,
    encode_frame,
    frame_bytes,
)
from kvindex.replicas.outflow import Outflow, Part, Snapshots, Source, StreamTap, TakenRank
from kvindex.subscribe.discovery import Engines
from kvindex.wire.errors import ClosedError, ConfigurationError, DecodeError, KVIndexError
from kvindex.wire.log_rate import LogRate

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

logger = logging.getLogger(__name__)

# serving -----------------------------------------------------------------------------------
#
# The life of what keeps others' replicas: a fan-out or a relay.


class Serving(ABC):
    """Serves until it is closed, or ends by itself.

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
        self._closing = True
        self._close_parts()
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


# reception ---------------------------------------------------------------------------------
#
# The server's thread for joining and leaving; it touches nothing of the subscriber's thread.
#
# Each joiner is a `Guest`: the frames in both directions, in order, on one event loop.


_PATIENCE = 10.0  # seconds for each step of a joiner
_EXTRA_GUESTS = 16  # connections beyond the places, so that a joiner gets its refusal
_MAX_FRAME_BYTES = 4096
_STEP = 1 << 18  # bytes that must go within the patience

T = TypeVar("T")
_Expected = TypeVar("_Expected", JoinRequest, Attached, Leave)


class Guest:
    """A connection and its state.

    Args:
        connection: non-blocking.
        admit: returns the answer to a `JoinRequest`.
        report: returns the server's counters, as JSON.
        make_snapshot: returns the parts of a snapshot, made one by one as they are sent.
        patience: seconds in which each next step must be taken, and bytes must move.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        admit: Callable[[JoinRequest], Admission | Refused],
        report: Callable[[], bytes],
        make_snapshot: Callable[[], Generator[Part, None, None]],
        patience: float,
    ) -> None:
        self.connection = connection
        self.place: int | None = None  # in the ring
        self.following = False  # whether it has the whole snapshot
        self.left = False  # whether it sent `Leave`
        self.answered = False  # and gets no more frames: it was refused, or got its report
        self.pid = 0  # as it says
        self._admit = admit
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
        if isinstance(frame, ReportRequest):
            self.answered = True
            report = self._report()
            await self._send(encode_frame(ServerReport(len(report))) + report)
            return
        request = _expected(JoinRequest, frame)
        self.pid = request.pid
        answer = self._admit(request)
        if isinstance(answer, Admission):
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
                    await self._send_part(part)
            self.following = True
            on_joined(self)
            frame = await self._receive()
        _expected(Leave, frame)
        self.left = True

    async def _receive(self) -> Frame:
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

    async def _send_part(self, part: Part) -> None:
        if not isinstance(part, TakenRank):
            await self._send(encode_frame(part))
            return
        size = len(part.section)
        await self._send(encode_frame(RankSection(part.rank, part.number, part.status, size)))
        await self._send(part.section)

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


def _expected(kind: type[_Expected], frame: Frame) -> _Expected:
    if not isinstance(frame, kind):
        raise DecodeError(f"{type(frame).__name__} while {kind.__name__} should come")
    return frame


class Reception:
    """Lets processes join, and notes when they are gone.

    Args:
        listener: where processes connect; the reception closes it.
        source: whose index they get.
        tap, outflow: the stream that they follow.
        max_replicas: places in the ring.
        report: returns the answer to `ReportRequest`.
        on_failure: called once if the thread fails.

    Thread safety: `close` and `statistics` from any thread.
    """

    def __init__(
        self,
        listener: Listener,
        source: Source,
        tap: StreamTap,
        outflow: Outflow,
        max_replicas: int,
        report: Callable[[], dict[str, Any]],
        on_failure: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._source = source
        self._tap = tap
        self._outflow = outflow
        self._places = range(max_replicas)
        self._report = report
        self._on_failure = on_failure
        self._snapshots = Snapshots(source, tap)
        self._counters: Counter[str] = Counter()
        self._turned_away: Counter[str] = Counter()  # by reason
        self._log_rate = LogRate()
        self._guests: dict[Guest, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kvindex-fanout", daemon=True)
        self._thread.start()

    def statistics(self) -> dict[str, Any]:
        """Return how many replicas there are, and how many came and went in which way."""
        guests = list(self._guests)
        return {
            "replicas": sum(self._follows(guest) for guest in guests),
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

    def _stop(self) -> None:
        if not self._ending.done():
            self._ending.set_result(None)

    def _check(self, task: asyncio.Task[None]) -> None:
        """Let a failure of ours in one task end all."""
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ending.done():
            self._ending.set_exception(error)

    async def _accept(self) -> None:
        while True:
            connection = await self._listener.accept()
            if len(self._guests) >= len(self._places) + _EXTRA_GUESTS:
                self._turned_away["crowded"] += 1
                connection.close()
                continue
            guest = Guest(
                connection,
                admit=self._admit,
                report=lambda: json.dumps({**self.statistics(), **self._report()}).encode(),
                make_snapshot=self._snapshots.parts,
                patience=_PATIENCE,
            )
            self._guests[guest] = task = asyncio.ensure_future(self._serve(guest))
            task.add_done_callback(self._check)

    async def _serve(self, guest: Guest) -> None:
        try:
            await guest.converse(self._note_joined)
            self._see_off(guest)
        except DecodeError as error:
            self._turn_away(guest, "nonsense", error)
        except KVIndexError as error:
            self._turn_away(guest, "not_served", error)
        except TimeoutError as error:
            self._turn_away(guest, "too_slow", error)
        except OSError:
            self._see_off(guest)
        finally:
            guest.connection.close()
            del self._guests[guest]
        if guest.place is not None:
            self._outflow.evicted.discard(guest.place)
            with suppress(ClosedError, TimeoutError):  # it notices the dead when it waits for them
                self._source.subscriber.call(self._tap.recount)

    def _note_joined(self, guest: Guest) -> None:
        self._counters["joined"] += 1
        logger.info("process %d has joined at place %s", guest.pid, guest.place)

    def _admit(self, request: JoinRequest) -> Admission | Refused:
        """Give a joiner a place, or refuse it with the reason."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._turned_away["refused"] += 1
            return refusal
        taken = {guest.place for guest in self._guests}
        for place in self._places:
            if place not in taken and self._outflow.is_free(place):
                index = self._source.index
                seed = index.seed.to_bytes(16, "little")
                return Admission(place, self._outflow.handle, seed, index.max_blocks_per_rank)
        self._turned_away["full"] += 1
        return Refused(
            f"all {len(self._places)} places are taken: start the server with a larger "
            "max_replicas",
            final=False,
        )

    def _refusal(self, request: JoinRequest) -> Refused | None:
        backend = self._source.index.backend
        if request.protocol != PROTOCOL:
            return Refused(
                f"the server speaks protocol {PROTOCOL}, not {request.protocol}: run the same "
                "kvindex in all processes",
                final=True,
            )
        if request.backend != backend:
            return Refused(
                f"the server has the {backend} index, this process the {request.backend} one, and "
                "their prefix keys differ: build the native module for both, or set "
                f"KVINDEX_BACKEND={backend} here",
                final=True,
            )
        if self._tap.failure is not None:
            return Refused(self._tap.failure, final=False)
        return None

    def _turn_away(self, guest: Guest, kind: str, reason: Exception) -> None:
        """End a connection because of its peer's error."""
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

    def _follows(self, guest: Guest) -> bool:
        return guest.following and guest.place not in self._outflow.evicted


class FanOut(Serving):
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
                self._rest,
                self._fail,
            )
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
        return {**self._reception.statistics(), **self._counters()}

    def report(self) -> dict[str, Any]:
        """Return `statistics()` and those of `client` in one.

        `kvindex.replicas.ask(path)` returns the same in any other process.
        """
        return {**self._reception.statistics(), **self._rest()}

    def _rest(self) -> dict[str, Any]:
        return {**self._counters(), **self.client.statistics()}

    def _counters(self) -> dict[str, Any]:
        return {**self._outflow.statistics(), **self._tap.statistics()}

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
