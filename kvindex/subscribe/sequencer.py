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
batches for one time-out and is then lost, and a reconnect is a restart at the next batch.

**Limit.** A publisher that was started anew without the connection breaking (behind a proxy), and
whose first batch to reach us carries exactly the next number, cannot be told from the old one.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from kvindex.subscribe.actions import (
    MAX_SEQ,
    Action,
    Ask,
    Batch,
    Deliver,
    Drop,
    Lost,
    Restarted,
)
from kvindex.subscribe.applied import Applied
from kvindex.subscribe.config import Replay, SequencerConfig
from kvindex.subscribe.explain import explain
from kvindex.subscribe.held import Held, HeldBatch
from kvindex.subscribe.repair import Purpose, Repair
from kvindex.subscribe.state import State

__all__ = [
    "Action",
    "Ask",
    "Batch",
    "Deliver",
    "Drop",
    "Lost",
    "Replay",
    "Restarted",
    "Sequencer",
    "SequencerConfig",
    "State",
]

MAX_PROBE_FACTOR = 8
"""A replay endpoint that does not answer probes is probed this much more rarely."""

MAX_REFUSED = 16
"""Without replay: batches refused in a row for their age until the clock is taken as set back."""


class Sequencer:
    """Order the batches of one publisher; see the module for how.

    Every entrance takes the time (seconds, any monotonic clock) and returns the actions to obey,
    in order. After `close` all return nothing.

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

    def __init__(
        self, config: SequencerConfig, *, now: float, random: Random | None = None
    ) -> None:
        self._config = config
        self._random = Random() if random is None else random
        self._now = now
        self._out: list[Action] = []
        self._counters: Counter[str] = Counter()
        self._state = State.CONNECTING
        self._applied = Applied(recent=config.recent)
        self._held = Held(max_batches=config.max_held, max_bytes=config.max_held_bytes)
        # Seqs from next_seq on that replay sent, but damaged.
        self._broken: set[int] = set()
        self._repair: Repair | None = None
        self._last_request = 0
        # A replay must be asked after the current one: it was too early to show what is missing.
        self._ask_again = False
        # Disconnected since the publisher was last known to be the one applied so far.
        self._unproven = False
        # The first batch of the epoch needs replay's word: it may be a straggler of another one.
        self._doubt_start = False
        # Highest seq of a live batch dropped for want of room, -1 if none.
        self._dropped = -1
        # Whether the publisher keeps batches for replay: None until it is seen.
        self._buffering: bool | None = None
        # Without replay: when the open gap is given up.
        self._gap_due: float | None = None
        self._refused = 0
        self._quiet_since = now
        self._probe_factor = 1
        self._alive_at = now
        self._stale = False
        self._delivered_at: float | None = None

    # ---------------------------------------------------------------- what can be seen

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
        known = max(self._dropped, -1 if held is None else held, max(self._broken, default=-1))
        return max(0, known + 1 - next_seq)

    @property
    def counters(self) -> Counter[str]:
        """What happened how often, by name. The sequencer's own: read, do not write."""
        return self._counters

    @property
    def reason(self) -> str:
        """Why the state is not LIVE and what is awaited, for people; empty when LIVE."""
        first_held = min((*self._broken, *filter(None, (self._held.first,))), default=None)
        return explain(
            self.state,
            now=self._now,
            alive_at=self._alive_at,
            next_seq=self._applied.next_seq,
            first_held=first_held,
            held=len(self._held),
            unproven=self._unproven,
            repair=self._repair,
            gap_due=self._gap_due,
        )

    def last_event_age(self, now: float) -> float | None:
        """Return the seconds since the last delivery; None if there was none."""
        return None if self._delivered_at is None else max(0.0, now - self._delivered_at)

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next; None if there is nothing to wait for."""
        if self._state in (State.CONNECTING, State.CLOSED):
            return None
        waits = []
        if self._repair is not None:
            waits.append(self._repair.due)
        if self._gap_due is not None:
            waits.append(self._gap_due)
        if self._state is State.LIVE:
            if self._repair is None and self._config.has_replay:
                waits.append(self._probe_due)
            if not self._stale:
                waits.append(self._alive_at + self._config.stale_after)
        return min(waits, default=None)

    # ---------------------------------------------------------------- entrances

    def connected(self, now: float) -> list[Action]:
        """Take note of a connection to the publisher."""
        if self._enter(now):
            if self._state is not State.CONNECTING:
                self._disconnect()
            self._alive_at = self._quiet_since = now
            if self._config.has_replay:
                self._begin(Purpose.JOIN if self._applied.seq is None else Purpose.PROVE)
            else:
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
            self._take_damaged(seq)
        return self._leave()

    def replayed(self, request: int, batch: Batch, now: float) -> list[Action]:
        """Take a batch that came in reply to `request`."""
        if not 0 <= batch.seq <= MAX_SEQ:
            return self.replayed_damaged(request, batch.seq, now)
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._prove_life()
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
            self._prove_life()
            self._close_request(repair)
            self._take_end(repair, request)
        return self._leave()

    def replay_failed(self, request: int, now: float) -> list[Action]:
        """Take note that the socket of `request` failed."""
        if self._enter(now) and (repair := self._current(request)) is not None:
            self._counters["replays_failed"] += 1
            self._close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")
        return self._leave()

    def tick(self, now: float) -> list[Action]:
        """Do what is due; call it at `deadline` or whenever."""
        if self._enter(now) and self._state is not State.CONNECTING:
            if self._repair is not None:
                if now >= self._repair.due:
                    self._repair_due(self._repair)
            elif self._gap_due is not None and now >= self._gap_due:
                self._lose("gap_without_replay")
                self._go_live()
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
            self._gap_due = None
            self._state = State.CLOSED
        return self._leave()

    def _enter(self, now: float) -> bool:
        """Set the time; return False when closed."""
        if self._state is State.CLOSED:
            return False
        self._now = now
        return True

    def _leave(self) -> list[Action]:
        """Hand over the actions that have piled up."""
        out, self._out = self._out, []
        return out

    def _current(self, request: int) -> Repair | None:
        """Return the repair if `request` is its open request; count the reply as stale if not."""
        if self._repair is not None and self._repair.request == request:
            return self._repair
        self._counters["stale_replies"] += 1
        return None

    # ---------------------------------------------------------------- connection and life

    @property
    def _asks_replay(self) -> bool:
        """Whether replay can help: there is an endpoint, and it did not prove to be empty."""
        return self._config.has_replay and self._buffering is not False

    @property
    def _start_doubted(self) -> bool:
        """Whether the first batch of the epoch may only come from replay."""
        return self._doubt_start and self._asks_replay

    @property
    def _probe_due(self) -> float:
        return self._quiet_since + self._config.probe_interval * self._probe_factor

    def _disconnect(self) -> None:
        self._counters["disconnects"] += 1
        self._abandon_request()
        if not self._asks_replay:
            # What was missing was on its way over the broken connection: nothing can fill the gap.
            self._lose_all_gaps("gap_without_replay")
        self._gap_due = None
        self._doubt_start = True
        self._state = State.CONNECTING
        if self._applied.seq is None:
            # Nothing tells later whether these are of the publisher that is met next.
            self._counters["held_dropped"] += self._held.clear()
            self._broken.clear()
            if self._applied.next_seq:
                # Losses were declared up to there; whoever comes next starts afresh.
                self._restart("unproven_reconnect")
            self._applied.forget_start()
        else:
            self._unproven = True
        if not self._config.has_replay:
            self._applied.complete = False

    def _prove_life(self) -> None:
        self._alive_at = self._now
        self._stale = False

    def _note_silence(self) -> None:
        due = self._alive_at + self._config.stale_after
        if self._state is State.LIVE and not self._stale and self._now >= due:
            self._stale = True
            self._counters["stale"] += 1

    # ---------------------------------------------------------------- live batches

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
            self._deliver(batch, replayed=False)
            self._drain()
            self._after_advance()
        elif self._hold(batch):
            self._notice_gap()

    def _follows(self, batch: Batch) -> bool:
        """Return whether a live batch may be delivered at once."""
        if self._unproven or self._start_doubted:
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

    def _hold(self, batch: Batch, *, confirmed: bool = False) -> bool:
        """Hold a batch that does not follow yet; return whether that brought something new."""
        known = self._held.get(batch.seq)
        if known is not None and known.batch.fingerprint == batch.fingerprint:
            if not confirmed:
                self._counters["duplicates"] += 1
            known.confirmed |= confirmed
            return False
        if known is not None:
            self._counters["conflicting"] += 1
            if batch.ts < known.batch.ts:
                return False
        self._broken.discard(batch.seq)
        entry = HeldBatch(batch, asked=self._last_request, confirmed=confirmed)
        if self._held.add(entry):
            return True
        self._overflow(entry)
        return False

    def _overflow(self, entry: HeldBatch) -> None:
        """Drop the newest arrival for replay to bring; without replay lose the gap before it."""
        batch = entry.batch
        if self._asks_replay or self._state is State.CONNECTING:
            self._counters["held_dropped"] += 1
            self._ask_again = self._asks_replay
            self._dropped = max(self._dropped, batch.seq)
        else:
            self._lose_all_gaps("held_overflow")
            if batch.seq == self._applied.next_seq:
                self._deliver(batch, replayed=False)
            elif batch.seq > (self._applied.next_seq or 0):
                self._held.add(entry)
                self._notice_gap()

    # ---------------------------------------------------------------- replies

    def _take_reply(self, repair: Repair, batch: Batch) -> bool:
        """Take a reply to the open request; return whether it brought something new."""
        if batch.seq < repair.start_seq:
            self._counters["below_start"] += 1
            return False
        if self._buffering is False and self._applied.seq is not None:
            # What was taken on trust while replay was empty may be another publisher's.
            self._buffering = True
            self._restart("replay_awoke")
            return True
        self._buffering = True
        if self._applied.next_seq is None:
            self._start_at(batch)
        next_seq = self._applied.next_seq
        if next_seq is not None and batch.seq < next_seq:
            return self._check_overlap(batch)
        if self._unproven:
            # The buffer has wrapped past the overlap while nobody could see who was sending.
            self._restart("unproven_reconnect")
            return True
        if self._contradicts_held(batch):
            self._counters["conflicting"] += 1
            self._counters["replays_failed"] += 1
            self._close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")
            return True
        return self._take_following_reply(batch)

    def _start_at(self, batch: Batch) -> None:
        """Begin the epoch with the first batch that replay has, or with a held run before it."""
        seq = batch.seq
        if self._applied.epoch == 0 and not self._counters["disconnects"]:
            seq = self._held.start_of_run(seq)
        self._applied.start(seq)
        if seq > 0:
            self._counters["join_truncated"] += 1
        self._held.discard_below(seq)
        if seq < batch.seq:
            self._drain()

    def _check_overlap(self, batch: Batch) -> bool:
        """Compare a reply with what was applied under its seq: the proof of identity."""
        recognised = self._applied.recognise(batch)
        if recognised is False:
            self._restart("overlap_differs")
            return True
        if recognised and self._unproven:
            self._unproven = False
            self._drain()
            return True
        return False

    def _contradicts_held(self, batch: Batch) -> bool:
        """Return whether a newer live batch of that seq shows the replay to be a dead one's."""
        entry = self._held.get(batch.seq)
        return (
            entry is not None
            and entry.batch.fingerprint != batch.fingerprint
            and entry.batch.ts > batch.ts
        )

    def _take_following_reply(self, batch: Batch) -> bool:
        self._broken.discard(batch.seq)
        if batch.seq != self._applied.next_seq:
            advanced = self._hold(batch, confirmed=True)
            self._notice_gap()
            return advanced
        if self._repair is not None and self._repair.purpose is Purpose.PROBE:
            self._counters["tail_repaired"] += 1
        self._held.pop(batch.seq)
        self._deliver(batch, replayed=True)
        self._drain()
        self._after_advance()
        return True

    def _note_broken(self, seq: int) -> None:
        """Remember a damaged batch as a hole at its seq."""
        next_seq = self._applied.next_seq
        if next_seq is None:
            if self._asks_replay:
                self._applied.start(seq)
                self._held.discard_below(seq)
                self._drain()
            next_seq = self._applied.next_seq or seq
        if seq >= next_seq and seq not in self._held and len(self._broken) < self._config.max_held:
            self._broken.add(seq)

    def _stop_flood(self, repair: Repair, advanced: bool) -> None:
        """Abandon a request whose replies go on for ever without bringing anything."""
        still_open = self._repair is repair and repair.request is not None
        if not repair.judge(advanced, self._now) and still_open:
            self._counters["replay_flood"] += 1
            self._close_request(repair)
            self._retry_or_give_up(repair, "replay_failed")

    def _take_end(self, repair: Repair, request: int) -> None:
        """Judge a replay that has ended."""
        self._probe_factor = 1
        self._quiet_since = self._now
        self._held.testify(request)
        if repair.highest_seq is None and self._applied.seq is None:
            self._take_empty_end(repair)
        elif repair.highest_seq is None or repair.highest_seq < repair.start_seq:
            self._take_end_below(repair)
        else:
            self._discard_unconfirmed()
            self._finish_or_retry(repair)

    def _take_empty_end(self, repair: Repair) -> None:
        """Judge an empty replay with nothing applied: nothing was published, or nothing is kept."""
        first = self._held.first
        if first is None or (first == 0 and not self._doubt_start):
            if self._applied.next_seq is None:
                self._applied.start(0)
            self._drain()
            self._finish_or_retry(repair)
        elif self._held_missed(first):
            if self._buffering:
                self._discard_unconfirmed()
                self._buffering = None
                self._take_empty_end(repair)
            else:
                self._counters["replay_empty"] += 1
                self._buffering = False
                if self._applied.next_seq == 0:
                    self._applied.forget_start()
                self._go_live()
                self._lose_dropped()
        else:
            self._ask_later(repair)

    def _take_end_below(self, repair: Repair) -> None:
        """Judge a replay that ended below what was applied: a restart, or nothing is kept."""
        if self._buffering or self._unproven:
            self._restart("replay_ends_below")
        elif self._buffering is None:
            # Nothing was ever seen from its buffer: ask from 0 whether there is one at all.
            self._buffering = False
            self._ask(repair)
        else:
            self._counters["replay_empty"] += 1
            self._go_live()

    # ---------------------------------------------------------------- tries

    def _begin(self, purpose: Purpose) -> None:
        self._repair = Repair(purpose, self._config.replay)
        self._gap_due = None
        if purpose is Purpose.GAP:
            self._state = State.REPAIRING
        elif purpose is not Purpose.PROBE:
            self._state = State.SYNCING
        self._ask(self._repair)

    def _ask(self, repair: Repair) -> None:
        start_seq = 0 if self._buffering is False else self._applied.seq or 0
        self._last_request += 1
        self._ask_again = False
        repair.ask(self._last_request, start_seq, self._now)
        self._counters["replays_asked"] += 1
        self._out.append(Ask(self._last_request, start_seq))

    def _ask_later(self, repair: Repair) -> None:
        repair.back_off(self._random, self._now)

    def _close_request(self, repair: Repair) -> None:
        if repair.request is not None:
            self._out.append(Drop(repair.request))
        repair.close_try()

    def _abandon_request(self) -> None:
        if self._repair is not None:
            self._close_request(self._repair)
            self._repair = None

    def _repair_due(self, repair: Repair) -> None:
        if repair.request is None:
            self._ask(repair)
            return
        self._counters["replay_timeouts"] += 1
        self._close_request(repair)
        self._retry_or_give_up(repair, "replay_timeout")

    @property
    def _missing(self) -> bool:
        """Whether something is known, or must be suspected, to be missing."""
        return bool(self._held or self._broken or self._ask_again or self._unproven)

    def _finish_or_retry(self, repair: Repair) -> None:
        """Go on after a replay that ended: live if nothing is missing, else ask again."""
        if not self._missing:
            self._dropped = -1
            self._go_live()
        elif repair.progress:
            self._ask(repair)
        elif not repair.exhausted or self._awaits_evidence:
            self._ask_later(repair)
        else:
            self._give_up(repair, self._name_hole(repair))

    def _retry_or_give_up(self, repair: Repair, reason: str) -> None:
        """Go on after a request that failed."""
        if repair.purpose is Purpose.PROBE and not self._missing:
            self._counters["probes_failed"] += 1
            self._probe_factor = min(MAX_PROBE_FACTOR, 2 * self._probe_factor)
            self._quiet_since = self._now
            self._repair = None
        elif not repair.exhausted:
            self._ask_later(repair)
        else:
            self._give_up(repair, reason)

    @property
    def _awaits_evidence(self) -> bool:
        """Whether the batch behind the hole may still prove to be bogus."""
        if self._applied.next_seq in self._broken or self._held.first is None:
            return False
        entry = self._held.get(self._held.first)
        return entry is not None and not entry.confirmed

    @property
    def _enough_evidence(self) -> int:
        """How many replays without a held batch refute it: one may have been a moment too early."""
        return max(2, self._config.replay.attempts)

    def _held_missed(self, seq: int) -> bool:
        """Return whether enough replays ended without the held batch."""
        entry = self._held.get(seq)
        return entry is not None and entry.missed >= self._enough_evidence

    def _discard_unconfirmed(self) -> None:
        enough = self._enough_evidence
        dropped = self._held.discard(lambda entry: entry.missed >= enough)
        self._counters["unconfirmed"] += dropped

    def _name_hole(self, repair: Repair) -> str:
        """Return why replay could not fill the hole at the next expected seq."""
        next_seq = self._applied.next_seq
        if next_seq in self._broken:
            return "undecodable"
        begins_behind = next_seq is not None and (repair.first_seq or 0) > next_seq
        return "evicted" if begins_behind else "unreplayable"

    def _give_up(self, repair: Repair, reason: str) -> None:
        """Go on without what replay did not bring."""
        self._counters["repairs_given_up"] += 1
        self._probe_factor = min(MAX_PROBE_FACTOR, 2 * self._probe_factor)
        if self._unproven:
            self._restart("unproven_reconnect", resync=reason == "undecodable")
            return
        self._doubt_start = False
        self._drain()
        if self._applied.next_seq is None:
            self._lose_join(f"join_{reason}")
        elif self._held or self._broken:
            self._lose(reason)
        else:
            self._ask_again = False
            self._lose_dropped()
        self._drain()
        if self._missing:
            repair.tries = 0
            self._ask(repair)
        else:
            self._go_live()

    # ---------------------------------------------------------------- losses and restarts

    def _lose_join(self, reason: str) -> None:
        """Start behind what a dead replay endpoint did not bring; with nothing held, anywhere."""
        first = self._held.first
        if first is None:
            return
        self._applied.start(first)
        if first > 0:
            self._declare(reason, 0, first - 1)

    def _lose(self, reason: str) -> None:
        """Declare the hole at the next expected seq lost."""
        first = last = self._applied.next_seq
        if first is None or last is None:
            return
        if first in self._broken:
            reason = "undecodable"
            while last + 1 in self._broken:
                last += 1
        else:
            behind = [seq for seq in (self._held.first, min(self._broken, default=None)) if seq]
            last = min(behind, default=first + 1) - 1
        self._applied.skip_to(last + 1)
        self._declare(reason, first, last)

    def _lose_dropped(self) -> None:
        """Declare what was dropped for want of room, and will not come again, lost."""
        first = self._applied.next_seq
        if first is not None and first <= self._dropped and not self._held:
            self._applied.skip_to(self._dropped + 1)
            self._declare("held_overflow", first, self._dropped)

    def _declare(self, reason: str, first: int, last: int) -> None:
        self._counters["losses"] += 1
        self._counters["lost_batches"] += last - first + 1
        self._broken = {seq for seq in self._broken if seq > last}
        self._out.append(Lost(reason, first, last, self._config.on_loss == "reset"))

    def _lose_all_gaps(self, reason: str) -> None:
        """Without replay: deliver everything held, with a loss at each hole."""
        if self._unproven:
            return
        while self._held or self._broken:
            if self._applied.next_seq is None:
                self._applied.start(self._held.first or 0)
            else:
                self._lose(reason)
            self._drain()
        self._gap_due = None

    def _lose_broken_next(self) -> None:
        """Without replay: a damaged batch that is the next one is lost at once."""
        while self._applied.next_seq in self._broken:
            self._lose("undecodable")
            self._drain()

    def _restart(self, reason: str, trigger: Batch | None = None, *, resync: bool = True) -> None:
        """Begin a new epoch; with `resync`, by a join."""
        self._counters["restarts"] += 1
        self._abandon_request()
        if self._config.has_replay:
            self._held.clear()
        elif trigger is not None:
            oldest = trigger.ts
            self._held.discard(lambda entry: entry.batch.ts < oldest)
        self._applied.restart(trigger)
        self._broken.clear()
        self._unproven = self._ask_again = False
        self._doubt_start = resync
        self._dropped = -1
        self._gap_due = None
        self._refused = 0
        if self._buffering is False:
            self._buffering = None
        self._out.append(Restarted(self._applied.epoch, reason))
        if trigger is not None:
            self._hold(trigger)
        if self._state is State.CONNECTING:
            return
        if self._config.has_replay and resync:
            self._begin(Purpose.JOIN)
        else:
            self._go_live()

    # ---------------------------------------------------------------- advancing

    def _deliver(self, batch: Batch, *, replayed: bool) -> None:
        """Deliver the next batch."""
        starts_epoch = self._applied.seq is None
        self._applied.apply(batch)
        self._counters["delivered"] += 1
        self._counters["replayed"] += replayed
        self._delivered_at = self._now
        self._refused = 0
        self._doubt_start = False
        self._broken.discard(batch.seq)
        if self._repair is not None:
            self._repair.progress = True
        if self._buffering is not False:
            self._quiet_since = self._now
        self._out.append(Deliver(batch, replayed))
        if starts_epoch and self._config.has_replay:
            self._counters["old_epoch"] += self._held.discard(self._is_straggler)

    def _is_straggler(self, entry: HeldBatch) -> bool:
        """Return whether a held batch is older than the epoch and no replay has it."""
        return not entry.confirmed and entry.batch.ts < self._applied.oldest_ts

    def _drain(self) -> None:
        """Deliver the held batches that follow."""
        while not self._unproven and (seq := self._applied.next_seq) is not None:
            entry = self._held.get(seq)
            if entry is None or (self._start_doubted and not entry.confirmed):
                return
            self._held.pop(seq)
            self._deliver(entry.batch, replayed=entry.confirmed)

    def _after_advance(self) -> None:
        """Be live again as soon as a gap has closed; the open request goes on as a probe."""
        repair = self._repair
        if repair is None:
            if self._state is State.REPAIRING and not self._held:
                self._go_live()
        elif repair.purpose is Purpose.GAP and not repair.until_end and not self._missing:
            if repair.request is None:
                self._go_live()
            else:
                repair.purpose = Purpose.PROBE
                self._state = State.LIVE

    def _go_live(self) -> None:
        """End the repair; deliver what can be; look for a further gap."""
        self._abandon_request()
        self._gap_due = None
        self._state = State.LIVE
        if self._unproven and (first := self._held.first) is not None:
            entry = self._held.get(first)
            assert entry is not None
            self._restart("unproven_reconnect", entry.batch)
            return
        if self._applied.next_seq is None and (first := self._held.first) is not None:
            self._applied.start(first)
        self._drain()
        if not self._asks_replay:
            self._lose_broken_next()
        self._notice_gap()

    def _notice_gap(self) -> None:
        """Begin to repair if something is missing and no repair runs."""
        if not (self._held or self._broken or self._ask_again):
            return
        if not self._asks_replay:
            if self._gap_due is None and (self._held or self._broken):
                self._counters["gaps"] += 1
                self._state = State.REPAIRING
                self._gap_due = self._now + self._config.replay.timeout
        elif self._repair is None:
            self._counters["gaps"] += 1
            self._begin(Purpose.GAP)
        elif self._repair.purpose is Purpose.PROBE:
            self._counters["gaps"] += 1
            self._repair.purpose = Purpose.GAP
            self._state = State.REPAIRING
