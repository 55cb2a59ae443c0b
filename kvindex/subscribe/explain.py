"""Put into words what a sequencer is waiting for."""

from __future__ import annotations

from kvindex.subscribe.repair import Repair
from kvindex.subscribe.state import State

__all__ = ["explain"]


def explain(
    state: State,
    *,
    now: float,
    alive_at: float,
    next_seq: int | None,
    first_held: int | None,
    held: int,
    unproven: bool,
    repair: Repair | None,
    gap_due: float | None,
) -> str:
    """Return why a sequencer is not live and what it awaits; empty when it is live.

    Examples:
        >>> explain(State.REPAIRING, now=3.0, alive_at=2.9, next_seq=17, first_held=20, held=4,
        ...         unproven=False, repair=None, gap_due=4.5)
        'gap: waiting for 17..19 (3 batches), 4 held, no replay, given up in 1.5 s'
    """
    if state is State.CONNECTING:
        return "not connected" + ("" if next_seq is None else f", next seq {next_seq}")
    if state is State.CLOSED:
        return "closed"
    if state is State.STALE:
        return f"no proof of life for {now - alive_at:.1f} s"
    if state is State.LIVE:
        if unproven:
            return "reconnected: the next batch tells whether it is the same publisher"
        return ""
    words = [_awaited(state, next_seq, first_held, unproven)]
    if held:
        words.append(f"{held} held")
    if repair is not None:
        words.append(_progress(repair, now))
    elif gap_due is not None:
        words.append(f"no replay, given up in {max(0.0, gap_due - now):.1f} s")
    return ", ".join(words)


def _awaited(state: State, next_seq: int | None, first_held: int | None, unproven: bool) -> str:
    if unproven:
        return f"checking by replay that seq {(next_seq or 0) - 1} is still the same"
    if next_seq is None:
        return "joining: waiting for replay from 0"
    kind = "joining" if state is State.SYNCING else "gap"
    if first_held is None or first_held <= next_seq:
        return f"{kind}: waiting for {next_seq} and what follows"
    count = first_held - next_seq
    return f"{kind}: waiting for {next_seq}..{first_held - 1} ({count} batches)"


def _progress(repair: Repair, now: float) -> str:
    asked = f"replay asked {repair.asked} time{'s' if repair.asked != 1 else ''}"
    if repair.request is None:
        return f"{asked}, next try in {max(0.0, repair.due - now):.1f} s"
    since = f"{max(0.0, now - repair.replied_at):.1f} s since the last reply"
    return f"{asked}, {since}" if repair.replies else f"{asked}, no reply yet"
