"""The index: a radix tree over prefix keys, one view for each rank."""

from typing import TYPE_CHECKING

from kvindex.backend import BACKEND
from kvindex.index.api import TreeView
from kvindex.index.keys import ExtraKeys
from kvindex.index.labels import ResidentBlock
from kvindex.index.match import Match, RankMatch
from kvindex.rank import Trust

if TYPE_CHECKING or BACKEND == "native":
    from kvindex.index.native import Index, fingerprint, read_batch
else:
    from kvindex.index.reference import Index
    from kvindex.wire import decode_batch as read_batch

    fingerprint = hash

__all__ = [
    "ExtraKeys",
    "Index",
    "Match",
    "RankMatch",
    "ResidentBlock",
    "TreeView",
    "Trust",
    "fingerprint",
    "read_batch",
]
