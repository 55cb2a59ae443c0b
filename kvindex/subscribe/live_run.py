"""Many live batches at once, where each of them would just be delivered (see `sequencer`).

Nearly every message that ever arrives is the next one of a stream that misses nothing. For those
the whole deliberation of `Sequencer.live` comes to the same few assignments, so they are taken by
the run: one call, however many batches.

**Why this is the same as `live`, batch by batch.** `run_start` is a seq only while the state is
LIVE, a batch of this epoch has been applied, no repair runs and nothing is held, damaged, to be
asked for, or in doubt. Then `live` of a batch that carries exactly that seq, and is not older than
the epoch,

1. passes every test of `_take_live` that could refuse or hold it: its seq has not fallen back, its
   ts is not too old, identity is proven, and nothing waits for replay's word;
2. delivers it: the cursor, the memory of fingerprints and the counters advance, life is proven,
   and the waits for probe and staleness begin anew, at the same `now` for all of the run;
3. finds nothing to do afterwards: nothing held could follow, and no gap was open.

None of this changes what `run_start` asks for, except that it moves up by one; so the same holds
for the batch after it. A batch that differs in seq or age ends the run, and is for `live` to judge.
Held against `live` by `tests/property/test_sequencer_runs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvindex.subscribe.actions import MAX_SEQ
from kvindex.subscribe.repairing import Repairing
from kvindex.subscribe.state import State

__all__ = ["LiveRun"]


class LiveRun(Repairing):
    """Takes a row of live batches in one step, as long as nothing is out of the ordinary."""

    @property
    def run_start(self) -> int | None:
        """The seq from which on `live_run` takes batches; None while `live` must see each."""
        applied = self._applied
        if (
            self._state is not State.LIVE
            or self._repair is not None
            or applied.seq is None
            or self._doubt_start
            or self._missing
        ):
            return None
        return applied.next_seq

    def live_run(
        self,
        first_seq: int,
        timestamps: Sequence[float],
        fingerprints: Sequence[int],
        now: float,
    ) -> int:
        """Take live batches numbered `first_seq`, `first_seq` + 1, … and say how many of them.

        The caller is to deliver so many, from the first on, and to give the one after them to
        `live`. What `timestamps` and `fingerprints` hold is `Batch.ts` and `Batch.fingerprint`.
        """
        if first_seq != self.run_start:
            return 0
        count = self._count_followers(first_seq, timestamps)
        if not count:
            return 0
        self._now = now
        self._counters["live"] += count
        self._counters["delivered"] += count
        self._prove_life()
        self._note_delivery()
        self._applied.apply_run(timestamps[:count], fingerprints[:count])
        return count

    def _count_followers(self, first_seq: int, timestamps: Sequence[float]) -> int:
        """Count the batches in front of the first that is older than the epoch, or no batch."""
        oldest_ts = self._applied.oldest_ts
        count = min(len(timestamps), MAX_SEQ + 1 - first_seq)
        if count and min(timestamps) >= oldest_ts:
            return count
        older = (position for position, ts in enumerate(timestamps) if ts < oldest_ts)
        return min(count, next(older, count))
