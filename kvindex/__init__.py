"""A reliable subscriber of LLM engines' KV-cache events, and the prefix index it feeds.

Connect to the engines, then ask which rank holds a prompt:

    client = kvindex.connect([kvindex.Worker("vllm-0", "tcp://127.0.0.1:5557")])
    client.match(token_ids).best

The parts are `kvindex.wire`, `kvindex.subscribe`, `kvindex.index` and `kvindex.publish`.
`kvindex.testing` has a fake engine and faulty links for tests. `kvindex.fanout` feeds all processes
of a router from one subscriber, through the queue of `kvindex.shm`; import these three by name.
"""

from kvindex.backend import BACKEND
from kvindex.client import Client, connect
from kvindex.curve import Curve
from kvindex.errors import (
    BusyError,
    ClosedError,
    ConfigurationError,
    DecodeError,
    EncodeError,
    InUseError,
    InvariantError,
    KVIndexError,
    NotLiveError,
    PeerDiedError,
    QueueClosedError,
    QueueTimeoutError,
    ReaderDiedError,
    ReaderEvictedError,
    SegmentError,
    SnapshotError,
    TokenError,
    UnknownRankError,
    WaitCancelledError,
    WriterDiedError,
)
from kvindex.index import Index, Match, RankMatch
from kvindex.publish import (
    EventPublisher,
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    ZmqEventPublisher,
)
from kvindex.rank import Rank
from kvindex.subscribe import EventStream, RankStatus, ReplayPolicy, SocketOptions, State, Worker
from kvindex.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    EventBatch,
    GroupSpec,
)

__version__ = "0.1.0"

__all__ = [
    "BACKEND",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "BusyError",
    "CacheSettings",
    "Client",
    "ClosedError",
    "ConfigurationError",
    "Curve",
    "DecodeError",
    "EncodeError",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "EventStream",
    "GroupSpec",
    "InUseError",
    "Index",
    "InvariantError",
    "KVEventsConfig",
    "KVIndexError",
    "Match",
    "NotLiveError",
    "NullEventPublisher",
    "PeerDiedError",
    "QueueClosedError",
    "QueueTimeoutError",
    "Rank",
    "RankMatch",
    "RankStatus",
    "ReaderDiedError",
    "ReaderEvictedError",
    "ReplayPolicy",
    "SegmentError",
    "SnapshotError",
    "SocketOptions",
    "State",
    "TokenError",
    "UnknownRankError",
    "WaitCancelledError",
    "Worker",
    "WriterDiedError",
    "ZmqEventPublisher",
    "connect",
]
