"""Receive every rank's batches in order, whole, and from the right publisher.

One thread owns all sockets. `sequencer/` decides on order, gaps and restarts without a socket or a
clock; `discovery/` finds the engines. This room does not use the index: whoever creates a
subscriber passes it a sink.
Read first: `sequencer/__init__.py`, then `feed.py` and `subscriber_thread.py`.
May import: `kvindex.wire`.
"""

from kvindex.subscribe.connection import SocketOptions
from kvindex.subscribe.delivery import (
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
from kvindex.subscribe.event_stream import EventStream
from kvindex.subscribe.following import Following
from kvindex.subscribe.resumption import SavedRanks
from kvindex.subscribe.sequencer import (
    RankBatch,
    RankLost,
    RankRestarted,
    ReplayPolicy,
    SequencerConfig,
    State,
)
from kvindex.subscribe.subscriber import StreamOptions, Subscriber
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
    "StreamOptions",
    "Subscriber",
    "Tap",
    "Worker",
]
