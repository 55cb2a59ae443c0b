"""The publisher that engines use, the thread that sends for it, and publishers by name.

One thread owns both sockets, PUB for live batches and ROUTER for replay, the replay buffer and the
counters. It sleeps in one poll over the ROUTER and a wake-up descriptor that `publish` writes to
when the queue was empty; no timer runs unless a replay waits for room. Live batches and replays
take turns in slices, so neither waits for more than a slice of the other.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Final

import msgspec
import zmq

from kvindex.publish.publisher import EventPublisher, KVEventsConfig, NullEventPublisher, one_rank
from kvindex.publish.replay import ReplayBuffer, ReplayService
from kvindex.publish.sockets import (
    PublisherSockets,
    local_endpoint,
    offset_endpoint,
    open_sockets,
)
from kvindex.wire import (
    END_SEQ,
    LATEST,
    Dialect,
    EventBatch,
    encode_batch,
    live_frames,
    parse_replay_request,
)
from kvindex.wire import dialect as dialect_named
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    DuplicatePublisherError,
)
from kvindex.wire.log_rate import LogRate
from kvindex.wire.waker import Waker

logger = logging.getLogger(__name__)

_LIVE_SLICE: Final = 64
_REQUEST_SLICE: Final = 64
_OWN_KNOBS: Final = ("bind", "on_full", "dialect")
_COUNTERS: Final = (
    "sent",
    "sent_bytes",
    "encode_errors",
    "send_errors",
    "unsent_at_shutdown",
    "replays_asked",
    "replays_served",
    "replays_refused",
    "replays_malformed",
    "replays_unreachable",
    "replays_stalled",
    "replayed_batches",
    "replay_batches_overtaken",
)


class ZmqEventPublisher(EventPublisher):
    """Publishes batches as vLLM and SGLang do, and replays the latest ones on request.

    Each batch gets the next number, from 0, and the publisher's rank unless it names one. Live
    messages are `[topic, seq, payload]`. As in the engines, a subscriber whose queue of `hwm`
    batches is full loses live batches, and nothing here shows it. Unlike in the engines, a replay
    loses nothing to full queues and delays live batches by a few milliseconds at most; malformed
    requests are only counted. A batch that the dialect cannot carry uses up its number, is
    counted, and is missing from replays too.

    Published batches are sent before the process ends: `shutdown` is called at exit.

    Args:
        data_parallel_rank: the rank, from 0 (the default); its ports are the endpoints' + rank.
        attn_dp_rank: SGLang's name for the same.
        endpoint, …, dialect: as in `KVEventsConfig`; a dialect may also be a `Dialect`.
        context: where the sockets live; by default `zmq.Context.instance()`. Never terminated.
        curve: this publisher's key pair: only clients with its public key reach it.

    Raises:
        ConfigurationError: a value that cannot work, or an endpoint that cannot be bound; nothing
            stays open then.

    Thread safety: every method may be called from any thread.

    Examples:
        >>> with ZmqEventPublisher(endpoint="tcp://*:0", replay_endpoint="tcp://*:0") as publisher:
        ...     publisher.publish(EventBatch(ts=0.0, events=[]))
        ...     publisher.endpoint
        'tcp://127.0.0.1:...'
    """

    SHUTDOWN_TIMEOUT: float = 1.0
    """Seconds that `shutdown` takes at most by default, and at exit; as in the engines."""

    END_SEQ = END_SEQ.to_bytes(8, "big")
    """The number that ends a replay, as on the wire."""

    def __init__(
        self,
        data_parallel_rank: int | None = None,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        *,
        attn_dp_rank: int | None = None,
        dialect: Dialect | str | None = LATEST,
        bind: bool | None = None,
        on_full: str = "block",
        context: zmq.Context[Any] | None = None,
        curve: Curve | None = None,
    ) -> None:
        super().__init__(data_parallel_rank, attn_dp_rank=attn_dp_rank)
        if curve is not None and (not isinstance(curve, Curve) or curve.server_key is not None):
            raise ConfigurationError(
                f"curve must be the publisher's own key pair, Curve.generate(), not {curve!r}"
            )
        self._dialect = dialect_named(dialect) if isinstance(dialect, str) else dialect or LATEST
        # Checked as a configuration is, whoever calls: the engines' factories pass plain values.
        config = KVEventsConfig(
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=buffer_steps,
            hwm=hwm,
            max_queue_size=max_queue_size,
            topic=topic,
            bind=bind,
            on_full=on_full,  # type: ignore[arg-type]  # checked there
        )
        self._config = config
        self._sockets = open_sockets(
            zmq.Context.instance() if context is None else context,
            config,
            self._data_parallel_rank,
            self._dialect,
            curve,
        )
        with ExitStack() as undo:  # the sockets are closed if the loop cannot start
            undo.callback(self._sockets.close, 0.0)
            self._loop = PublisherLoop(config, self._dialect, self._sockets)
            undo.callback(self._loop.discard)
            self._loop.start()
            undo.pop_all()
        # Runs once: at shutdown, when the publisher is collected, or at exit. Holds only the loop.
        self._finish = weakref.finalize(
            self, _close, self._loop, os.getpid(), self.SHUTDOWN_TIMEOUT
        )

    @property
    def dialect(self) -> Dialect:
        """The engine version whose dialect is written."""
        return self._dialect

    @property
    def endpoint(self) -> str:
        """Where a subscriber on this machine finds the live batches."""
        return local_endpoint(self._sockets.bound_endpoint)

    @property
    def replay_endpoint(self) -> str | None:
        """Where a subscriber on this machine asks for replay; None if there is none."""
        bound = self._sockets.bound_replay_endpoint
        return None if bound is None else local_endpoint(bound)

    @property
    def bound_endpoint(self) -> str:
        """The live endpoint as ZeroMQ names it, e.g. with the wildcard address."""
        return self._sockets.bound_endpoint

    @property
    def bound_replay_endpoint(self) -> str | None:
        """The replay endpoint as ZeroMQ names it; None if there is none."""
        return self._sockets.bound_replay_endpoint

    @property
    def next_seq(self) -> int:
        """The number that the next batch gets."""
        return self._loop.queue.next_seq

    def get_publisher_config(self) -> KVEventsConfig:
        """Return a copy of the configuration, with this rank's endpoints, not their bound ports."""
        config, rank = self._config, self._data_parallel_rank
        return msgspec.structs.replace(
            config,
            endpoint=offset_endpoint(config.endpoint, rank),
            replay_endpoint=self.offset_endpoint_port(config.replay_endpoint, rank),
        )

    def publish(self, events: EventBatch) -> None:
        """Queue one batch for sending, numbered and with this rank; O(1), encodes nothing.

        Do not change the batch's lists afterwards: they are read later, by another thread.

        Raises:
            ConfigurationError: not an EventBatch.
            ClosedError: the publisher was shut down, before or while this waited for room.
        """
        if not isinstance(events, EventBatch):
            raise ConfigurationError(
                f"publish takes an EventBatch, not {type(events).__name__}; wrap events as "
                "EventBatch(ts=time.time(), events=[...])"
            )
        # A copy: the caller may publish the same batch through another rank's publisher.
        if events.data_parallel_rank is None:
            events = msgspec.structs.replace(events, data_parallel_rank=self._data_parallel_rank)
        self._loop.queue.put(events)

    def shutdown(self, timeout: float | None = None) -> None:
        """Send waiting batches, for at most `timeout` seconds, and close the sockets. Idempotent.

        None means `SHUTDOWN_TIMEOUT`. Batches that the operating system does not have by then are
        counted as `unsent_at_shutdown` and logged.

        Raises:
            ConfigurationError: timeout is negative.
        """
        timeout = self.SHUTDOWN_TIMEOUT if timeout is None else timeout
        if not timeout >= 0:
            raise ConfigurationError(f"timeout is {timeout!r}; it must be 0 seconds or more")
        self._finish.detach()  # at exit it would wait once more
        self._loop.close(timeout)

    def statistics(self) -> dict[str, int]:
        """Return the counters since the start, and how much is held now.

        Counters: batches `published`, `sent`, `dropped_queue_full`, `unsent_at_shutdown`;
        `sent_bytes` of payload; `encode_errors`, `send_errors`; `replays_asked`, `_served`,
        `_refused` (too many at once), `_malformed`, `_unreachable` (the asker went away),
        `_stalled` (it stopped reading); `replayed_batches`; `replay_batches_overtaken` (left the
        buffer while their replay waited for a slow reader). Held now: `queued`, `buffered`,
        `replays_active`, and `next_seq`. `failed` is 1 if the thread stopped by itself.
        """
        loop = self._loop
        counts = {name: loop.counters[name] for name in _COUNTERS}
        return counts | {
            "published": loop.queue.accepted,
            "dropped_queue_full": loop.queue.dropped,
            "queued": len(loop.queue),
            "buffered": len(loop.buffer),
            "replays_active": len(loop.replays),
            "next_seq": loop.queue.next_seq,
            "failed": int(loop.failure is not None),
        }

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Return the endpoint of a rank given that of rank 0, under the engines' name.

        Raises:
            ConfigurationError: as `kvindex.publish.offset_endpoint`.
        """
        return offset_endpoint(endpoint, data_parallel_rank) if endpoint else endpoint


def _close(loop: PublisherLoop, pid: int, timeout: float) -> None:
    """Close the loop at exit or collection; a forked child has none of its thread."""
    if os.getpid() == pid:
        loop.close(timeout)


class PublisherLoop:
    """Sends the batches in its `queue` and answers replay requests, in a thread of its own.

    It has no reference to the public publisher, so that an unused publisher can be collected. Its
    thread alone changes the counters, the replay buffer and the replays; any thread uses `queue`.
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
        self.failure: str | None = None  # why the thread ended early
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
        self.queue.stop_waking()  # first: a late `put` would write to a descriptor of another's
        self._waker.close()

    def close(self, timeout: float) -> bool:
        """Accept no more batches, send waiting ones; False if not all went out within timeout."""
        # The first call decides: a later one, at exit perhaps, must not prolong it.
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + timeout
        self.queue.close("the publisher is closed")
        if threading.current_thread() is self._thread:  # a finalizer may run anywhere
            return False
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)
        return not self._thread.is_alive() and self.counters["unsent_at_shutdown"] == 0

    def _run(self) -> None:
        try:
            while True:
                if self.queue.closed:
                    is_idle = not len(self.queue) and not len(self.replays)
                    if is_idle or time.monotonic() >= self._deadline:
                        break
                has_requests = self._wait()
                self._send_live()
                if has_requests:
                    self._receive_requests()
                # One slice in each turn: live batches that came meanwhile go first.
                self.replays.serve_slice(time.monotonic())
        except zmq.ContextTerminated:
            self._fail("its ZeroMQ context was terminated")
        except Exception as error:
            logger.exception("the publisher's thread failed and publishes no more")
            self._fail(f"its thread failed: {type(error).__name__}: {error}")
        finally:
            left = len(self.queue)
            # What failed is not flushed: nobody would wait for it, and a reason stands already.
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

    def _wait(self) -> bool:
        """Sleep until there may be work; return whether a replay request waits."""
        now = time.monotonic()
        # The queue wakes this thread only when it was empty: what a slice left is nobody's news.
        wait = 0.0 if len(self.queue) else self.replays.wait_time(now)
        if self.queue.closed:
            left = max(0.0, self._deadline - now)
            wait = left if wait is None else min(wait, left)
        # Rounded up, so that it does not wake just before the time and poll again for nothing.
        ready = dict(self._poller.poll(None if wait is None else math.ceil(wait * 1000)))
        if self._waker.fileno() in ready:  # cleared before the queue is read: no wake-up is lost
            self._waker.clear()
        return self._sockets.router in ready

    def _send_live(self) -> None:
        for seq, batch in self.queue.take(_LIVE_SLICE):
            try:
                payload = encode_batch(batch, self._dialect)
            except Exception as error:  # as in the engines: the number is spent, the stream goes on
                self._count_failure(
                    "encode_errors", f"batch {seq} is lost, as it cannot be encoded: {error}"
                )
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

    def _receive_requests(self) -> None:
        # Not all at once: a flood of requests must not hold up live batches.
        for _ in range(_REQUEST_SLICE):
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


class BatchQueue:
    """Batches in the order of their numbers, at most `max_size` of them.

    Any thread puts, one takes. `wake` is called when a batch is put into the empty queue, and on
    closing.
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
        """Give the batch its number and queue it; False if it was dropped for want of room."""
        with self._lock:
            if not self._drop_when_full:
                self._room.wait_for(lambda: self.closed or len(self._batches) < self._max_size)
            if self._closed_because is not None:
                raise ClosedError(self._closed_because)
            # Numbered under the lock, so that the order of the numbers is that of sending; and
            # before it may be dropped, so that subscribers see the gap.
            seq = self.next_seq
            self.next_seq += 1
            if len(self._batches) >= self._max_size:
                self.dropped += 1
                return False
            self.accepted += 1
            self._batches.append((seq, batch))
            # A system call: for a burst one is enough, as the thread takes all that it finds.
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


class EventPublisherFactory:
    """Makes the publisher that a configuration names: "null", "zmq", or one registered.

    Thread safety: every method may be called from any thread.
    """

    _registry: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def register_publisher(cls, name: str, ctor: Callable[..., EventPublisher]) -> None:
        """Register a publisher under a name that configurations can use.

        The constructor is called as the engines do: with the rank, as data_parallel_rank or
        attn_dp_rank, whichever parameter it has (as it was given to `create` if it has both or
        neither), endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size and topic; also with
        bind, on_full and dialect where the configuration sets them.

        Raises:
            DuplicatePublisherError: the name is registered already.
            ConfigurationError: the name is empty, or the constructor cannot be called.
        """
        if not name or not isinstance(name, str) or not callable(ctor):
            raise ConfigurationError(
                f"a publisher needs a name and a constructor, not {name!r} and {ctor!r}"
            )
        with cls._lock:
            if name in cls._registry:
                raise DuplicatePublisherError(f"a publisher named {name!r} is registered already")
            cls._registry[name] = ctor

    @classmethod
    def create(
        cls,
        config: KVEventsConfig | str | None,
        data_parallel_rank: int | None = None,
        *,
        attn_dp_rank: int | None = None,
    ) -> EventPublisher:
        """Return a running publisher; one that does nothing if none is configured.

        Args:
            config: the configuration, or its JSON text as SGLang's factory accepts it; None or
                empty text for none.
            data_parallel_rank: the rank, from 0 (the default).
            attn_dp_rank: SGLang's name for the same.

        Raises:
            ConfigurationError: a publisher that is not registered, or an error of its constructor.

        Examples:
            >>> EventPublisherFactory.create(None).data_parallel_rank
            0
        """
        rank = one_rank(data_parallel_rank, attn_dp_rank)
        if isinstance(config, str):
            config = KVEventsConfig.from_cli(config) if config else None
        if config is not None:
            config = msgspec.structs.replace(config)  # checked again: it may have been changed
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher(rank)
        with cls._lock:
            constructor = cls._registry.get(config.publisher or "")
            known = ", ".join(sorted(cls._registry))
        if constructor is None:
            raise ConfigurationError(f"no publisher is named {config.publisher!r}; known: {known}")
        # The rank goes by the engine's name that the constructor has; if it has both or neither, or
        # is a builtin without a readable signature, by the name under which it came.
        name = "data_parallel_rank" if attn_dp_rank is None else "attn_dp_rank"
        try:
            parameters = inspect.signature(constructor).parameters
        except (TypeError, ValueError):
            pass
        else:
            taken = [x for x in ("data_parallel_rank", "attn_dp_rank") if x in parameters]
            name = taken[0] if len(taken) == 1 else name
        # The engines' knobs always, ours where they differ from the default: a constructor that was
        # written for an engine does not know ours.
        usual = KVEventsConfig()
        knobs = {
            knob: value
            for knob in config.__struct_fields__[2:]  # without what decides whether there is one
            if (value := getattr(config, knob)) != getattr(usual, knob) or knob not in _OWN_KNOBS
        }
        return constructor(**{name: rank}, **knobs)
