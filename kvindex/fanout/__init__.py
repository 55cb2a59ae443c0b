"""One subscriber process, and replicas of its index in any number of others on the machine.

    fanout = kvindex.fanout.FanOut(workers, path)        # in one process
    replica = kvindex.fanout.join(path)                  # in each of the others
    replica.match(token_ids).best
    kvindex.fanout.ask(path)                             # how the server stands, without joining

```
engines ─► Client ─ StreamTap ─ Outflow ══ ring in shared memory ══► Follower ─ Copy ─ Replica
             └───── snapshot ─ Reception ── socket, when joining ──►
```

What a replica applies is what the client's index took, in the same order: batches as the engines
sent them, what happened between them, and the ranks' statuses, so that trust is never ahead of the
data. Linux only.
"""

from __future__ import annotations

from kvindex.errors import QueueTimeoutError, SegmentError
from kvindex.fanout.joining import ask
from kvindex.fanout.replica import Replica, join
from kvindex.fanout.server import FanOut

__all__ = ["FanOut", "QueueTimeoutError", "Replica", "SegmentError", "ask", "join"]
