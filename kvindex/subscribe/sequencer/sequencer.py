"""Accepts each event of a stream, and decides what to do about it; the package says how."""

from __future__ import annotations

from collections.abc import Sequence

from kvindex.subscribe.sequencer.explain import explain
from kvindex.subscribe.sequencer.repair import Purpose, Repair
from kvindex.subscribe.sequencer.repairing import Repairing
from kvindex.subscribe.sequencer.values import MAX_SEQ, Action, Batch, Cursor, State

__all__ = ["Sequencer"]

MAX_REFUSED = 16
"""Without replay: batches refused in a row for their age until the clock is taken as set back."""


class Sequencer(Repairing):
    """Orders the batches of one publisher; see the package for how.

    Every entrance takes the time (seconds, any monotonic clock) and returns the actions to carry
    out, in order. Only `live_run` returns a number: a run's only items are its own batches.
    After `close` all return nothing.

    Thread safety: none; one owner calls everything.

    Args:
        rank: whose batches they are; the name that items carry.
        config: the settings.
        now: the time.
        random: source of the jitter of back-off.

    Attributes:
        rank: assign another one to rename it in all later items.
        applied: what was delivered: `epoch`, `seq`, `complete`, … Read, do not write.
        counters: what happened how often, by name. Read, do not write.

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

    # How it stands ----------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The state."""
        return State.STALE if self._stale and self._state is State.LIVE else self._state

    @property
    def lag(self) -> int:
        """How many batches are known to exist and not delivered."""
        next_seq = self.applied.next_seq
        return len(self.held) if next_seq is None else max(0, self.held.highest + 1 - next_seq)

    @property
    def reason(self) -> str:
        """Why the state is not LIVE and what it waits for, for people; empty when LIVE."""
        return explain(self, self.state)

    @property
    def unrepairable(self) -> str:
        """Why nothing can be repaired at present, for people; empty while replay may help."""
        return self.replay.trouble

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called next; None if there is nothing to wait for."""
        if self._state in (State.CONNECTING, State.CLOSED):
            return None
        waits = []
        if self.repair is not None:  # as in `tick`: it decides before a gap's time-out
            waits.append(self.repair.due)
        elif (gap_due := self.gap_due) is not None:
            waits.append(gap_due)
        if self._state is State.LIVE:
            if self.repair is None and (probe_due := self.replay.probe_due) is not None:
                waits.append(probe_due)
            if not self._stale:
                waits.append(self.alive_at + self._config.stale_after)
        return min(waits, default=None)

    # Joining, and going on elsewhere ------------------------------------------------------------

    def cursor(self) -> Cursor | None:
        """Return all that a later sequencer needs to go on from here, in another process too.

        None where that is impossible: nothing was applied in this epoch, the publisher keeps no
        batches to prove its identity, or the sequencer is closed.
        """
        if self._state is State.CLOSED or not self.replay.usable:
            return None
        return self.applied.cursor(losses_kept=self._config.on_loss == "keep")

    def resume(self, cursor: Cursor | None, now: float, *, refused: str = "") -> list[Action]:
        """Go on from an earlier sequencer's cursor, before anything else has happened.

        As after a reconnect, the publisher must prove that it is still the same. Where there can be
        no proof, the rank's restored contents are dropped at once, by `RankRestarted`.

        Args:
            cursor: where the earlier sequencer stood; None if unknown.
            now: the time.
            refused: why the caller refuses the cursor, one word; "" if it accepts it.
        """
        if self._enter(now):
            assert self._state is State.CONNECTING
            assert self.applied.seq is None
            self.go_on_from(cursor, refused or self._why_not_resume(cursor))
        return self._leave()

    def _why_not_resume(self, cursor: Cursor | None) -> str:
        if cursor is None:
            return "no_cursor"
        if not self.replay.exists:
            return "no_replay"
        # A lost batch may have removed blocks that were kept; this policy would drop them.
        return "kept_losses" if cursor.kept_losses and self._config.on_loss == "reset" else ""

    def connected(self, now: float) -> list[Action]:
        """Record a connection to the publisher."""
        if self._enter(now):
            if self._state is not State.CONNECTING:
                self.disconnect()
            self.alive_at = self.replay.quiet_since = now
            if self.replay.exists:
                self.begin(Purpose.JOIN if self.applied.seq is None else Purpose.PROVE)
            else:
                if self.applied.unproven:
                    # No replay can prove that the publisher is the same, nor which publisher sent
                    # the batches since the connection broke.
                    self.held.clear()
                    self.restart("unproven_reconnect")
                self.go_live()
        return self._leave()

    def disconnected(self, now: float) -> list[Action]:
        """Record that the connection broke."""
        if self._enter(now) and self._state is not State.CONNECTING:
            self.disconnect()
        return self._leave()

    # Live batches -----------------------------------------------------------------------------

    def live(self, batch: Batch, now: float) -> list[Action]:
        """Accept a live batch."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.damaged(None, now)
        if self._enter(now):
            self._prove_life()
            self.counters["live"] += 1
            self._judge_live(batch)
        return self._leave()

    def _judge_live(self, batch: Batch) -> None:
        applied = self.applied
        if applied.seq is not None and batch.seq <= applied.seq:
            self._judge_fallen_back(batch)
        elif applied.next_seq is not None and batch.seq < applied.next_seq:
            if self.replay.foreign and batch.ts >= applied.oldest_ts:
                self.restart("seq_fell_back", batch)
            else:
                self.counters["delayed"] += 1
        elif batch.ts < applied.oldest_ts:
            self._refuse(batch, "old_epoch")
        elif self._state is State.CONNECTING:
            self.hold(batch)
        elif applied.unproven and not self.replay.usable:
            self.restart("unproven_reconnect", batch)
        elif self._follows(batch):
            if batch.seq in self.held:  # it waited for a replay that proved empty
                self.counters["duplicates"] += 1
            self.deliver(batch, replayed=False)
            self.drain()
            self.after_advance()
        elif self.hold(batch):
            self.notice_gap()

    def _follows(self, batch: Batch) -> bool:
        """Return whether a live batch may be delivered at once."""
        applied = self.applied
        if applied.unproven or self.awaits_replay:
            return False
        if applied.next_seq is None:
            return self._state is State.LIVE
        return batch.seq == applied.next_seq

    def _judge_fallen_back(self, batch: Batch) -> None:
        """Judge a live batch that is not above the last applied one: a duplicate or a restart."""
        recognised = self.applied.recognise(batch)
        if recognised:
            self.counters["duplicates"] += 1
            if batch.seq <= self.applied.replayed_to:
                self.replay.agreed()
        elif batch.ts > self.applied.ts:
            self.restart("seq_fell_back", batch)
        elif recognised is None and self.replay.exists:
            self.counters["delayed"] += 1
        else:
            self._refuse(batch, "delayed")

    def _refuse(self, batch: Batch, counter: str) -> None:
        """Drop a batch that seems too old; ask replay, or count, in case the clock is wrong."""
        self.counters[counter] += 1
        if self.replay.usable:
            if self._state is State.LIVE and self.repair is None:
                self.begin(Purpose.PROBE)
            return
        self._refused += 1
        if self._refused >= MAX_REFUSED and self._state is not State.CONNECTING:
            self.restart("clock_fell_back", batch)

    def damaged(self, seq: int | None, now: float) -> list[Action]:
        """Record a live message that cannot be read, with its seq where legible."""
        if self._enter(now):
            self.counters["damaged"] += 1
            self._judge_damaged(_legible(seq))
        return self._leave()

    def _judge_damaged(self, seq: int | None) -> None:
        next_seq, connecting = self.applied.next_seq, self._state is State.CONNECTING
        if seq is not None and next_seq is not None and seq < next_seq:
            return
        if self.replay.usable:
            self.replay.wanted = True
            if not connecting:
                self.notice_gap()
        elif seq is not None and next_seq is not None and not self.applied.unproven:
            self.note_damaged(seq)
            if not connecting:
                self.lose_damaged()
                self.go_live()

    @property
    def run_start(self) -> int | None:
        """The first seq that `live_run` accepts; None while `live` must see each batch."""
        applied, held = self.applied, self.held
        ordinary = (
            self._state is State.LIVE
            and self.repair is None
            and applied.seq is not None
            and not (held.entries or held.damaged)
            and not (self.replay.wanted or applied.unproven or applied.start_in_doubt)
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
        count = min(len(timestamps), MAX_SEQ + 1 - first_seq)
        if count and min(timestamps) < applied.oldest_ts:
            count = min(count, next(i for i, ts in enumerate(timestamps) if ts < applied.oldest_ts))
        if count:  # what `live` does, without a call for each step: nearly all batches come here
            self.now = self.alive_at = now
            self._stale = False
            self._refused = 0
            self.counters["live"] += count
            self.counters["delivered"] += count
            replay = self.replay
            if replay.paired and replay.exists and replay.keeps is not False:
                replay.quiet_since = now
            applied.apply_run(timestamps[:count], fingerprints[:count])
        return count

    # Replay -----------------------------------------------------------------------------------

    def replayed(self, request: int, batch: Batch, now: float) -> list[Action]:
        """Accept a batch that came in reply to `request`."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.replayed_damaged(request, batch.seq, now)
        if repair := self._answered(request, now):
            self._accept_reply(repair, batch)
        return self._leave()

    def replayed_damaged(self, request: int, seq: int, now: float) -> list[Action]:
        """Record a reply to `request` that cannot be read, under the number `seq`."""
        if repair := self._answered(request, now):
            self._accept_damaged_reply(repair, _legible(seq))
        return self._leave()

    def replay_ended(self, request: int, now: float) -> list[Action]:
        """Record the end marker of `request`."""
        if repair := self._answered(request, now):
            self._accept_end(repair, request)
        return self._leave()

    def replay_failed(self, request: int, now: float) -> list[Action]:
        """Record that the socket of `request` failed."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._fail(repair)
        return self._leave()

    # Time -------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Do what is due; call it at `deadline` or at any time."""
        if self._enter(now) and self._state is not State.CONNECTING:
            if self.repair is not None:
                if now >= self.repair.due:
                    self._time_out(self.repair)
            elif self.gap_due is not None:
                # Without replay: every hole behind which a batch has waited for a time-out is lost.
                while (gap_due := self.gap_due) is not None and now >= gap_due:
                    self.lose("gap_without_replay")
                    self.go_live()
            elif (
                self._state is State.LIVE
                and (probe_due := self.replay.probe_due) is not None
                and now >= probe_due
            ):
                self.counters["probes"] += 1
                self.begin(Purpose.PROBE)
            silent = now >= self.alive_at + self._config.stale_after
            if self._state is State.LIVE and not self._stale and silent:
                self._stale = True
                self.counters["stale"] += 1
        return self._leave()

    def close(self, now: float) -> list[Action]:
        """End for good; idempotent."""
        if self._enter(now):
            self.end()
        return self._leave()

    # What the entrances share -----------------------------------------------------------------

    def _enter(self, now: float) -> bool:
        """Set the time; return False when closed."""
        if self._state is State.CLOSED:
            return False
        self.now = now
        return True

    def _leave(self) -> list[Action]:
        """Return the accumulated actions."""
        out, self._out = self._out, []
        return out

    def _current(self, request: int) -> Repair | None:
        """Return the repair if `request` is its open request; count the reply as stale if not."""
        if self.repair is not None and self.repair.request == request:
            return self.repair
        self.counters["stale_replies"] += 1
        return None

    def _answered(self, request: int, now: float) -> Repair | None:
        """Enter with an answer to `request`: as `_current`; it also proves that all live."""
        repair = self._current(request) if self._enter(now) else None
        if repair is not None:
            self._prove_life()
        return repair

    def _prove_life(self) -> None:
        self.alive_at = self.now
        self._stale = False


def _legible(seq: int | None) -> int | None:
    """Return a seq that a batch can have, or None."""
    return seq if seq is not None and 0 <= seq <= MAX_SEQ else None
