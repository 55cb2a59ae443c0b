"""A ring of chunks in shared memory: one writer, many readers on the same machine. Linux only.

```
segment ─ a named file, locks, cleaning       waiting ─ how long to wait, how often to look around
ring ─ where each byte lies, the memory,      sender, receiver ─ a party with patience: time-outs,
       its handle, its two parties              dead peers, fragments
```

The queue of `kvindex.shm` and the fan-out are made of it. The parties are native code: without the
native module everything here can be imported, and making or attaching a ring raises SegmentError.
"""

from __future__ import annotations

from kvindex.shm.ring.receiver import RingReceiver
from kvindex.shm.ring.ring import RAW, Buffer, Layout, RingHandle, ShmRingBuffer, check_native
from kvindex.shm.ring.segment import Segment
from kvindex.shm.ring.sender import (
    DeadReaderPolicy,
    RingSender,
    check_dead,
    check_policy,
    fragments,
)
from kvindex.shm.ring.waiting import Patience, Waiting, check_cancel

__all__ = [
    "RAW",
    "Buffer",
    "DeadReaderPolicy",
    "Layout",
    "Patience",
    "RingHandle",
    "RingReceiver",
    "RingSender",
    "Segment",
    "ShmRingBuffer",
    "Waiting",
    "check_cancel",
    "check_dead",
    "check_native",
    "check_policy",
    "fragments",
]
