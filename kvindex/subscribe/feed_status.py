"""What a feed shows to others: its status, with the reason when it is not live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvindex.sequencer import State
from kvindex.subscribe.status import RankStatus

if TYPE_CHECKING:
    from kvindex.subscribe.feed import Feed

__all__ = ["feed_status", "unrepairable"]


def feed_status(feed: Feed, now: float) -> RankStatus:
    """Return a snapshot; `last_event_age` is the time of the last event, made an age later."""
    sequencer = feed.sequencer
    counters = _all_counters(feed)
    return RankStatus(
        rank=feed.rank,
        state=_state(feed),
        reason=_reason(feed, now),
        epoch=feed.epoch,
        seq=feed.seq,
        complete=sequencer.complete,
        lag=sequencer.lag + feed.pending,
        connected=feed.live.connected,
        endpoint=feed.address.endpoint,
        replay_endpoint=feed.address.replay,
        last_event_age=feed.last_event_at,
        gaps=counters.get("gaps", 0),
        replays_asked=counters.get("replays_asked", 0),
        replays_filled=counters.get("replays_ended", 0),
        replays_failed=counters.get("replays_failed", 0) + counters.get("replay_timeouts", 0),
        losses=counters.get("losses", 0),
        restarts=counters.get("restarts", 0),
        duplicates=counters.get("duplicates", 0),
        decode_failures=counters.get("decode_failures", 0),
        counters=counters,
    )


def _state(feed: Feed) -> State:
    """Return the stream's state; a topic that filters everything is not live.

    Nor is a stream whose repair brought more than there was time to apply yet. One that was live
    and merely is behind stays so, with its `lag`.
    """
    state = feed.sequencer.state
    if state is not State.LIVE:
        return state
    behind = not feed.shown_live and feed.pending > 0
    return State.SYNCING if behind or feed.topic.contradicted or feed.topic.open else state


def _all_counters(feed: Feed) -> dict[str, int]:
    """Return what was counted, without what never happened."""
    counters = {name: count for name, count in feed.sequencer.counters.items() if count}
    for name, count in feed.counters.items():
        counters[name] = counters.get(name, 0) + count
    if feed.topic.filtered:
        counters["filtered_by_topic"] = feed.topic.filtered
    return counters


def _reason(feed: Feed, now: float) -> str:
    if feed.failure:
        return feed.failure
    if feed.closed:
        return "closed"
    if not feed.live.connected:
        return _connection_trouble(feed, now)
    if feed.topic.contradicted:
        return feed.topic.trouble()
    state = feed.sequencer.state
    if state is State.LIVE:
        if feed.topic.open:
            return "waiting for the first message, to see its topic"
        behind = 0 if feed.shown_live else feed.pending
        return f"applying what came: {behind} batches to go" if behind else unrepairable(feed)
    trouble = feed.replay.trouble() if feed.replay is not None else ""
    reason = feed.sequencer.reason
    if trouble:
        return f"{reason}; replay: {trouble}; check replay= (its port is replay port + dp_rank)"
    if feed.replay is not None and feed.sequencer.counters["replay_timeouts"]:
        return (
            f"{reason}; the replay endpoint {feed.address.replay} is connected but silent: "
            "is it the engine's replay_endpoint?"
        )
    return reason


def unrepairable(feed: Feed) -> str:
    """Return why nothing can be repaired at present, and what that means; "" if it can."""
    why = feed.sequencer.unrepairable
    if not why:
        return ""
    replay = feed.address.replay
    where = "" if replay is None else f" (replay: {replay}, its port is replay port + dp_rank)"
    partial = "" if feed.sequencer.complete else "it is not complete, and "
    return f"{why}{where}: {partial}every gap is a loss"


def _connection_trouble(feed: Feed, now: float) -> str:
    trouble = feed.live.trouble()
    was_connected = feed.lost_at is not None or feed.sequencer.state is not State.CONNECTING
    if was_connected and not feed.live.refused_handshakes:
        ago = 0.0 if feed.lost_at is None else now - feed.lost_at
        lost = f"connection to {feed.address.endpoint} lost {ago:.0f} s ago"
        retries = feed.live.retries
        failed = f"failed attempts to connect again: {retries}" if retries else ""
        return "; ".join(filter(None, (lost, failed, feed.live.host.trouble)))
    if feed.bind:
        return f"listening at {feed.address.endpoint}: no publisher has connected; {trouble}"
    if feed.live.refused_handshakes:
        return f"{trouble}: is this the PUB port (+ dp_rank), and not the replay port?"
    if feed.live.host.trouble:
        return trouble
    if feed.live.retries:
        return (
            f"{trouble}: is the engine up, with KV events on, at this port (+ dp_rank)? An "
            "engine whose own endpoint names a host instead of '*' connects instead of "
            "listening: give it tcp://*:PORT, or use Worker(bind=True)"
        )
    return trouble
