"""Bring one publisher's batches into order: a state machine without sockets, threads or clock.

Theory of operation
===================

A publisher numbers its batches 0, 1, 2, … and sends each one once, live, over a link that may
drop, delay, double and reorder them. It keeps the last few thousand, and sends them again to
a subscriber that asks for "all from n". It never reports its identity, nor that it was restarted.
A `Sequencer` makes an ordered stream of this. Its entrances (`connected`, `live`, `replayed`,
`tick`, …) each accept one event, with the time. Each returns a list of actions, to be carried out
in order: items of the stream, and requests to open or close a replay socket.

**What is promised.** Within an epoch, `RankBatch` items carry the seqs n, n + 1, n + 2, …. Only a
`RankLost` makes the number jump, over exactly the hole that it names. An epoch starts at 0, or
anywhere with `complete` false. No batch is delivered twice. `RankRestarted` begins a new epoch and
drops what the rank held, so batches of two publishers never stand together.

**The parts**, from below. `Applied` remembers the delivered batches. `Held` keeps those that came
out of order, within bounds, with the evidence for each. `Replay` has the facts about the replay
endpoint, and `Repair` the replay that is under way. `Machine` has the state, makes each step to
another, and with them the items. `LiveBatches` and `Replies` decide which steps to take.
`Sequencer` has the entrances, and watches the time.

**States.** ::

                  connected                  replay ended,
    CONNECTING ───────────────► SYNCING ───────────────────► LIVE ◄──► STALE  (no proof of life)
        ▲                          ▲      nothing missing    │  ▲
        │ disconnected             │                     gap │  │ gap filled, or declared lost
        └── (from any)             └── restart               ▼  │
                                       (from any)         REPAIRING

* CONNECTING: live batches are held, and nothing is asked for.
* SYNCING: a replay is under way. It joins (from 0, when nothing was applied in this epoch), or
  proves after a reconnect that the publisher is the same (from the last applied batch). Replies
  are delivered as they come, while there is no hole. Live batches that do not follow are held.
* LIVE: nothing is known to be missing. After some silence a probe (a replay from the last applied
  batch) looks for a lost tail; the state stays LIVE.
* REPAIRING: a batch came that does not follow. It is held, and a replay from the last applied
  batch is asked for.

**Is it the same publisher?** A replay starts at the last applied batch, and includes it. The
fingerprint of that batch distinguishes the same publisher from a restarted one that has passed our
number. A replay that ends below that batch comes from a restarted publisher. If the publisher's
buffer no longer has that batch, there is no proof; then it counts as the same only if the
connection has not broken (`Applied.unproven`). A live batch whose seq falls back is a
restart if it is newer (by ts) than the last applied batch, and a delayed duplicate otherwise.

**Resuming.** A `Cursor` is all that a sequencer in another process needs to go on. The new
sequencer begins with `resume`, as if its connection had just broken: the proof above decides
whether it goes on or begins a new epoch. Where there can be no proof (no replay, or another
fingerprint function), the new epoch begins at once. Held batches are not saved: replay brings them
again.

**Tries.** A `Repair` makes up to `attempts` requests in a row without progress, with time-outs and
pauses. Each batch that it applies renews its tries. A publisher's socket may drop replies silently,
so a replay that has ended may still have holes: the first hole is asked for again. When
the tries are used up, the hole is declared lost and the stream goes on behind it. So a replay
endpoint that never answers delays the stream by a bounded time, and never stops it.

**Evidence.** A live batch may be a straggler of an earlier epoch, or have a damaged seq. If several
later replays end without it, the batch is discarded: it must not open a hole that nobody can fill.
A straggler older than the epoch's first batch is refused by its ts. If a replay contains it
nevertheless, the replay is believed.

**Another publisher's replay.** A rank's configuration may name the replay endpoint of another
engine. Then replay denies the live batches: replays end below a live batch with nothing new, or
have an older batch under its number, or under that of the last applied batch. Each such denial is
a dispute. A replay that contains a batch that also came live ends the row of disputes; a stream is
probed until this has happened once in its epoch, so that it shows early. After three disputes in a
row (`MAX_DISPUTES`) the replay is *foreign*: the rank's contents are dropped, by `RankRestarted`,
and the stream goes on with its live batches alone, behind a loss, as if there were no replay.
Probes go on, more and more rarely. Their replies are only compared: if one is the last applied
batch, replay is used again, after a restart and a join.

**Without replay** (there is no endpoint, or its buffer proved to be empty) a gap waits for
reordered batches until a batch behind it has waited for one time-out. Then it is lost, so several
gaps wait at the same time, and not one after the other. A reconnect is a restart at the next batch.
Batches are accepted unproven while the buffer is empty; if a probe finds batches in it after all,
the stream restarts and joins.

**Limit.** A publisher that was restarted without breaking the connection (behind a proxy), and
whose first batch to reach us has exactly the next number, looks like the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvindex.subscribe.sequencer.applied import Cursor
from kvindex.subscribe.sequencer.config import SequencerConfig
from kvindex.subscribe.sequencer.explain import explain
from kvindex.subscribe.sequencer.live_batches import LiveBatches
from kvindex.subscribe.sequencer.machine import Machine
from kvindex.subscribe.sequencer.repair import Purpose, Repair
from kvindex.subscribe.sequencer.replies import Replies
from kvindex.subscribe.sequencer.values import MAX_SEQ, Action, Batch, State
from kvindex.wire.rank import Rank

__all__ = ["Sequencer"]


class Sequencer:
    """Order the batches of one publisher; see the module for how.

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
        applied: what was delivered: `epoch`, `seq`, `complete`, … Read, do not write.
        counters: what happened how often, by name. Read, do not write.

    Examples:
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
        self._machine = Machine(rank, config, now, Random() if random is None else random)
        self._live = LiveBatches(self._machine)
        self._replies = Replies(self._machine)
        self._replay = self._machine.replay
        self._config = config
        self._alive_at = now
        self._stale = False
        self.applied = self._machine.applied
        self.counters = self._machine.counters

    # How it stands ----------------------------------------------------------------------------

    def rename(self, rank: Rank) -> None:
        """Rename the rank in all later items."""
        self._machine.rank = rank

    @property
    def state(self) -> State:
        """The state."""
        state = self._machine.state
        return State.STALE if self._stale and state is State.LIVE else state

    @property
    def lag(self) -> int:
        """How many batches are known to exist and not delivered."""
        next_seq = self.applied.next_seq
        return (
            len(self._machine.held)
            if next_seq is None
            else max(0, self._machine.held.highest + 1 - next_seq)
        )

    @property
    def reason(self) -> str:
        """Why the state is not LIVE and what it waits for, for people; empty when LIVE."""
        return explain(
            self.state,
            self.applied,
            self._machine.held,
            self._machine.repair,
            now=self._machine.now,
            alive_at=self._alive_at,
            gap_due=self._machine.gap_due,
        )

    @property
    def unrepairable(self) -> str:
        """Why nothing can be repaired at present, for people; empty while replay may help."""
        return self._replay.trouble

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called next; None if there is nothing to wait for."""
        state, repair = self._machine.state, self._machine.repair
        if state in (State.CONNECTING, State.CLOSED):
            return None
        waits = []
        if repair is not None:  # as in `tick`: it decides before a gap's time-out
            waits.append(repair.due)
        elif (gap_due := self._machine.gap_due) is not None:
            waits.append(gap_due)
        if state is State.LIVE:
            if repair is None and (probe_due := self._replay.probe_due) is not None:
                waits.append(probe_due)
            if not self._stale:
                waits.append(self._alive_at + self._config.stale_after)
        return min(waits, default=None)

    def cursor(self) -> Cursor | None:
        """Return all that a later sequencer needs to go on from here, in another process too.

        None where that is impossible: nothing was applied in this epoch, the publisher keeps no
        batches to prove its identity, or the sequencer is closed.
        """
        if self._machine.state is State.CLOSED or not self._replay.usable:
            return None
        return self.applied.cursor(losses_kept=self._config.on_loss == "keep")

    # Entrances --------------------------------------------------------------------------------

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
            assert self._machine.state is State.CONNECTING
            assert self.applied.seq is None
            refusal = refused or self._why_not_resume(cursor)
            if cursor is None or refusal:
                self.counters["resumes_refused"] += 1
                self.counters[f"refused_{refusal}"] += 1
                self.applied.epoch = 0 if cursor is None else cursor.epoch
                self._machine.restart(refusal)
            else:
                self.counters["resumed"] += 1
                self.applied.resume(cursor)
        return self._leave()

    def connected(self, now: float) -> list[Action]:
        """Record a connection to the publisher."""
        if self._enter(now):
            if self._machine.state is not State.CONNECTING:
                self._machine.disconnect()
            self._alive_at = self._replay.quiet_since = now
            if self._replay.exists:
                self._machine.begin(Purpose.JOIN if self.applied.seq is None else Purpose.PROVE)
            else:
                if self.applied.unproven:
                    # No replay can prove that the publisher is the same, nor which publisher sent
                    # the batches since the connection broke.
                    self._machine.held.clear()
                    self._machine.restart("unproven_reconnect")
                self._machine.go_live()
        return self._leave()

    def disconnected(self, now: float) -> list[Action]:
        """Record that the connection broke."""
        if self._enter(now) and self._machine.state is not State.CONNECTING:
            self._machine.disconnect()
        return self._leave()

    def live(self, batch: Batch, now: float) -> list[Action]:
        """Accept a live batch."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.damaged(None, now)
        if self._enter(now):
            self._prove_life()
            self._live.take(batch)
        return self._leave()

    @property
    def run_start(self) -> int | None:
        """The first seq that `live_run` accepts; None while `live` must see each batch."""
        return self._live.run_start

    def live_run(
        self, first_seq: int, timestamps: Sequence[float], fingerprints: Sequence[int], now: float
    ) -> int:
        """Accept live batches numbered `first_seq`, `first_seq` + 1, … and return how many.

        The effect is that of `live` for each of them. The caller passes on so many, from the first
        on, and gives the next one to `live`. What `timestamps` and `fingerprints`
        hold is `Batch.ts` and `Batch.fingerprint`.
        """
        count = 0
        if self._enter(now) and (count := self._live.take_run(first_seq, timestamps, fingerprints)):
            self._prove_life()
        return count

    def damaged(self, seq: int | None, now: float) -> list[Action]:
        """Record a live message that cannot be read, with its seq where legible."""
        if self._enter(now):
            self._live.take_damaged(_legible(seq))
        return self._leave()

    def replayed(self, request: int, batch: Batch, now: float) -> list[Action]:
        """Accept a batch that came in reply to `request`."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.replayed_damaged(request, batch.seq, now)
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._prove_life()
            self._replies.take(repair, batch)
        return self._leave()

    def replayed_damaged(self, request: int, seq: int, now: float) -> list[Action]:
        """Record a reply to `request` that cannot be read, under the number `seq`."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._prove_life()
            self._replies.take_damaged(repair, _legible(seq))
        return self._leave()

    def replay_ended(self, request: int, now: float) -> list[Action]:
        """Record the end marker of `request`."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._prove_life()
            self._replies.end(repair, request)
        return self._leave()

    def replay_failed(self, request: int, now: float) -> list[Action]:
        """Record that the socket of `request` failed."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._replies.fail(repair)
        return self._leave()

    def tick(self, now: float) -> list[Action]:
        """Do what is due; call it at `deadline` or at any time."""
        machine = self._machine
        if self._enter(now) and machine.state is not State.CONNECTING:
            if machine.repair is not None:
                if now >= machine.repair.due:
                    self._replies.time_out(machine.repair)
            elif machine.gap_due is not None:
                machine.lose_overdue()
            elif (
                machine.state is State.LIVE
                and (probe_due := self._replay.probe_due) is not None
                and now >= probe_due
            ):
                self.counters["probes"] += 1
                machine.begin(Purpose.PROBE)
            self._note_silence()
        return self._leave()

    def close(self, now: float) -> list[Action]:
        """End for good; idempotent."""
        if self._enter(now):
            self._machine.abandon_repair()
            self._machine.held.clear()
            self._machine.state = State.CLOSED
        return self._leave()

    # What the entrances share -----------------------------------------------------------------

    def _enter(self, now: float) -> bool:
        """Set the time; return False when closed."""
        if self._machine.state is State.CLOSED:
            return False
        self._machine.now = now
        return True

    def _leave(self) -> list[Action]:
        """Return the accumulated actions."""
        out, self._machine.out = self._machine.out, []
        return out

    def _current(self, request: int) -> Repair | None:
        """Return the repair if `request` is its open request; count the reply as stale if not."""
        repair = self._machine.repair
        if repair is not None and repair.request == request:
            return repair
        self.counters["stale_replies"] += 1
        return None

    def _why_not_resume(self, cursor: Cursor | None) -> str:
        if cursor is None:
            return "no_cursor"
        if not self._replay.exists:
            return "no_replay"
        # A lost batch may have removed blocks that were kept; this policy would drop them.
        return "kept_losses" if cursor.kept_losses and self._config.on_loss == "reset" else ""

    def _prove_life(self) -> None:
        self._alive_at = self._machine.now
        self._stale = False

    def _note_silence(self) -> None:
        due = self._alive_at + self._config.stale_after
        if self._machine.state is State.LIVE and not self._stale and self._machine.now >= due:
            self._stale = True
            self.counters["stale"] += 1


def _legible(seq: int | None) -> int | None:
    """Return a seq that a batch can have, or None."""
    return seq if seq is not None and 0 <= seq <= MAX_SEQ else None
