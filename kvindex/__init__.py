"""A reliable subscriber of LLM engines' KV-cache events, and the prefix index it feeds.

Connect to the engines, then ask which rank holds a prompt:

    client = kvindex.connect([kvindex.Worker("vllm-0", "tcp://127.0.0.1:5557")])
    client.match(token_ids).best

This module has what most programs need. The packages below it ("rooms" in the docs), from the
engine to the answer:

- `kvindex.publish` publishes events as engines do; `kvindex.wire` knows their bytes;
- `kvindex.subscribe` receives them, in order and whole (`sequencer`), and finds the engines
  (`discovery`);
- `kvindex.index` matches prompts; a `client` feeds an index, and other processes get `replicas`;
- `kvindex.shm` is a queue for your own objects, through shared memory;
- `kvindex.testing` has a fake engine and faulty links for tests;
- `kvindex.routing` chooses a rank for each request, in Ray, LiteLLM and verl too (`adapters`);
- `kvindex.service` is the HTTP service, with its `queries` and `metrics`; `kvindex.gateway` stands
  in front of engines;
- `kvindex.tools` is for operators: the command line (`cli`), the `doctor` (why nothing matches) and
  the `audit` (what routing costs).
"""

from kvindex.client import Client, ClientOptions, connect
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
from kvindex.wire.backend import BACKEND
from kvindex.wire.curve import Curve
from kvindex.wire.errors import (
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
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName

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
    "ClientOptions",
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
