"""Accepts each event of a stream, and returns what is to be done, as the package describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from kvindex.subscribe.sequencer import gaps_and_restarts
from kvindex.subscribe.sequencer.stream_state import Purpose, Repair, StreamState
from kvindex.subscribe.sequencer.values import (
    MANY_RESTARTS,
    MAX_SEQ,
    RESTARTS_WITHIN,
    Action,
    Batch,
    Cursor,
    SequencerConfig,
)
from kvindex.wire.rank import Rank, State


class Sequencer:
    """Orders the batches of one publisher; see the package for how.

    Every entrance takes the time (seconds, any monotonic clock) and returns the actions to carry
    out, in order. Only `live_run` returns a number: a run's only items are its own batches.
    After `close` all return nothing.

    Examples:
        >>> from kvindex import Rank
        >>> from kvindex.subscribe.sequencer import SequencerConfig
        >>> sequencer = Sequencer(Rank("w", 0), SequencerConfig(has_replay=True), now=0.0)
        >>> sequencer.connected(0.0)
        [AskReplay(request=1, start_seq=0)]
        >>> sequencer.replay_ended(1, 0.1)
        [CloseReplay(request=1)]
        >>> [item] = sequencer.live(Batch(0, 1.0, "events", fingerprint=7, size=3), 0.2)
        >>> item.rank, item.seq, item.batch, sequencer.applied.next_seq, str(sequencer.state)
        (Rank(worker='w', dp_rank=0), 0, 'events', 1, 'live')
    """

    def __init__(
        self, rank: Rank, config: SequencerConfig, *, now: float, random: Random | None = None
    ) -> None:
        self._stream = stream = StreamState(rank, config, now, random or Random())
        # To be read by the owner, and not written.
        self.applied = stream.applied
        self.held = stream.held
        self.counters = stream.counters
        self._replay = stream.replay

    # How it stands ----------------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        """The rank; assign another one to rename it in all later items."""
        return self._stream.rank

    @rank.setter
    def rank(self, rank: Rank) -> None:
        self._stream.rank = rank

    @property
    def state(self) -> State:
        """The state."""
        state = self._stream.state
        return State.STALE if self._stream.is_stale and state is State.LIVE else state

    @property
    def lag(self) -> int:
        """How many batches are known to exist and not delivered."""
        next_seq = self.applied.next_seq
        return len(self.held) if next_seq is None else max(0, self.held.highest + 1 - next_seq)

    @property
    def reason(self) -> str:
        """Why the state is not LIVE and what it waits for, for people; empty when LIVE."""
        return explain(self._stream, self.state)

    @property
    def unrepairable(self) -> str:
        """Why nothing can be repaired at present, for people; empty while replay may help."""
        return self._replay.trouble

    def several_publishers(self, now: float) -> bool:
        """Return whether batches seem to come from several publishers at one address.

        Their numbers then fall back again and again while the connection stays. One publisher that
        restarts loses its connection; behind a relay it restarts less often than this.
        """
        times = self._stream.fell_back
        return len(times) == MANY_RESTARTS and now - times[0] <= RESTARTS_WITHIN

    # Joining, and going on elsewhere ------------------------------------------------------------

    def cursor(self) -> Cursor | None:
        """Return all that a later sequencer needs to go on from here, in another process too.

        None where that is impossible: nothing was applied in this epoch, the publisher keeps no
        batches to prove its identity, or the sequencer is closed.
        """
        if self._stream.state is State.CLOSED or not self._replay.usable:
            return None
        return self.applied.cursor(losses_kept=self._stream.config.on_loss == "keep")

    def resume(self, cursor: Cursor | None, now: float, *, refused: str = "") -> list[Action]:
        """Go on from an earlier sequencer's cursor, before anything else has happened.

        As after a reconnect, the publisher must prove that it is still the same. Where there can be
        no proof, the rank's restored contents are dropped at once, by `RankRestarted`. `refused`
        is why the caller refuses the cursor, one word; "" if it accepts it.
        """
        if self._enter(now):
            assert self._stream.state is State.CONNECTING
            assert self.applied.seq is None
            # A lost batch may have removed blocks that were kept; "reset" would have dropped them.
            drops_losses = self._stream.config.on_loss == "reset"
            if not refused:
                if cursor is None:
                    refused = "no_cursor"
                elif not self._replay.exists:
                    refused = "no_replay"
                elif cursor.kept_losses and drops_losses:
                    refused = "kept_losses"
            self._stream.go_on_from(cursor, refused)
        return self._leave()

    def connected(self, now: float) -> list[Action]:
        """Record a connection to the publisher."""
        if self._enter(now):
            self._stream.connect()
        return self._leave()

    def disconnected(self, now: float) -> list[Action]:
        """Record that the connection broke."""
        if self._enter(now) and self._stream.state is not State.CONNECTING:
            self._stream.disconnect()
        return self._leave()

    # Live batches -----------------------------------------------------------------------------

    def live(self, batch: Batch, now: float) -> list[Action]:
        """Accept a live batch."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.damaged(None, now)
        if self._enter(now):
            self._prove_life()
            self.counters["live"] += 1
            gaps_and_restarts.judge_live(self._stream, batch)
        return self._leave()

    def damaged(self, seq: int | None, now: float) -> list[Action]:
        """Record a live message that cannot be read, with its seq where legible."""
        if self._enter(now):
            gaps_and_restarts.judge_damaged(self._stream, _legible(seq))
        return self._leave()

    @property
    def run_start(self) -> int | None:
        """The first seq that `live_run` accepts; None while `live` must see each batch."""
        stream, applied, held = self._stream, self.applied, self.held
        ordinary = (
            stream.state is State.LIVE
            and stream.repair is None
            and applied.seq is not None
            and not (held.entries or held.damaged)
            and not (self._replay.wanted or applied.unproven or applied.start_in_doubt)
        )
        return applied.next_seq if ordinary else None

    def live_run(
        self, first_seq: int, timestamps: Sequence[float], fingerprints: Sequence[int], now: float
    ) -> int:
        """Accept live batches numbered `first_seq`, `first_seq` + 1, … and return how many.

        The effect is that of `live` for each of them. The caller passes on so many, from the first
        on, and gives the next one to `live`. What `timestamps` and `fingerprints` hold is
        `Batch.ts` and `Batch.fingerprint`.

        **Why the effect is the same.** `run_start` is a seq only while the stream is LIVE and
        nothing is held, damaged, under repair or in doubt. Then `live` of the batch with exactly
        that seq, if it is not older than the epoch, passes every test that could refuse or hold it,
        delivers it, and finds nothing to do afterwards. That leaves `run_start` one higher and all
        its other conditions unchanged, so the same is true of the next batch.
        Held against `live` by `tests/subscribe/sequencer/test_runs.py`.
        """
        if first_seq != self.run_start:
            return 0
        applied = self.applied
        # One that is too old for the epoch, or has no legal number, is for `live` to judge.
        count = min(len(timestamps), MAX_SEQ + 1 - first_seq)
        if count and min(timestamps) < applied.oldest_ts:
            count = min(count, next(i for i, ts in enumerate(timestamps) if ts < applied.oldest_ts))
        if count:  # what `live` does, without a call for each step: nearly all batches
            stream, replay, counters = self._stream, self._replay, self.counters
            stream.now = stream.alive_at = now
            stream.is_stale = False
            stream.refused = 0
            counters["live"] += count
            counters["delivered"] += count
            # Else a probe must come soon, to check whose replay it is.
            if replay.paired and replay.exists and replay.keeps is not False:
                replay.quiet_since = now
            applied.apply_run(timestamps[:count], fingerprints[:count])
        return count

    # Replay -----------------------------------------------------------------------------------

    def replayed(self, request: int, batch: Batch, now: float) -> list[Action]:
        """Accept a batch that arrived in reply to `request`."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.replayed_damaged(request, batch.seq, now)
        if repair := self._answered(request, now):
            gaps_and_restarts.accept_reply(self._stream, repair, batch)
        return self._leave()

    def replayed_damaged(self, request: int, seq: int, now: float) -> list[Action]:
        """Record a reply to `request` that cannot be read, under the number `seq`."""
        if repair := self._answered(request, now):
            gaps_and_restarts.accept_damaged_reply(self._stream, repair, _legible(seq))
        return self._leave()

    def replay_ended(self, request: int, now: float) -> list[Action]:
        """Record the end marker of `request`."""
        if repair := self._answered(request, now):
            gaps_and_restarts.accept_end(self._stream, repair, request)
        return self._leave()

    def replay_failed(self, request: int, now: float) -> list[Action]:
        """Record that the socket of `request` failed."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            gaps_and_restarts.fail(self._stream, repair)
        return self._leave()

    # Time -------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called next; None if there is nothing to wait for."""
        due, _ = self._next_step()
        due = min(due, self._stale_at)
        return due if due < math.inf else None

    def tick(self, now: float) -> list[Action]:
        """Do what is due; call it at `deadline` or at any time."""
        if self._enter(now):
            due, act = self._next_step()
            if now >= due:
                act()
            if now >= self._stale_at:
                self._stream.is_stale = True
                self.counters["stale"] += 1
        return self._leave()

    def _next_step(self) -> tuple[float, Callable[[], None]]:
        """Return what is to be done next, and when."""
        stream = self._stream
        # A repair decides before the time-out of a gap: it may still bring what is missing.
        if (repair := stream.repair) is not None:
            return repair.due, lambda: gaps_and_restarts.time_out(stream, repair)
        if stream.state is State.LIVE:
            return self._replay.probe_due, self._probe
        return stream.gap_due, self._give_up_gaps

    @property
    def _stale_at(self) -> float:
        stream = self._stream
        if stream.state is not State.LIVE or stream.is_stale:
            return math.inf
        return stream.alive_at + stream.config.stale_after

    def _give_up_gaps(self) -> None:
        """Without replay: lose every hole behind which a batch has waited for a time-out."""
        stream = self._stream
        while stream.now >= stream.gap_due:
            stream.lose("gap_without_replay")
            stream.go_live()

    def _probe(self) -> None:
        self.counters["probes"] += 1
        self._stream.begin(Purpose.PROBE)

    def close(self, now: float) -> list[Action]:
        """End for good; idempotent."""
        if self._enter(now):
            self._stream.end()
        return self._leave()

    # What the entrances share -----------------------------------------------------------------

    def _enter(self, now: float) -> bool:
        """Set the time; return False when closed."""
        if self._stream.state is State.CLOSED:
            return False
        self._stream.now = now
        return True

    def _leave(self) -> list[Action]:
        """Return the accumulated actions."""
        stream = self._stream
        out, stream.out = stream.out, []
        return out

    def _current(self, request: int) -> Repair | None:
        """Return the repair if `request` is its open request; count the reply as stale if not."""
        repair = self._stream.repair
        if repair is not None and repair.request == request:
            return repair
        self.counters["stale_replies"] += 1
        return None

    def _answered(self, request: int, now: float) -> Repair | None:
        """Enter with an answer to `request`: as `_current`; it also proves that all live."""
        repair = self._current(request) if self._enter(now) else None
        if repair is not None:
            self._prove_life()
        return repair

    def _prove_life(self) -> None:
        self._stream.alive_at = self._stream.now
        self._stream.is_stale = False


def _legible(seq: int | None) -> int | None:
    """Return a seq that a batch can have, or None."""
    return seq if seq is not None and 0 <= seq <= MAX_SEQ else None


def explain(stream: StreamState, state: State) -> str:
    """Return why a stream is not live and what it awaits; empty when it is live."""
    applied, held, repair, now = stream.applied, stream.held, stream.repair, stream.now
    next_seq, hole_end = applied.next_seq, held.hole_end
    if state is State.CONNECTING:
        return "not connected" + ("" if next_seq is None else f", next seq {next_seq}")
    if state is State.CLOSED:
        return "closed"
    if state is State.STALE:
        return f"no proof of life for {now - stream.alive_at:.1f} s"
    if state is State.LIVE:
        if applied.unproven:
            return "reconnected: the next batch shows whether it is the same publisher"
        return ""
    kind = "joining" if state is State.SYNCING else "gap"
    if applied.unproven:
        words = [f"checking by replay that seq {(next_seq or 0) - 1} is still the same"]
    elif next_seq is None:
        words = ["joining: waiting for replay from 0"]
    elif hole_end is None or hole_end <= next_seq:
        words = [f"{kind}: waiting for {next_seq} and what follows"]
    else:
        count = hole_end - next_seq
        words = [f"{kind}: waiting for {next_seq}..{hole_end - 1} ({count} batches)"]
    if len(held):
        words.append(f"{len(held)} held")
    if repair is not None:
        words.append(f"replay asked {repair.asked} time{'s' if repair.asked != 1 else ''}")
        if repair.request is None:
            words.append(f"next try in {max(0.0, repair.due - now):.1f} s")
        elif repair.replies:
            words.append(f"{max(0.0, now - repair.replied_at):.1f} s since the last reply")
        else:
            words.append("no reply yet")
    elif stream.gap_due < math.inf:
        words.append(f"no replay, given up in {max(0.0, stream.gap_due - now):.1f} s")
    return ", ".join(words)
