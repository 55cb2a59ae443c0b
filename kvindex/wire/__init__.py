"""Bytes to events and back, and what every room shares: errors, ranks, CURVE keys, forks, HTTP.

`decode_batch` reads what any engine version sends, `encode_batch` writes as a chosen one does. Both
use neither sockets nor clocks nor the index. `backend.py` says whether the compiled `_native` runs.
Read first: `dialect.py` (what each engine release sends), then `events.py` and `decode.py`.
May import: no other room.
"""

from kvindex.wire.decode import decode_batch
from kvindex.wire.dialect import DIALECTS, LATEST, Dialect, dialect, encode_batch
from kvindex.wire.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheSettings,
    Event,
    EventBatch,
    GroupSpec,
)
from kvindex.wire.fingerprints import Fingerprints
from kvindex.wire.frames import (
    END_SEQ,
    LiveFrame,
    RecordedMessage,
    RecordingWriter,
    ReplayReply,
    live_frames,
    parse_live,
    parse_replay,
    parse_replay_request,
    read_recording,
    replay_end,
    replay_frames,
    replay_request,
)
from kvindex.wire.quirks import text_token

__all__ = [
    "DIALECTS",
    "END_SEQ",
    "LATEST",
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "CacheSettings",
    "Dialect",
    "Event",
    "EventBatch",
    "Fingerprints",
    "GroupSpec",
    "LiveFrame",
    "RecordedMessage",
    "RecordingWriter",
    "ReplayReply",
    "decode_batch",
    "dialect",
    "encode_batch",
    "live_frames",
    "parse_live",
    "parse_replay",
    "parse_replay_request",
    "read_recording",
    "replay_end",
    "replay_frames",
    "replay_request",
    "text_token",
]
