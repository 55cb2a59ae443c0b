"""The index: a radix tree over prefix keys, one view for each rank.

It uses neither sockets nor engines: `kvindex.client` feeds an index from engines and adds trust to
its answers, `kvindex.replicas` copies such an index into other processes.
Read first: `api.py` and `match.py`, then `reference/`, the specification of the native core.
May import: `kvindex.wire`.
"""

from typing import TYPE_CHECKING

from kvindex.index.explanation import (
    Ending,
    Explanation,
    GroupHeld,
    OtherPrompts,
    RankExplanation,
)
from kvindex.index.match import Hits, Match, RankMatch, RankRows, Trusts
from kvindex.index.questions import MatchOptions
from kvindex.index.snapshot import (
    Snapshot,
    SnapshotReader,
    SnapshotRecord,
    SnapshotWriter,
    read_snapshot,
    replaced_file,
    write_snapshot,
)
from kvindex.index.tokens import ExtraKeys, Lora, TokenBuffer, TokenIds
from kvindex.index.views import Prefixes, PrefixNode, ResidentBlock, TreeView
from kvindex.wire import Fingerprints
from kvindex.wire.backend import BACKEND
from kvindex.wire.rank import Trust

if TYPE_CHECKING or BACKEND == "native":
    from kvindex.index.native import Index, read_batch
else:
    from kvindex.index.reference import Index
    from kvindex.wire.decode import decode_bounded as read_batch

__all__ = [
    "Ending",
    "Explanation",
    "ExtraKeys",
    "Fingerprints",
    "GroupHeld",
    "Hits",
    "Index",
    "Lora",
    "Match",
    "MatchOptions",
    "OtherPrompts",
    "PrefixNode",
    "Prefixes",
    "RankExplanation",
    "RankMatch",
    "RankRows",
    "ResidentBlock",
    "Snapshot",
    "SnapshotReader",
    "SnapshotRecord",
    "SnapshotWriter",
    "TokenBuffer",
    "TokenIds",
    "TreeView",
    "Trust",
    "Trusts",
    "read_batch",
    "read_snapshot",
    "replaced_file",
    "write_snapshot",
]
