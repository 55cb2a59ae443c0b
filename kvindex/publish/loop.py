"""The publisher's thread: numbered batches out, replay requests in, replies out.

One thread owns both sockets, the replay buffer and the counters. It sleeps in one poll over the
ROUTER and a wake-up descriptor that `publish` writes to when the queue was empty; no timer runs
unless a replay waits for room. Live batches and replays take turns in slices, so neither waits
for more than a slice of the other.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import zmq

from kvindex.publish.publisher import KVEventsConfig
from kvindex.publish.replay import ReplayBuffer, ReplayService
from kvindex.publish.sockets import PublisherSockets
from kvindex.wire import Dialect, EventBatch, encode_batch, live_frames, parse_replay_request
from kvindex.wire.errors import ClosedError, DecodeError
from kvindex.wire.log_rate import LogRate
from kvindex.wire.waker import Waker

logger = logging.getLogger(__name__)

LIVE_SLICE: Final = 64
REQUEST_SLICE: Final = 64
_CLOSED: Final = "the publisher is closed"


class PublisherLoop:
    """Sends the batches in its `queue` and answers replay requests, in a thread of its own.

    It has no reference to the public publisher, so that an unused publisher can be collected.

    Attributes:
        queue: where batches wait; any thread.
        counters: written by the loop's thread only, once it runs.
        buffer, replays: what can be replayed, and the replays that wait or run; changed by the
            loop's thread only.
        failure: why the thread ended early, or None.
    """

    def __init__(self, config: KVEventsConfig, dialect: Dialect, sockets: PublisherSockets) -> None:
        self._dialect = dialect
        self._topic = config.topic.encode()
        self._sockets = sockets
        self._waker = Waker()
        self.queue = BatchQueue(
            config.max_queue_size,
            drop_when_full=config.on_full == "drop",
            wake=self._waker.wake,
        )
        self.counters: Counter[str] = Counter()
        self.buffer = ReplayBuffer(config.buffer_steps)
        self.replays = ReplayService(
            self.buffer,
            sockets.send_reply,
            topic=self._topic,
            with_topic=dialect.replay_topic,
            counters=self.counters,
        )
        self.failure: str | None = None
        self._deadline = float("inf")
        self._log_rate = LogRate()
        self._poller = zmq.Poller()
        self._poller.register(self._waker, zmq.POLLIN)
        self._poller.register(sockets.pub, zmq.POLLERR)  # so that a terminated context wakes it
        if sockets.router is not None:
            self._poller.register(sockets.router, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvindex-publisher", daemon=True)

    def start(self) -> None:
        """Start the thread, which owns the sockets from now on."""
        self._thread.start()

    def discard(self) -> None:
        """Free the constructor's resources: at the thread's end, or if it never starts."""
        self.queue.stop_waking()
        self._waker.close()

    def close(self, timeout: float) -> bool:
        """Accept no more batches, send waiting ones; False if not all went out within timeout."""
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + timeout
        self.queue.close(_CLOSED)
        if threading.current_thread() is self._thread:  # a finalizer may run anywhere
            return False
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)
        return not self._thread.is_alive() and self.counters["unsent_at_shutdown"] == 0

    def _run(self) -> None:
        try:
            while not self._is_finished():
                has_requests = self._wait()
                self._send_live()
                if has_requests:
                    self._receive_requests()
                self.replays.serve_slice(time.monotonic())
        except zmq.ContextTerminated:
            self._fail("its ZeroMQ context was terminated")
        except Exception as error:
            logger.exception("the publisher's thread failed and publishes no more")
            self._fail(f"its thread failed: {type(error).__name__}: {error}")
        finally:
            self._close_sockets()

    def _is_finished(self) -> bool:
        if not self.queue.closed:
            return False
        is_idle = not len(self.queue) and not len(self.replays)
        return is_idle or time.monotonic() >= self._deadline

    def _wait(self) -> bool:
        """Sleep until there may be work; return whether a replay request waits."""
        now = time.monotonic()
        wait = 0.0 if len(self.queue) else self.replays.wait_time(now)
        if self.queue.closed:
            left = max(0.0, self._deadline - now)
            wait = left if wait is None else min(wait, left)
        # Rounded up, so that it does not wake just before the time and poll again for nothing.
        ready = dict(self._poller.poll(None if wait is None else math.ceil(wait * 1000)))
        if self._waker.fileno() in ready:
            self._waker.clear()
        return self._sockets.router in ready

    def _send_live(self) -> None:
        for seq, batch in self.queue.take(LIVE_SLICE):
            payload = self._encoded(seq, batch)
            if payload is None:
                continue
            # Held before it is sent, so that a replay can repair a failed send.
            self.buffer.append(seq, payload)
            try:
                self._sockets.send_live(live_frames(self._topic, seq, payload))
            except zmq.ContextTerminated:
                raise
            except zmq.ZMQError as error:
                self._count_failure("send_errors", f"batch {seq} was not sent live: {error}")
            else:
                self.counters["sent"] += 1
                self.counters["sent_bytes"] += len(payload)

    def _encoded(self, seq: int, batch: EventBatch) -> bytes | None:
        try:
            return encode_batch(batch, self._dialect)
        except Exception as error:  # as in the engines: the number is spent, the stream goes on
            self._count_failure(
                "encode_errors", f"batch {seq} is lost, as it cannot be encoded: {error}"
            )
            return None

    def _receive_requests(self) -> None:
        for _ in range(REQUEST_SLICE):
            frames = self._sockets.receive_request()
            if frames is None:
                return
            try:
                identity, start_seq = parse_replay_request(frames)
            except DecodeError as error:
                self._count_failure("replays_malformed", f"a replay request is ignored: {error}")
            else:
                self.replays.ask(identity, start_seq, time.monotonic())

    def _count_failure(self, counter: str, message: str) -> None:
        self.counters[counter] += 1
        if self._log_rate.allows(counter):
            logger.warning("%s (%s: %d so far)", message, counter, self.counters[counter])

    def _fail(self, reason: str) -> None:
        self.failure = reason
        logger.error("the publisher stopped: %s", reason)
        self.queue.close(f"the publisher stopped: {reason}")

    def _close_sockets(self) -> None:
        left = len(self.queue)
        linger = 0.0 if self.failure else max(0.0, self._deadline - time.monotonic())
        is_flushed = self._sockets.close(linger)
        self.counters["unsent_at_shutdown"] = left
        self.discard()
        if left or (linger and not is_flushed):
            logger.warning(
                "the publisher closed with %d batches unsent%s",
                left,
                "" if is_flushed else ", and with some that may not have left the socket",
            )


class BatchQueue:
    """Batches in the order of their numbers, at most `max_size` of them.

    A batch gets its number here, under the lock, so that the order of the numbers is the order of
    sending. Thread safety: `put` from any thread, `take` from one.

    Args:
        max_size: batches that may wait.
        drop_when_full: drop a batch for which there is no room, after it got its number, so that
            subscribers see the gap; otherwise `put` waits for room.
        wake: called when a batch is put into the empty queue, and on closing.
    """

    def __init__(self, max_size: int, *, drop_when_full: bool, wake: Callable[[], None]) -> None:
        self._max_size = max_size
        self._drop_when_full = drop_when_full
        self._wake = wake
        self._batches: deque[tuple[int, EventBatch]] = deque()
        # Reentrant: close may come from a finalizer. Held by its own `with`, never the condition's:
        # a Ctrl-C in `Condition.__enter__`, which is Python, would leave it locked for ever.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._closed_because: str | None = None
        self.next_seq = 0
        self.accepted = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def closed(self) -> bool:
        """Whether `put` refuses batches."""
        return self._closed_because is not None

    def put(self, batch: EventBatch) -> bool:
        """Give the batch its number and queue it; False if it was dropped for want of room.

        Raises:
            ClosedError: the queue is closed, or was closed while waiting for room.
        """
        with self._lock:
            if not self._drop_when_full:
                self._room.wait_for(lambda: self.closed or len(self._batches) < self._max_size)
            if self._closed_because is not None:
                raise ClosedError(self._closed_because)
            seq = self.next_seq
            self.next_seq += 1
            if len(self._batches) >= self._max_size:
                self.dropped += 1
                return False
            self.accepted += 1
            self._batches.append((seq, batch))
            if len(self._batches) == 1:
                self._wake()
        return True

    def take(self, limit: int) -> list[tuple[int, EventBatch]]:
        """Remove and return up to `limit` batches with their numbers, oldest first."""
        with self._lock:
            taken = [self._batches.popleft() for _ in range(min(limit, len(self._batches)))]
            if taken:
                self._room.notify_all()
        return taken

    def close(self, reason: str) -> None:
        """Refuse further batches, with this reason; waiting ones can still leave it. Idempotent."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = reason
            self._room.notify_all()
            self._wake()

    def stop_waking(self) -> None:
        """Never call `wake` again; call this before the woken object is gone."""
        with self._lock:
            self._wake = lambda: None
