"""A reliable subscriber of LLM engines' KV-cache events, and the prefix index it feeds.

Connect to the engines, then ask which rank holds a prompt:

    client = kvindex.connect([kvindex.Worker("vllm-0", "tcp://127.0.0.1:5557")])
    client.match(token_ids).best

This module has what most programs need. Import the other parts by name:

- `kvindex.routing` chooses a rank for each request; `kvindex.integrations` does so in Ray, LiteLLM
  and verl;
- `kvindex.discovery` finds engines; `kvindex.doctor` says why nothing matches;
- `kvindex.fanout` gives every process of a router a replica of one index, through a ring in shared
  memory; `kvindex.shm` is a queue for your own objects on such a ring;
- `kvindex.server` is the HTTP service, with `kvindex.queries` and `kvindex.metrics`;
- `kvindex.audit` says what routing costs, from recorded or live events;
- `kvindex.testing` has a fake engine and faulty links for tests.
"""

from kvindex.backend import BACKEND
from kvindex.client import Client, connect
from kvindex.curve import Curve
from kvindex.errors import (
    BusyError,
    ClosedError,
    ConfigurationError,
    DecodeError,
    DiscoveryError,
    DuplicatePublisherError,
    EncodeError,
    InUseError,
    InvariantError,
    KVIndexError,
    NotLiveError,
    SnapshotError,
    TokenError,
    UnknownRankError,
)
from kvindex.index import (
    Ending,
    Explanation,
    ExtraKeys,
    GroupHeld,
    Hits,
    Index,
    Lora,
    Match,
    MatchOptions,
    OtherPrompts,
    Prefixes,
    PrefixNode,
    RankExplanation,
    RankMatch,
    RankRows,
    ResidentBlock,
    TokenBuffer,
    TokenIds,
    TreeView,
    Trust,
    Trusts,
)
from kvindex.publish import (
    EventPublisher,
    EventPublisherFactory,
    KVEventsConfig,
    NullEventPublisher,
    ZmqEventPublisher,
)
from kvindex.rank import Rank
from kvindex.rank_lookup import RankName
from kvindex.subscribe import (
    EventStream,
    PublisherAddress,
    RankAdded,
    RankBatch,
    RankLost,
    RankRemoved,
    RankRestarted,
    RanksRenamed,
    RankStatus,
    ReplayPolicy,
    SocketOptions,
    State,
    StreamItem,
    Subscriber,
    Worker,
)
from kvindex.wire import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    Dialect,
    Event,
    EventBatch,
    GroupSpec,
)

__version__ = "0.1.0"

__all__ = [
    "BACKEND",
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "BusyError",
    "CacheSettings",
    "Client",
    "ClosedError",
    "ConfigurationError",
    "Curve",
    "DecodeError",
    "Dialect",
    "DiscoveryError",
    "DuplicatePublisherError",
    "EncodeError",
    "Ending",
    "Event",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "EventStream",
    "Explanation",
    "ExtraKeys",
    "GroupHeld",
    "GroupSpec",
    "Hits",
    "InUseError",
    "Index",
    "InvariantError",
    "KVEventsConfig",
    "KVIndexError",
    "Lora",
    "Match",
    "MatchOptions",
    "NotLiveError",
    "NullEventPublisher",
    "OtherPrompts",
    "PrefixNode",
    "Prefixes",
    "PublisherAddress",
    "Rank",
    "RankAdded",
    "RankBatch",
    "RankExplanation",
    "RankLost",
    "RankMatch",
    "RankName",
    "RankRemoved",
    "RankRestarted",
    "RankRows",
    "RankStatus",
    "RanksRenamed",
    "ReplayPolicy",
    "ResidentBlock",
    "SnapshotError",
    "SocketOptions",
    "State",
    "StreamItem",
    "Subscriber",
    "TokenBuffer",
    "TokenError",
    "TokenIds",
    "TreeView",
    "Trust",
    "Trusts",
    "UnknownRankError",
    "Worker",
    "ZmqEventPublisher",
    "connect",
]
