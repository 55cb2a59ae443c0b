"""The index: a radix tree over prefix keys, one view for each rank."""

from kvindex.index.groups import GroupSpec
from kvindex.index.index import Index, TreeView
from kvindex.index.match import Match, RankMatch, Trust
from kvindex.index.rank_blocks import ResidentBlock

__all__ = ["GroupSpec", "Index", "Match", "RankMatch", "ResidentBlock", "TreeView", "Trust"]
