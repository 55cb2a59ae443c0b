"""Order, gaps, duplicates and restarts of one publisher's batches: a pure state machine.

No part of it uses sockets, threads or clocks, or reads the contents of a batch.

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

**The parts**, from below. In `batches.py`, `AppliedBatches` remembers the delivered batches, and
`ReorderBuffer` keeps those that arrived out of order, within bounds, with the evidence for each.
In `stream_state.py`, `Replay` has the facts about the replay endpoint, `Repair` the replay that is
under way, and `StreamState` all facts; it makes each move to another state, with the items. The
functions in `gaps_and_restarts.py` decide which moves to make. `Sequencer` has the entrances, and
watches the time.

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
  are delivered as they arrive, while there is no hole. Live batches that do not follow are held.
* LIVE: nothing is known to be missing. After some silence a probe (a replay from the last applied
  batch) looks for a lost tail; the state stays LIVE.
* REPAIRING: a batch arrived that does not follow. It is held, and a replay from the last applied
  batch is asked for.

**Is it the same publisher?** A replay starts at the last applied batch, and includes it. The
fingerprint of that batch distinguishes the same publisher from a restarted one that has passed our
number. A replay that ends below that batch shows a restart. If the publisher's buffer no longer has
that batch, there is no proof; then it counts as the same only if the connection has not broken
(`AppliedBatches.unproven`). A live batch whose seq falls back is a restart if it is newer (by ts)
than the last applied batch, and a delayed duplicate otherwise.

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
have an older batch under its number, or under that of the last applied batch. Each such denial is a
dispute. A replay that contains a batch that also arrived live ends the row of disputes; a stream is
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

from kvindex.subscribe.sequencer.sequencer import Sequencer
from kvindex.subscribe.sequencer.values import (
    MANY_RESTARTS,
    MAX_COUNT,
    MAX_SEQ,
    RESTARTS_WITHIN,
    Action,
    AskReplay,
    Batch,
    CloseReplay,
    Cursor,
    RankBatch,
    RankLost,
    RankRestarted,
    ReplayPolicy,
    SequencerConfig,
)
from kvindex.wire.rank import State

__all__ = [
    "MANY_RESTARTS",
    "MAX_COUNT",
    "MAX_SEQ",
    "RESTARTS_WITHIN",
    "Action",
    "AskReplay",
    "Batch",
    "CloseReplay",
    "Cursor",
    "RankBatch",
    "RankLost",
    "RankRestarted",
    "ReplayPolicy",
    "Sequencer",
    "SequencerConfig",
    "State",
]
