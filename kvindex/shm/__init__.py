"""One writer, many readers: a queue through shared memory, and over TCP for readers elsewhere.

```
MessageQueue ── RingSender ─► ring of chunks in /dev/shm ─► RingReceiver   (this machine)
             └─ RemoteSender ─► TCP, by credit ─► RemoteReader            (other machines)
```

`MessageQueue` is what most users need. Linux only.

Read first: `queue.py` and `writing.py`, then `ring/ring.py` below them; `remote/` stands alone.
May import: from `kvindex.wire` only errors, forks, keys, options and the native module; never
events or the index.
"""

from __future__ import annotations

from kvindex.shm.codec import Codec, MsgpackCodec, PickleCodec
from kvindex.shm.groups import ProcessGroup, TorchProcessGroup
from kvindex.shm.queue import MessageQueue
from kvindex.shm.ring import ShmRingBuffer, Waiting
from kvindex.shm.writing import Handle, QueueOptions
from kvindex.wire.errors import (
    ClosedError,
    InUseError,
    PeerDiedError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderDiedError,
    ReaderEvictedError,
    SegmentError,
    WaitCancelledError,
    WriterDiedError,
)

__all__ = [
    "ClosedError",
    "Codec",
    "Handle",
    "InUseError",
    "MessageQueue",
    "MsgpackCodec",
    "PeerDiedError",
    "PickleCodec",
    "ProcessGroup",
    "QueueClosedError",
    "QueueOptions",
    "QueueTimeoutError",
    "ReaderDiedError",
    "ReaderEvictedError",
    "SegmentError",
    "ShmRingBuffer",
    "TorchProcessGroup",
    "WaitCancelledError",
    "Waiting",
    "WriterDiedError",
]
