"""The index: a radix tree over prefix keys, one view for each rank."""

from kvindex.index.index import Index, TreeView
from kvindex.index.keys import ExtraKeys
from kvindex.index.labels import ResidentBlock
from kvindex.index.match import Match, RankMatch, Trust

__all__ = ["ExtraKeys", "Index", "Match", "RankMatch", "ResidentBlock", "TreeView", "Trust"]
