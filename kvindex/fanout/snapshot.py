"""What a joiner is sent: each rank as it is when its turn comes, taken on the subscriber's thread.

The thread is held for some milliseconds at a time, or as long as it takes to copy one rank if that
is longer; the next ranks are taken when the last ones have been sent.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial

from kvindex.client import Client
from kvindex.errors import UnknownRankError
from kvindex.fanout.frames import Begin, End, Taken, encode_frame
from kvindex.fanout.tap import StreamTap
from kvindex.rank import Rank

__all__ = ["snapshot"]


_HOLD = 0.005  # seconds: a turn of the thread under load takes longer


def snapshot(
    client: Client, tap: StreamTap, counters: Counter[str], *, hold: float = _HOLD
) -> Iterator[bytes]:
    """Let those in that have attached to the ring; then give the parts of a snapshot.

    Args:
        client: whose index is sent.
        tap: what its subscriber's thread tells.
        counters: where it is noted that a snapshot had to begin again.
        hold: seconds for which the thread goes on with another rank.

    Raises:
        ClosedError: the client is closed, or the fan-out failed.
        BusyError: the subscriber's thread was held for too long.
    """
    call = client.subscriber.call
    end: End | None = None
    while end is None:
        number, renames, ranks = call(partial(_begin, client, tap))
        yield encode_frame(Begin(number))
        while ranks and tap.renames == renames:
            yield from call(partial(_take, client, tap, ranks, hold))
        end = call(partial(_end, tap, renames))
        counters["snapshots_begun_again"] += end is None
    yield encode_frame(end)


def _begin(client: Client, tap: StreamTap) -> tuple[int, int, deque[Rank]]:
    tap.attend()
    return tap.number, tap.renames, deque(client.index.ranks)


def _take(client: Client, tap: StreamTap, ranks: deque[Rank], hold: float) -> list[bytes]:
    """Return heads and sections of the next ranks, as many as the time is enough for."""
    tap.flush()
    parts: list[bytes] = []
    until = time.monotonic() + hold
    while ranks:
        rank = ranks.popleft()
        try:
            section = client.index.dump(rank)
        except UnknownRankError:  # removed: the messages say so
            continue
        status = client.subscriber.find(rank)
        parts += encode_frame(Taken(rank, tap.number, status, len(section))), section
        if time.monotonic() >= until:
            break
    return parts


def _end(tap: StreamTap, renames: int) -> End | None:
    """Return the end; None if ranks were renamed meanwhile, so that all is to begin again."""
    tap.flush()
    return None if tap.renames != renames else End(tap.number, list(tap.names.items()))
