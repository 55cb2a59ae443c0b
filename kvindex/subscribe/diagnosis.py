"""The diagnosis of a feed: its status, with the reason in words, and what is logged of it.

Owned by the subscriber's thread.
"""

from __future__ import annotations

import logging
from typing import Any

from kvindex.subscribe.delivery import RankStatus
from kvindex.subscribe.feed import Feed
from kvindex.subscribe.sequencer import MANY_RESTARTS, MAX_COUNT, RESTARTS_WITHIN, State

logger = logging.getLogger(__name__)

_SHOWN = ("gaps", "replays_asked", "losses", "restarts", "duplicates", "decode_failures")


def feed_status(feed: Feed, now: float) -> RankStatus:
    """Return a snapshot for the board, and log what is new in it.

    Its `last_event_age` is the time of the last event; the board turns it into an age.
    """
    sequencer, delivery, notes = feed.sequencer, feed.delivery, feed.notes
    topic, connection = feed.reader.topic, feed.live.connection
    state = sequencer.state
    if state is State.LIVE:
        # A topic that filters everything is not live, nor is a repair that brought more than there
        # was time to apply yet. But a live stream that falls behind stays live, with its lag.
        behind = not notes.shown_live and delivery.lag > 0
        state = State.SYNCING if behind or topic.contradicted or topic.open else state
    # With a wrong topic all that arrived is missing.
    filtered = topic.filtered if topic.contradicted else 0
    several = _several_publishers(feed, now)
    all_counters = {**sequencer.counters, **notes.counters}  # no name is in both
    all_counters["filtered_by_topic"] = topic.filtered
    counters = {name: count for name, count in all_counters.items() if count}
    shown: dict[str, Any] = {name: counters.get(name, 0) for name in _SHOWN}
    status = RankStatus(
        rank=feed.rank,
        state=state,
        reason="; ".join(filter(None, (several, _reason(feed, now)))),
        epoch=delivery.epoch,
        seq=delivery.seq,
        complete=sequencer.applied.complete and not topic.contradicted,
        lag=min(MAX_COUNT, sequencer.lag + delivery.lag + filtered),
        connected=connection.connected,
        endpoint=feed.address.endpoint,
        replay_endpoint=feed.address.replay,
        last_event_age=delivery.batch_at,
        replays_filled=counters.get("replays_ended", 0),
        replays_failed=counters.get("replays_failed", 0) + counters.get("replay_timeouts", 0),
        **shown,
        counters=counters,
    )
    # After the reason is made: it depends on what was shown before.
    notes.shown_live = state is State.LIVE
    _log_news(feed, status, several)
    return status


def _log_news(feed: Feed, status: RankStatus, several: str) -> None:
    """Log that the engine is gone or back, is several, or that its replay is of no use."""
    notes = feed.notes
    if status.state in (State.CONNECTING, State.STALE) and notes.was_up:
        notes.was_up = False
        if notes.may_log("down"):
            notes.logged_down = True
            logger.info("%s: %s: %s", status.rank, status.state, status.reason)
    elif notes.shown_live and not notes.was_up:
        notes.was_up = True
        # A loss that was logged is answered in any case: else the log ends with it.
        if notes.logged_down or notes.may_log("up"):
            notes.logged_down = False
            logger.info("%s: live: %s", status.rank, status.endpoint)
    if several:
        notes.warn("several_publishers", "%s", several)
    # Where no endpoint was given, the user knows.
    unrepairable = "" if status.replay_endpoint is None else _unrepairable(feed)
    if unrepairable and not notes.logged_unrepairable:
        notes.warn("unrepairable", "%s", unrepairable)
    notes.logged_unrepairable = bool(unrepairable)


def _reason(feed: Feed, now: float) -> str:
    """Return why the rank is not live, or what it lacks; what is nearest to the cause first."""
    if feed.failure:
        return feed.failure
    if feed.closed:
        return "closed"
    if not feed.live.connection.connected:
        return _connection_trouble(feed, now)
    if feed.reader.topic.contradicted:
        return feed.reader.topic.trouble()
    state = feed.sequencer.state
    if state is State.LIVE:
        if feed.reader.topic.open:
            return "waiting for the first message, to see its topic"
        behind = 0 if feed.notes.shown_live else feed.delivery.lag
        return f"applying what came: {behind} batches to go" if behind else _unrepairable(feed)
    replay = feed.replay.connection
    trouble = "" if replay is None else replay.trouble()
    reason = feed.sequencer.reason
    if trouble:
        return f"{reason}; replay: {trouble}; check replay= (its port is replay port + dp_rank)"
    if replay is not None and feed.sequencer.counters["replay_timeouts"]:
        return (
            f"{reason}; the replay endpoint {feed.address.replay} is connected but silent: "
            "is it the engine's replay_endpoint?"
        )
    return reason


def _several_publishers(feed: Feed, now: float) -> str:
    """Return that one address seems to have several publishers, and what to do; or ""."""
    if not feed.sequencer.several_publishers(now):
        return ""
    return (
        f"several publishers seem to send at {feed.address.endpoint}: batch numbers fell back "
        f"{MANY_RESTARTS} times within {RESTARTS_WITHIN:.0f} s on one connection, and each time "
        "the rank starts empty. Give each rank an address of its own (no relay, balancing Service "
        "or bound SUB for several)"
    )


def _unrepairable(feed: Feed) -> str:
    """Return why nothing can be repaired at present, and what that means; "" if it can."""
    why = feed.sequencer.unrepairable
    if not why:
        return ""
    replay = feed.address.replay
    where = "" if replay is None else f" (replay: {replay}, its port is replay port + dp_rank)"
    partial = "" if feed.sequencer.applied.complete else "it is not complete, and "
    return f"{why}{where}: {partial}every gap is a loss"


def _connection_trouble(feed: Feed, now: float) -> str:
    live = feed.live.connection
    trouble = live.trouble()
    was_connected = feed.lost_at is not None or feed.sequencer.state is not State.CONNECTING
    # It was the right address once: no advice on that. But whoever refuses now is another.
    if was_connected and not live.refused_handshakes:
        ago = 0.0 if feed.lost_at is None else now - feed.lost_at
        lost = f"connection to {feed.address.endpoint} lost {ago:.0f} s ago"
        retries = live.retries
        failed = f"failed attempts to connect again: {retries}" if retries else ""
        return "; ".join(filter(None, (lost, failed, live.host.trouble)))
    if feed.worker.bind:
        return f"listening at {feed.address.endpoint}: no publisher has connected; {trouble}"
    if live.refused_handshakes:
        return f"{trouble}: is this the PUB port (+ dp_rank), and not the replay port?"
    if live.host.trouble:
        return trouble
    if live.retries:
        return (
            f"{trouble}: is the engine up, with KV events on, at this port (+ dp_rank)? An "
            "engine whose own endpoint names a host instead of '*' connects instead of "
            "listening: give it tcp://*:PORT, or use Worker(bind=True)"
        )
    return trouble
