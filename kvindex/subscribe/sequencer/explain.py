"""Explains in words what a sequencer is waiting for."""

from __future__ import annotations

import math

from kvindex.subscribe.sequencer.batches import Applied
from kvindex.subscribe.sequencer.repair import Repair
from kvindex.subscribe.sequencer.state import StreamState
from kvindex.wire.rank import State


def explain(stream: StreamState, state: State) -> str:
    """Return why a stream is not live and what it awaits; empty when it is live."""
    applied, held, repair, now = stream.applied, stream.held, stream.repair, stream.now
    if state is State.CONNECTING:
        return "not connected" + (
            "" if applied.next_seq is None else f", next seq {applied.next_seq}"
        )
    if state is State.CLOSED:
        return "closed"
    if state is State.STALE:
        return f"no proof of life for {now - stream.alive_at:.1f} s"
    if state is State.LIVE:
        if applied.unproven:
            return "reconnected: the next batch shows whether it is the same publisher"
        return ""
    words = [_awaited(state, applied, held.hole_end)]
    if len(held):
        words.append(f"{len(held)} held")
    if repair is not None:
        words.append(_progress(repair, now))
    elif stream.gap_due < math.inf:
        words.append(f"no replay, given up in {max(0.0, stream.gap_due - now):.1f} s")
    return ", ".join(words)


def _awaited(state: State, applied: Applied, hole_end: int | None) -> str:
    next_seq = applied.next_seq
    if applied.unproven:
        return f"checking by replay that seq {(next_seq or 0) - 1} is still the same"
    if next_seq is None:
        return "joining: waiting for replay from 0"
    kind = "joining" if state is State.SYNCING else "gap"
    if hole_end is None or hole_end <= next_seq:
        return f"{kind}: waiting for {next_seq} and what follows"
    count = hole_end - next_seq
    return f"{kind}: waiting for {next_seq}..{hole_end - 1} ({count} batches)"


def _progress(repair: Repair, now: float) -> str:
    requests = f"replay asked {repair.asked} time{'s' if repair.asked != 1 else ''}"
    if repair.request is None:
        return f"{requests}, next try in {max(0.0, repair.due - now):.1f} s"
    since = f"{max(0.0, now - repair.replied_at):.1f} s since the last reply"
    return f"{requests}, {since}" if repair.replies else f"{requests}, no reply yet"
