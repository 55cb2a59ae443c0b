"""One subscriber process, and replicas of its index in any number of others on the machine.

    fanout = replicas.FanOut(workers, path)              # in one process
    replica = replicas.join(path)                        # in each of the others
    replica.match(token_ids).best
    replicas.ask(path)                                   # how the server stands, without joining

```
engines ─► Client ─ StreamTap ─ Outflow ══ ring in shared memory ══► Follower ─ Copy ─ Replica
             └───── snapshot ─ Reception ── socket, when joining ──►
```

A replica applies the same items as the client's index, in the same order: batches as the engines
sent them, the items between them, and the ranks' statuses, so that trust is never ahead of the
data. Linux only. `nats/` does the same between machines.
Read first: `copy.py`, then `server.py` and `replica.py`; `nats/` says what is its own.
May import: `kvindex.wire`, `kvindex.subscribe`, `kvindex.shm`, `kvindex.index`, `kvindex.client`.
"""

from __future__ import annotations

from kvindex.replicas.replica import Replica, ask, join
from kvindex.replicas.server import FanOut
from kvindex.wire.errors import QueueTimeoutError, SegmentError

__all__ = ["FanOut", "QueueTimeoutError", "Replica", "SegmentError", "ask", "join"]
