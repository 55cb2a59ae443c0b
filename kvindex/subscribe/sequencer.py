"""Bring one publisher's batches into order: a state machine without sockets, threads or clock.

Theory of operation
===================

A publisher numbers its batches 0, 1, 2, … and sends each once, live, over a link that may drop,
delay, double and reorder them. It keeps the last few thousand and sends them again when asked
("from n"). It says neither who it is nor that it was started anew. From this a `Sequencer` makes
an ordered stream. It is told what happened by its entrances (`connected`, `live`, `replayed`,
`tick`, …), each with the time, and answers with a list of actions to obey in order.

**The invariant.** Within an epoch the `Deliver` actions carry n, n + 1, n + 2, …; only a `Lost`
lets the number jump, over exactly the hole that it names. An epoch starts at 0, or anywhere with
`complete` false. Nothing is delivered twice. `Restarted` begins a new epoch, and what the rank
held is dropped: batches of two publishers never stand together.

**States.** ::

                  connected                  replay ended,
    CONNECTING ───────────────► SYNCING ───────────────────► LIVE ◄──► STALE  (no proof of life)
        ▲                          ▲      nothing missing    │  ▲
        │ disconnected             │                     gap │  │ gap filled, or declared lost
        └── (from any)             └── restart               ▼  │
                                       (from any)         REPAIRING

* CONNECTING: live batches are held; nothing is asked.
* SYNCING: a replay runs that joins (from 0; nothing was applied in this epoch) or proves after a
  reconnect that the publisher is the same (from the last applied batch). Replies are delivered
  as they come while they are contiguous; live batches that do not follow yet are held.
* LIVE: nothing known is missing. When nothing new comes for a while, a probe (a replay from the
  last applied batch) looks for a lost tail; the state stays LIVE.
* REPAIRING: a batch came that does not follow. It is held, and replay is asked from the last
  applied batch.

**Proof of identity.** A replay starts at the last applied batch, inclusive. The fingerprint at
this overlap tells a publisher that goes on from one that was started anew and has passed our
number. A replay that ends below the overlap comes from one that was started anew. When the
buffer has wrapped past the overlap there is no proof; then it is the same publisher if and only
if the connection did not break meanwhile (`_unproven`). A live batch whose seq falls back is a
restart if its ts is newer than that of the last applied batch, else a delayed duplicate.

**Resumption.** A `cursor` is all that the next sequencer, in another process, must know: it begins
by `resume` as if its connection had just broken. So the proof by the overlap decides whether it
goes on or begins a new epoch; where no proof can be had (no replay, foreign fingerprints), the new
epoch begins at once. Batches that were held are not part of it: replay brings them again.

**Tries.** A `Repair` makes up to `attempts` requests in a row without progress, with time-outs
and back-off between them; each batch that advances the cursor buys a fresh row. A replay that
has ended may still have holes (a publisher's socket drops replies silently), so contiguity is
checked and the first hole asked for again. When the tries are used up the hole is declared
`Lost` and the stream goes on behind it. So a replay endpoint that never answers delays the
stream by a bounded time and never stops it.

**Evidence for held batches.** A batch that arrived live may be a straggler of an earlier epoch or
carry a corrupted seq. One that replays asked after its arrival repeatedly do not contain is
discarded as unconfirmed; it must not open a hole that nobody can fill. Stragglers older than the
epoch's first batch are refused by ts; where replay has them nevertheless, replay is believed.

**Without replay** (none configured, or its buffer proved to be empty) a gap waits for reordered
batches until something behind it has waited for one time-out, and is then lost, so that several
gaps are waited for at once and not one after the other. A reconnect is a restart at the next
batch. What is delivered while the buffer is empty is taken on trust; when a probe finds something
in it after all, that trust ends with a restart and a join.

**Layers.** `Ordering` moves the cursor and makes every action; `Repairing` judges what replay
says; `LiveRun` takes rows of ordinary batches at once; `Sequencer` has the other entrances and
judges what comes live.

**Limit.** A publisher that was started anew without the connection breaking (behind a proxy), and
whose first batch to reach us carries exactly the next number, cannot be told from the old one.
"""

from __future__ import annotations

from collections import Counter

from kvindex.subscribe.actions import MAX_SEQ, Action, Ask, Batch, Deliver, Drop, Lost, Restarted
from kvindex.subscribe.config import ReplayPolicy, SequencerConfig
from kvindex.subscribe.cursor import Cursor
from kvindex.subscribe.explain import explain
from kvindex.subscribe.live_run import LiveRun
from kvindex.subscribe.repair import Purpose, Repair
from kvindex.subscribe.state import State

__all__ = [
    "Action",
    "Ask",
    "Batch",
    "Cursor",
    "Deliver",
    "Drop",
    "Lost",
    "ReplayPolicy",
    "Restarted",
    "Sequencer",
    "SequencerConfig",
    "State",
]

MAX_REFUSED = 16
"""Without replay: batches refused in a row for their age until the clock is taken as set back."""


class Sequencer(LiveRun):
    """Order the batches of one publisher; see the module for how.

    Every entrance takes the time (seconds, any monotonic clock) and returns the actions to obey,
    in order; only `live_run`, which has nothing but deliveries, returns how many. After `close`
    all return nothing.

    Thread safety: none; one owner calls everything.

    Args:
        config: the settings.
        now: the time.
        random: source of the jitter of back-off.

    Examples:
        >>> sequencer = Sequencer(SequencerConfig(has_replay=True), now=0.0)
        >>> sequencer.connected(0.0)
        [Ask(request=1, start_seq=0)]
        >>> sequencer.replay_ended(1, 0.1)
        [Drop(request=1)]
        >>> [action] = sequencer.live(Batch(0, 1.0, b"...", fingerprint=7, size=3), 0.2)
        >>> action.batch.seq, sequencer.next_seq, str(sequencer.state)
        (0, 1, 'live')
    """

    @property
    def state(self) -> State:
        """The state."""
        return State.STALE if self._stale and self._state is State.LIVE else self._state

    @property
    def epoch(self) -> int:
        """Restarts so far."""
        return self._applied.epoch

    @property
    def seq(self) -> int | None:
        """Seq of the last batch delivered in this epoch, or None."""
        return self._applied.seq

    @property
    def next_seq(self) -> int | None:
        """The seq that must be delivered next; None while the epoch may start anywhere."""
        return self._applied.next_seq

    @property
    def complete(self) -> bool:
        """Whether every batch of the publisher, from its first on, has been delivered."""
        return self._applied.complete

    @property
    def lag(self) -> int:
        """Batches that are known to exist and not delivered."""
        next_seq = self._applied.next_seq
        if next_seq is None:
            return len(self._held)
        held = self._held.last
        broken = self._broken.peekitem()[0] if self._broken else -1
        known = max(self._dropped, -1 if held is None else held, broken)
        return max(0, known + 1 - next_seq)

    @property
    def counters(self) -> Counter[str]:
        """What happened how often, by name. The sequencer's own: read, do not write."""
        return self._counters

    @property
    def reason(self) -> str:
        """Why the state is not LIVE and what is awaited, for people; empty when LIVE."""
        return explain(
            self.state,
            now=self._now,
            alive_at=self._alive_at,
            next_seq=self._applied.next_seq,
            first_held=self._first_behind,
            held=len(self._held),
            unproven=self._unproven,
            repair=self._repair,
            gap_due=self._gap_due,
        )

    @property
    def unrepairable(self) -> str:
        """Why nothing can be repaired at present, for people; empty while replay may help."""
        if not self._config.has_replay:
            return "no replay endpoint"
        if self._unanswered >= self._config.replay_policy.attempts:
            return f"the last {self._unanswered} replay requests were not answered"
        return "the publisher keeps no batches for replay" if self._buffering is False else ""

    def last_event_age(self, now: float) -> float | None:
        """Return the seconds since the last delivery; None if there was none."""
        return None if self._delivered_at is None else max(0.0, now - self._delivered_at)

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next; None if there is nothing to wait for."""
        if self._state in (State.CONNECTING, State.CLOSED):
            return None
        waits = []
        if self._repair is not None:  # as in `tick`: it decides before a gap's time-out
            waits.append(self._repair.due)
        elif (gap_due := self._gap_due) is not None:
            waits.append(gap_due)
        if self._state is State.LIVE:
            if self._repair is None and self._config.has_replay:
                waits.append(self._probe_due)
            if not self._stale:
                waits.append(self._alive_at + self._config.stale_after)
        return min(waits, default=None)

    def cursor(self) -> Cursor | None:
        """Return all that a later sequencer must know to go on from here, in another process too.

        None where there is nothing to go on from: nothing was applied in this epoch, the publisher
        keeps no batches to prove itself by, or the sequencer is closed.
        """
        if self._state is State.CLOSED or not self._asks_replay:
            return None
        return self._applied.cursor(losses_kept=self._config.on_loss == "keep")

    def resume(self, cursor: Cursor | None, now: float, *, refused: str = "") -> list[Action]:
        """Go on from an earlier sequencer's cursor, before anything else has happened.

        It is as after a reconnect: the publisher must prove that it is still the same. Where no
        proof can be had, what the rank was restored with is given up at once, by `Restarted`.

        Args:
            cursor: where the earlier one stood; None if that is not known.
            now: the time.
            refused: why the caller cannot let it go on from there, one word; "" if it can.
        """
        if self._enter(now):
            assert self._state is State.CONNECTING
            assert self._applied.seq is None
            self._resume(cursor, refused or self._why_not_resume(cursor))
        return self._leave()

    def connected(self, now: float) -> list[Action]:
        """Take note of a connection to the publisher."""
        if self._enter(now):
            if self._state is not State.CONNECTING:
                self._disconnect()
            self._alive_at = self._quiet_since = now
            if self._config.has_replay:
                self._begin(Purpose.JOIN if self._applied.seq is None else Purpose.PROVE)
            else:
                if self._unproven:
                    # Nothing will ever show that it is the same publisher, nor whose the batches
                    # are that came since the connection broke.
                    self._held.clear()
                    self._restart("unproven_reconnect")
                self._go_live()
        return self._leave()

    def disconnected(self, now: float) -> list[Action]:
        """Take note that the connection broke."""
        if self._enter(now) and self._state is not State.CONNECTING:
            self._disconnect()
        return self._leave()

    def live(self, batch: Batch, now: float) -> list[Action]:
        """Take a live batch."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.damaged(None, now)
        if self._enter(now):
            self._counters["live"] += 1
            self._prove_life()
            self._take_live(batch)
        return self._leave()

    def damaged(self, seq: int | None, now: float) -> list[Action]:
        """Take note of a live message that cannot be read; its seq, where that was legible."""
        if self._enter(now):
            self._counters["damaged"] += 1
            legible = seq is not None and 0 <= seq <= MAX_SEQ
            self._take_damaged(seq if legible else None)
        return self._leave()

    def replayed(self, request: int, batch: Batch, now: float) -> list[Action]:
        """Take a batch that came in reply to `request`."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.replayed_damaged(request, batch.seq, now)
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._prove_life()
            self._unanswered = 0
            repair.saw(batch.seq, now)
            advanced = self._take_reply(repair, batch)
            self._stop_flood(repair, advanced)
        return self._leave()

    def replayed_damaged(self, request: int, seq: int, now: float) -> list[Action]:
        """Take note of a reply to `request` that cannot be read, under the number `seq`."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._counters["damaged"] += 1
            self._prove_life()
            if 0 <= seq <= MAX_SEQ:
                repair.saw(seq, now)
                self._note_broken(seq)
            self._stop_flood(repair, False)
        return self._leave()

    def replay_ended(self, request: int, now: float) -> list[Action]:
        """Take note of the end marker of `request`."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._counters["replays_ended"] += 1
            self._unanswered = 0
            self._prove_life()
            self._close_request(repair)
            self._take_end(repair, request)
        return self._leave()

    def replay_failed(self, request: int, now: float) -> list[Action]:
        """Take note that the socket of `request` failed."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._counters["replays_failed"] += 1
            self._unanswered += 1
            self._close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")
        return self._leave()

    def tick(self, now: float) -> list[Action]:
        """Do what is due; call it at `deadline` or whenever."""
        if self._enter(now) and self._state is not State.CONNECTING:
            if self._repair is not None:
                if now >= self._repair.due:
                    self._repair_due(self._repair)
            elif self._gap_due is not None:
                self._lose_overdue()
            elif self._state is State.LIVE and self._config.has_replay and now >= self._probe_due:
                self._counters["probes"] += 1
                self._begin(Purpose.PROBE)
            self._note_silence()
        return self._leave()

    def close(self, now: float) -> list[Action]:
        """End for good; idempotent."""
        if self._enter(now):
            self._abandon_request()
            self._held.clear()
            self._broken.clear()
            self._state = State.CLOSED
        return self._leave()

    def _enter(self, now: float) -> bool:
        """Set the time; return False when closed."""
        if self._state is State.CLOSED:
            return False
        self._now = now
        return True

    def _current(self, request: int) -> Repair | None:
        """Return the repair if `request` is its open request; count the reply as stale if not."""
        if self._repair is not None and self._repair.request == request:
            return self._repair
        self._counters["stale_replies"] += 1
        return None

    @property
    def _probe_due(self) -> float:
        return self._quiet_since + self._config.probe_interval * self._probe_factor

    def _disconnect(self) -> None:
        self._counters["disconnects"] += 1
        self._abandon_request()
        if not self._asks_replay:
            # What was missing was on its way over the broken connection: nothing can fill the gap.
            self._lose_all_gaps("gap_without_replay")
        self._doubt_start = True
        self._state = State.CONNECTING
        if self._applied.seq is None:
            # Nothing tells later whether these are of the publisher that is met next.
            self._counters["held_dropped"] += self._held.clear()
            self._broken.clear()
            self._dropped = -1
            if self._applied.next_seq:
                # Losses were declared up to there; whoever comes next starts afresh.
                self._restart("unproven_reconnect")
            self._applied.forget_start()
        else:
            self._unproven = True
        if not self._config.has_replay:
            self._applied.complete = False

    def _why_not_resume(self, cursor: Cursor | None) -> str:
        if cursor is None:
            return "no_cursor"
        if not self._config.has_replay:
            return "no_replay"
        # What was kept then may have been removed by what was lost; this policy would drop it.
        return "kept_losses" if cursor.kept_losses and self._config.on_loss == "reset" else ""

    def _resume(self, cursor: Cursor | None, refusal: str) -> None:
        if cursor is None or refusal:
            self._counters["resumes_refused"] += 1
            self._counters[f"refused_{refusal}"] += 1
            self._applied.epoch = 0 if cursor is None else cursor.epoch
            self._restart(refusal)
            return
        self._counters["resumed"] += 1
        self._applied.resume(cursor)
        self._unproven = True

    def _note_silence(self) -> None:
        due = self._alive_at + self._config.stale_after
        if self._state is State.LIVE and not self._stale and self._now >= due:
            self._stale = True
            self._counters["stale"] += 1

    def _take_live(self, batch: Batch) -> None:
        applied = self._applied
        if applied.seq is not None and batch.seq <= applied.seq:
            self._take_fallen_back(batch)
        elif applied.next_seq is not None and batch.seq < applied.next_seq:
            self._counters["delayed"] += 1
        elif batch.ts < applied.oldest_ts:
            self._refuse(batch, "old_epoch")
        elif self._state is State.CONNECTING:
            self._hold(batch)
        elif self._unproven and not self._asks_replay:
            self._restart("unproven_reconnect", batch)
        elif self._follows(batch):
            if self._held.pop(batch.seq) is not None:  # it waited for a replay that proved empty
                self._counters["duplicates"] += 1
            self._deliver(batch, replayed=False)
            self._drain()
            self._after_advance()
        elif self._hold(batch):
            self._notice_gap()

    def _follows(self, batch: Batch) -> bool:
        """Return whether a live batch may be delivered at once."""
        if self._unproven or self._awaits_replay:
            return False
        if self._applied.next_seq is None and self._state is State.LIVE:
            self._applied.start(batch.seq)
        return batch.seq == self._applied.next_seq

    def _take_fallen_back(self, batch: Batch) -> None:
        """Take a live batch that is not above the last applied one: a duplicate or a restart."""
        recognised = self._applied.recognise(batch)
        if recognised:
            self._counters["duplicates"] += 1
        elif batch.ts > self._applied.ts:
            self._restart("seq_fell_back", batch)
        elif recognised is None and self._config.has_replay:
            self._counters["delayed"] += 1
        else:
            self._refuse(batch, "delayed")

    def _refuse(self, batch: Batch, counter: str) -> None:
        """Drop a batch that seems too old, but ask replay, or count, in case the clock lies."""
        self._counters[counter] += 1
        if self._asks_replay:
            if self._state is State.LIVE and self._repair is None:
                self._begin(Purpose.PROBE)
            return
        self._refused += 1
        if self._refused >= MAX_REFUSED and self._state is not State.CONNECTING:
            self._restart("clock_fell_back", batch)

    def _take_damaged(self, seq: int | None) -> None:
        next_seq = self._applied.next_seq
        if seq is not None and next_seq is not None and seq < next_seq:
            return
        if self._asks_replay:
            self._ask_again = True
            if self._state is not State.CONNECTING:
                self._notice_gap()
        elif seq is not None and next_seq is not None and not self._unproven:
            self._note_broken(seq)
            if self._state is not State.CONNECTING:
                self._lose_broken_next()
                self._go_live()
