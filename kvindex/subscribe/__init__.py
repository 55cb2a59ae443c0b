"""Receiving every rank's batches in order, whole, and from the right publisher."""

from kvindex.sequencer import (
    RankBatch,
    RankLost,
    RankRestarted,
    ReplayPolicy,
    SequencerConfig,
    State,
)
from kvindex.subscribe.connection import SocketOptions
from kvindex.subscribe.event_stream import EventStream
from kvindex.subscribe.following import Following
from kvindex.subscribe.resumption import SavedRanks
from kvindex.subscribe.stream import (
    BatchSink,
    Decode,
    DecodedBatch,
    FingerprintMaker,
    RankAdded,
    RankRemoved,
    RanksRenamed,
    RankStatus,
    Sink,
    StreamItem,
    Tap,
)
from kvindex.subscribe.subscriber import Subscriber
from kvindex.subscribe.worker import PublisherAddress, Worker

__all__ = [
    "BatchSink",
    "Decode",
    "DecodedBatch",
    "EventStream",
    "FingerprintMaker",
    "Following",
    "PublisherAddress",
    "RankAdded",
    "RankBatch",
    "RankLost",
    "RankRemoved",
    "RankRestarted",
    "RankStatus",
    "RanksRenamed",
    "ReplayPolicy",
    "SavedRanks",
    "SequencerConfig",
    "Sink",
    "SocketOptions",
    "State",
    "StreamItem",
    "Subscriber",
    "Tap",
    "Worker",
]
