"""The publisher that engines use: PUB for live batches, ROUTER for replay."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import zmq

from kvindex.publish.loop import PublisherLoop
from kvindex.publish.publisher import EventPublisher, KVEventsConfig
from kvindex.publish.sockets import (
    PublisherSockets,
    local_endpoint,
    offset_endpoint,
    open_sockets,
)
from kvindex.wire import END_SEQ, LATEST, Dialect, EventBatch, dialect
from kvindex.wire.curve import Curve
from kvindex.wire.errors import ConfigurationError


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
        self._dialect = _chosen(dialect)
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
            _server_keys(curve),
        )
        self._loop = _started(config, self._dialect, self._sockets)
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
        self._finish.detach()
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


def _chosen(chosen: Dialect | str | None) -> Dialect:
    return dialect(chosen) if isinstance(chosen, str) else chosen or LATEST


def _server_keys(curve: Curve | None) -> Curve | None:
    if curve is not None and (not isinstance(curve, Curve) or curve.server_key is not None):
        raise ConfigurationError(
            f"curve must be the publisher's own key pair, Curve.generate(), not {curve!r}"
        )
    return curve


def _started(config: KVEventsConfig, dialect: Dialect, sockets: PublisherSockets) -> PublisherLoop:
    """Return a running loop that owns the sockets; they are closed if it cannot start."""
    with ExitStack() as undo:
        undo.callback(sockets.close, 0.0)
        loop = PublisherLoop(config, dialect, sockets)
        undo.callback(loop.discard)
        loop.start()
        undo.pop_all()
    return loop


def _close(loop: PublisherLoop, pid: int, timeout: float) -> None:
    """Close the loop at exit or collection; a forked child has none of its thread."""
    if os.getpid() == pid:
        loop.close(timeout)
