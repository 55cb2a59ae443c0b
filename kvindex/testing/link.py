"""A proxy between a publisher and its subscribers that breaks what passes, from a seed.

One thread owns all sockets. Live messages go XSUB → lane → XPUB, so that subscriptions reach the
publisher as over a direct connection; replay requests go ROUTER → one DEALER for each client, and
the replies back through a second lane. Other threads only hand it commands.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

import zmq

from kvindex.testing.faults import Faults, Frames, Lane
from kvindex.testing.ports import reserve_port
from kvindex.wire.errors import ClosedError, ConfigurationError
from kvindex.wire.waker import Waker

logger = logging.getLogger(__name__)

_HWM: Final = 100_000
_MAX_CLIENTS: Final = 256
_BURST: Final = 200  # messages read from one socket before the others get their turn
_COMMAND_TIMEOUT: Final = 10.0
_FOREIGN_CLOCK_POLL: Final = 0.02  # seconds

Socket = zmq.Socket[bytes]


class FaultyLink:
    """Stand between publisher and subscribers, and drop, delay, duplicate, reorder, corrupt or cut.

    Subscribers connect to `endpoint` and `replay_endpoint` instead of the publisher's.

    Args:
        target_endpoint: where the publisher publishes.
        target_replay_endpoint: where it answers replay requests, if it does.
        faults: what happens from the start on; by default nothing.
        seed: decides which messages suffer.
        clock: for delays, in seconds.

    Raises:
        ConfigurationError: an endpoint cannot be connected to.

    Thread safety: all methods; a command is done when its method returns.
    """

    def __init__(
        self,
        target_endpoint: str,
        target_replay_endpoint: str | None = None,
        *,
        faults: Faults | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        faults = faults or Faults()
        rng = random.Random(seed)
        self._counters: Counter[str] = Counter()
        self._live = Lane("live", faults.live, random=rng, counters=self._counters)
        self._replay = Lane("replay", faults.replay, random=rng, counters=self._counters)
        self._clock = clock
        self._target = (target_endpoint, target_replay_endpoint)
        # Held while the link lives: `heal` must find the ports that subscribers know.
        self._holders: list[socket.socket] = []
        self.endpoint = self._reserve()
        self.replay_endpoint = None if target_replay_endpoint is None else self._reserve()
        self._silent = False
        self._topics: set[bytes] = set()
        self._wires: _Wires | None = None
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]]
        self._commands = queue.SimpleQueue()
        self._waker = Waker()
        self._idle = zmq.Poller()  # while it is cut
        self._idle.register(self._waker, zmq.POLLIN)
        self._ended = threading.Event()
        self._closing = False
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvindex-faulty-link", daemon=True)
        self._thread.start()
        # ZeroMQ's sockets belong to the thread that opens them.
        try:
            self._call(self._open)
        except BaseException:
            self.close()
            raise

    # -- commands ----------------------------------------------------------------------------

    def set_faults(self, faults: Faults) -> None:
        """Change what happens to messages from now on."""
        self._call(lambda: self._set_faults(faults))

    def drop_next(self, count: int = 1) -> None:
        """Drop the next live messages, whatever the faults are.

        Raises:
            ConfigurationError: `count` is below 1.
        """
        if count < 1:
            raise ConfigurationError(f"count is {count}, below 1")
        self._call(lambda: self._live.drop_next(count))

    def cut(self) -> None:
        """Close every connection and refuse new ones; what is held back is lost. Idempotent."""
        self._call(self._cut)

    def heal(self) -> None:
        """Listen again at the same endpoints after `cut`. Idempotent."""
        self._call(self._open)

    def silence_replay(self) -> None:
        """Accept replay requests and never answer them, nor finish answers under way."""
        self._call(lambda: self._set_silent(True))

    def restore_replay(self) -> None:
        """Answer replay requests again; those made in between stay without an answer."""
        self._call(lambda: self._set_silent(False))

    def retarget(self, endpoint: str, replay_endpoint: str | None = None) -> None:
        """Connect to another publisher; subscribers keep their connections.

        Raises:
            ConfigurationError: an endpoint cannot be connected to, or a replay endpoint is given
                to a link that was made without one.
        """
        if replay_endpoint is not None and self.replay_endpoint is None:
            raise ConfigurationError("this link was made without replay and cannot get one")
        self._call(lambda: self._retarget(endpoint, replay_endpoint))

    def quiesce(self) -> None:
        """Stop all faults and send on what is held back; a cut stays cut."""
        self._call(self._quiesce)

    def statistics(self) -> dict[str, int]:
        """Return how many messages of each lane met each fault, e.g. "live.dropped"."""
        return dict(self._counters)

    def close(self) -> None:
        """Close all sockets and end the thread. Idempotent."""
        # A second caller waits until the first is done: then the ports are free for both.
        with self._close_lock:
            self._closing = True
            self._waker.wake()
            self._thread.join()
            for holder in self._holders:
                holder.close()
            self._waker.close()

    def __enter__(self) -> FaultyLink:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _reserve(self) -> str:
        holder, port = reserve_port()
        self._holders.append(holder)
        return f"tcp://127.0.0.1:{port}"

    def _call(self, command: Callable[[], None]) -> None:
        """Let the link's thread run a command, and wait for it."""
        done: Future[None] = Future()
        self._commands.put((command, done))
        self._waker.wake()
        # The thread may have ended just before: then nobody else takes the command.
        if self._ended.is_set():
            self._refuse_commands()
        try:
            done.result(_COMMAND_TIMEOUT)
        except FutureTimeoutError:
            raise ClosedError(f"the link did not react within {_COMMAND_TIMEOUT:g} s") from None

    # -- the link's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            self._counters["failed"] += 1
            logger.exception("the link to %s failed and is closed", self._target[0])
        finally:
            # Sockets first: who waits for a command may free the ports next.
            self._disconnect()
            self._ended.set()
            self._refuse_commands()

    def _pending(self) -> Iterator[tuple[Callable[[], None], Future[None]]]:
        while True:
            try:
                yield self._commands.get_nowait()
            except queue.Empty:
                return

    def _refuse_commands(self) -> None:
        for _, done in self._pending():
            done.set_exception(ClosedError("the link is closed"))

    def _turn(self) -> None:
        """Wait for something to do and do it."""
        wires = self._wires
        poller = self._idle if wires is None else wires.poller
        ready = {item for item, _ in poller.poll(self._timeout())}
        if wires is not None:
            self._relay(wires, ready)
            now = self._clock()
            _send(wires.xpub, self._live.due(now))
            _send(wires.router, self._replay.due(now))
        if self._waker.fileno() in ready:
            self._waker.clear()
            # After what had arrived: a command holds for messages that come after it.
            for command, done in self._pending():
                try:
                    command()
                except Exception as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)

    def _timeout(self) -> int | None:
        """How long to wait at most, in milliseconds."""
        dues = [lane.deadline for lane in (self._live, self._replay)]
        due = min((due for due in dues if due is not None), default=None)
        if due is None or self._wires is None:
            return None
        wait = max(0.0, due - self._clock())
        if self._clock is not time.monotonic:  # what a test sets, nothing here hears of
            wait = min(wait, _FOREIGN_CLOCK_POLL)
        return math.ceil(wait * 1000)

    def _relay(self, wires: _Wires, ready: set[object]) -> None:
        # Subscriptions first: the publisher hears of them before more is read from it.
        if wires.xpub in ready:
            for (frame,) in _drain(wires.xpub):
                # Remembered: after `retarget` the new publisher must hear of them too.
                if frame[:1] == b"\x01":
                    self._topics.add(frame[1:])
                elif frame[:1] == b"\x00":
                    self._topics.discard(frame[1:])
                wires.xsub.send(frame)
        if wires.xsub in ready:
            for frames in _drain(wires.xsub):
                _send(wires.xpub, self._live.push(frames, self._clock()))
        if wires.router is not None and wires.router in ready:
            for identity, *request in _drain(wires.router):
                self._counters["replay.requests"] += 1
                if self._silent:
                    self._counters["replay.silenced"] += 1
                elif (dealer := wires.dealer(identity, self._target[1])) is not None:
                    dealer.send_multipart(request, flags=zmq.DONTWAIT)
        for identity, dealer in wires.dealers.items():
            if dealer in ready:
                for reply in _drain(dealer):
                    if self._silent:
                        self._counters["replay.silenced"] += 1
                        continue
                    _send(wires.router, self._replay.push([identity, *reply], self._clock()))

    # -- commands, on the link's thread ------------------------------------------------------

    def _set_faults(self, faults: Faults) -> None:
        self._live.faults, self._replay.faults = faults.live, faults.replay

    def _set_silent(self, silent: bool) -> None:
        self._silent = silent
        if silent:
            # Answers under way too: those held back here, and those still to come.
            self._replay.lose()
            if self._wires is not None:
                self._wires.drop_dealers()

    def _open(self) -> None:
        if self._wires is None:
            self._wires = _Wires(self.endpoint, self.replay_endpoint, self._target[0], self._waker)

    def _cut(self) -> None:
        if self._wires is not None:
            self._counters["cuts"] += 1
        self._disconnect()
        self._topics.clear()  # subscribers that connect again send theirs again
        self._live.lose()
        self._replay.lose()

    def _disconnect(self) -> None:
        wires, self._wires = self._wires, None
        if wires is not None:
            wires.close()

    def _retarget(self, endpoint: str, replay_endpoint: str | None) -> None:
        if self._wires is not None:
            self._wires.retarget(endpoint, self._topics)
        self._target = (endpoint, replay_endpoint)

    def _quiesce(self) -> None:
        self._set_faults(Faults())
        live, replies = self._live.flush(), self._replay.flush()
        if self._wires is not None:
            _send(self._wires.xpub, live)
            _send(self._wires.router, replies)


class _Wires:
    """The sockets of an uncut link, in a context of their own: once it is gone, so are they."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, target: str, waker: Waker
    ) -> None:
        self._context = zmq.Context()
        self.poller = zmq.Poller()
        self.poller.register(waker, zmq.POLLIN)
        self.dealers: OrderedDict[bytes, Socket] = OrderedDict()
        self.router: Socket | None = None
        try:
            self.xpub = self._socket(zmq.XPUB)
            self.xpub.bind(endpoint)
            if replay_endpoint is not None:
                self.router = self._socket(zmq.ROUTER)
                self.router.bind(replay_endpoint)
            self.xsub = self._connected(zmq.XSUB, target)
        except BaseException:
            self.close()
            raise

    def dealer(self, identity: bytes, target: str | None) -> Socket | None:
        """The socket that asks for this client; the client silent for longest makes room."""
        if target is None:
            return None
        if identity not in self.dealers:
            # Clients come again under a new identity, and none says that it goes.
            if len(self.dealers) >= _MAX_CLIENTS:
                self._drop(self.dealers.popitem(last=False)[1])
            self.dealers[identity] = self._connected(zmq.DEALER, target)
        self.dealers.move_to_end(identity)
        return self.dealers[identity]

    def drop_dealers(self) -> None:
        for dealer in self.dealers.values():
            self._drop(dealer)
        self.dealers.clear()

    def retarget(self, target: str, topics: set[bytes]) -> None:
        # First, so that the old one stays if it fails.
        fresh = self._connected(zmq.XSUB, target)
        self._drop(self.xsub)
        self.xsub = fresh
        self.drop_dealers()
        for topic in topics:
            self.xsub.send(b"\x01" + topic)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> Socket:
        made: Socket = self._context.socket(kind)
        made.linger = 0
        made.set_hwm(_HWM)  # the link must lose nothing by itself
        self.poller.register(made, zmq.POLLIN)
        return made

    def _drop(self, made: Socket) -> None:
        self.poller.unregister(made)
        made.close()

    def _connected(self, kind: int, target: str) -> Socket:
        made = self._socket(kind)
        made.reconnect_ivl = 10  # reach a publisher that starts again soon
        made.reconnect_ivl_max = 200
        try:
            made.connect(target)
        except zmq.ZMQError as error:
            self._drop(made)
            raise ConfigurationError(f"cannot connect to {target!r}: {error}") from error
        return made


def _send(sink: Socket | None, messages: list[Frames]) -> None:
    if sink is not None:
        for frames in messages:
            sink.send_multipart(frames)


def _drain(source: Socket) -> list[Frames]:
    """The messages that wait in a socket, up to a burst."""
    messages: list[Frames] = []
    try:
        while len(messages) < _BURST:
            messages.append(source.recv_multipart(flags=zmq.DONTWAIT))
    except zmq.Again:
        pass
    return messages
