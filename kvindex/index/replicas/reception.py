"""The server's thread for joining and leaving; it touches nothing of the subscriber's thread."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvindex.index.client import Client
from kvindex.index.replicas.frames import PROTOCOL, Hello, Refused, Welcome
from kvindex.index.replicas.guest import Guest
from kvindex.index.replicas.meeting_point import Listener
from kvindex.index.replicas.outflow import Outflow
from kvindex.index.replicas.snapshot import Snapshots
from kvindex.index.replicas.tap import StreamTap
from kvindex.wire.errors import ClosedError, DecodeError, KVIndexError
from kvindex.wire.log_rate import LogRate

__all__ = ["Reception"]

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds for each step of a joiner
_EXTRA_GUESTS = 16  # connections beyond the places, so that a joiner gets its refusal


class Reception:
    """Lets processes join, and notes when they are gone.

    Args:
        listener: where processes connect; the reception closes it.
        client: whose index they get.
        tap, outflow: the stream that they follow.
        max_replicas: places in the ring.
        report: returns the answer to `Ask`.
        on_failure: called once if the thread fails.

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
        self._log_rate = LogRate()
        self._guests: dict[Guest, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kvindex-fanout", daemon=True)
        self._thread.start()

    def statistics(self) -> dict[str, Any]:
        """Return how many replicas there are, and how many came and went in which way."""
        guests = list(self._guests)
        counters = list(self._counters.items())  # at once: the thread goes on counting
        return {
            "replicas": sum(self._follows(guest) for guest in guests),
            "joining": sum(not (guest.following or guest.answered) for guest in guests),
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
                self._counters["away_crowded"] += 1
                connection.close()
                continue
            guest = Guest(
                connection,
                welcome=self._welcome,
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
                self._client.subscriber.call(self._tap.recount)

    def _note_joined(self, guest: Guest) -> None:
        self._counters["joined"] += 1
        logger.info("process %d has joined at place %s", guest.pid, guest.place)

    def _welcome(self, hello: Hello) -> Welcome | Refused:
        """Give a joiner a place, or refuse it with the reason."""
        refusal = self._refusal(hello)
        if refusal is not None:
            self._counters["away_refused"] += 1
            return refusal
        taken = {guest.place for guest in self._guests}
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

    def _turn_away(self, guest: Guest, kind: str, reason: Exception) -> None:
        """End a connection because of its peer's error."""
        self._counters[f"away_{kind}"] += 1
        if self._log_rate.allows(kind):
            logger.warning("process %d could not join: %s", guest.pid, reason)

    def _see_off(self, guest: Guest) -> None:
        """Note that a connection has ended by itself."""
        if guest.place in self._outflow.evicted or guest.answered:
            pass  # counted as such
        elif not guest.following:
            self._counters["away_gave_up"] += 1
        elif guest.left:
            self._counters["left"] += 1
        else:
            self._counters["died"] += 1
            logger.warning("process %d at place %s is gone", guest.pid, guest.place)

    def _follows(self, guest: Guest) -> bool:
        return guest.following and guest.place not in self._outflow.evicted
