"""The server's thread for those who come and go; it never touches what the subscriber's has."""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvindex.client import Client
from kvindex.errors import ClosedError, DecodeError, KVIndexError
from kvindex.fanout.frames import PROTOCOL, Hello, Refused, Welcome
from kvindex.fanout.guest import Guest, Stage
from kvindex.fanout.meeting_point import Listener
from kvindex.fanout.outflow import Outflow
from kvindex.fanout.snapshot import Snapshots
from kvindex.fanout.tap import StreamTap
from kvindex.waker import Waker

__all__ = ["Reception"]

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds for each step of a joiner
_EXTRA_GUESTS = 16  # connections beyond the places, so that one more can be told why not
_LOG_INTERVAL = 10.0


class Reception:
    """Lets processes join, and notes when they are gone.

    Args:
        listener: where they come; the reception closes it.
        client: whose index they get.
        tap, outflow: what they follow.
        max_replicas: places in the ring.
        report: gives what else is to be told to those who ask.
        on_failure: told, once, if the thread fails.

    Thread safety: `close` and `statistics` from any thread.
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
        self._logged_at: dict[str, float] = {}
        self._guests: dict[socket.socket, Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvindex-fanout", daemon=True)
        self._thread.start()

    def statistics(self) -> dict[str, Any]:
        """Return how many replicas there are, and how many came and went in which way."""
        guests = list(self._guests.values())
        counters = list(self._counters.items())  # at once: the thread goes on counting
        return {
            "replicas": sum(self._follows(guest) for guest in guests),
            "joining": sum(
                guest.stage is not Stage.FOLLOWING and not guest.answered for guest in guests
            ),
            **{name: self._counters[name] for name in ("joined", "left", "died")},
            "sections_taken": self._snapshots.counters["sections_taken"],
            "snapshots_begun_again": self._snapshots.counters["snapshots_begun_again"],
            "turned_away": {
                name.removeprefix("away_"): count
                for name, count in counters
                if name.startswith("away_")
            },
        }

    def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        self._stopping = True
        self._waker.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            logger.exception("the fan-out's reception failed: nobody can join any more")
            self._counters["thread_failures"] += 1
            self._on_failure(f"the fan-out's reception failed: {error!r}")
        finally:
            self._end()

    def _turn(self) -> None:
        ready = self._selector.select(self._sleep())
        for key, events in ready:
            if key.fileobj is self._listener.socket:
                self._accept()
            elif key.fileobj is self._waker:
                self._waker.clear()
            else:
                self._serve(self._guests[key.fileobj], events)  # type: ignore[index]
        # After they were served: it may be the subscriber's thread that took so long.
        now = time.monotonic()
        for guest in list(self._guests.values()):
            if guest.deadline is not None and guest.deadline <= now:
                self._turn_away(guest, "too_slow", f"it took over {_PATIENCE:g} s for a step")

    def _sleep(self) -> float | None:
        deadlines = [g.deadline for g in self._guests.values() if g.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _accept(self) -> None:
        connection = self._listener.accept()
        if connection is None:
            return
        if len(self._guests) >= len(self._places) + _EXTRA_GUESTS:
            self._counters["away_crowded"] += 1
            connection.close()
            return
        self._guests[connection] = Guest(
            connection,
            welcome=self._welcome,
            report=lambda: json.dumps({**self.statistics(), **self._report()}).encode(),
            make_snapshot=self._snapshots.parts,
            patience=_PATIENCE,
            now=time.monotonic(),
        )
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, guest: Guest, events: int) -> None:
        before, now = guest.stage, time.monotonic()
        try:
            goes_on = not events & selectors.EVENT_READ or guest.receive(now)
            if goes_on and events & selectors.EVENT_WRITE:
                goes_on = guest.send(now)
        except DecodeError as error:
            self._turn_away(guest, "nonsense", str(error))
            return
        except KVIndexError as error:
            self._turn_away(guest, "not_served", str(error))
            return
        except OSError:
            goes_on = False
        if not goes_on:
            self._see_off(guest)
            return
        if guest.stage is Stage.FOLLOWING and before is not Stage.FOLLOWING:
            self._counters["joined"] += 1
            logger.info("process %d has joined at place %s", guest.pid, guest.place)
        writes = selectors.EVENT_WRITE if guest.wants_to_send else 0
        self._selector.modify(guest.connection, selectors.EVENT_READ | writes)

    def _welcome(self, hello: Hello) -> Welcome | Refused:
        """Give a joiner a place, or say why not."""
        refusal = self._refusal(hello)
        if refusal is not None:
            self._counters["away_refused"] += 1
            return refusal
        taken = {guest.place for guest in self._guests.values()}
        for place in self._places:
            if place not in taken and self._outflow.is_free(place):
                index = self._client.index
                seed = index.seed.to_bytes(16, "little")
                return Welcome(place, self._outflow.handle, seed, index.max_blocks_per_rank)
        self._counters["away_full"] += 1
        return Refused(
            f"all {len(self._places)} places are taken: start the server with a larger "
            "max_replicas",
            final=False,
        )

    def _refusal(self, hello: Hello) -> Refused | None:
        backend = self._client.index.backend
        if hello.protocol != PROTOCOL:
            return Refused(
                f"the server speaks protocol {PROTOCOL}, not {hello.protocol}: run the same "
                "kvindex in all processes",
                final=True,
            )
        if hello.backend != backend:
            return Refused(
                f"the server has the {backend} index, this process the {hello.backend} one, and "
                "their prefix keys differ: build the native module for both, or set "
                f"KVINDEX_BACKEND={backend} here",
                final=True,
            )
        if self._tap.failure is not None:
            return Refused(self._tap.failure, final=False)
        return None

    def _turn_away(self, guest: Guest, kind: str, reason: str) -> None:
        """End a connection for what its other end did."""
        self._counters[f"away_{kind}"] += 1
        now = time.monotonic()
        if now - self._logged_at.get(kind, -_LOG_INTERVAL) >= _LOG_INTERVAL:
            self._logged_at[kind] = now
            logger.warning("process %d could not join: %s", guest.pid, reason)
        self._drop(guest)

    def _see_off(self, guest: Guest) -> None:
        """Note that a connection has ended by itself."""
        if guest.place in self._outflow.evicted or guest.answered:
            pass  # counted as such
        elif guest.stage is not Stage.FOLLOWING:
            self._counters["away_gave_up"] += 1
        elif guest.left:
            self._counters["left"] += 1
        else:
            self._counters["died"] += 1
            logger.warning("process %d at place %s is gone", guest.pid, guest.place)
        self._drop(guest)

    def _drop(self, guest: Guest) -> None:
        self._selector.unregister(guest.connection)
        del self._guests[guest.connection]
        guest.close()
        if guest.place is not None:
            self._outflow.evicted.discard(guest.place)
            try:
                self._client.subscriber.call(self._tap.recount)
            except (ClosedError, TimeoutError):
                pass  # it notices the dead when it waits for them

    def _follows(self, guest: Guest) -> bool:
        return guest.stage is Stage.FOLLOWING and guest.place not in self._outflow.evicted

    def _end(self) -> None:
        self._listener.close()
        for guest in self._guests.values():
            guest.close()
        self._guests.clear()
        self._selector.close()
        self._waker.close()
