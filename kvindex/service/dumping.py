"""GET /dump: what the index holds, as lines of JSON for people and their tools.

It is not Dynamo's dump: that names blocks by the hashes of their tokens, which kvindex does not
keep. `GET /snapshot` is what another server starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from kvindex import UnknownRankError
from kvindex.service.catalog import Partition
from kvindex.service.service import Service

__all__ = ["MOST_BLOCKS", "dump"]

MOST_BLOCKS: Final = 10_000
"""Blocks of each rank that are listed unless asked otherwise."""

_LINES = 500  # in one piece

_encoder = msgspec.json.Encoder()


def dump(service: Service, most_blocks: int = MOST_BLOCKS) -> Iterator[bytes]:
    """Yield pieces of lines: for each registered rank one line about it, then one for each block.

    A block's line has its engine's own label (`block_hash`: an integer, or the hex of bytes), its
    `depth` in its prompt, and where it is. `blocks` of the rank's line counts them all, `listed`
    those that follow: at most `most_blocks`.

    Complexity: O(blocks of the ranks): each rank is copied when its turn comes.

    Thread safety: any thread.
    """
    for partition in service.catalog.partitions:
        ranks = service.ranks_of(partition)
        for rank in () if ranks is None else ranks.rows:
            try:
                tree = service.source.index.tree(rank)
                blocks = tree.walk()
                head = _head(partition, str(rank), len(tree), min(len(tree), most_blocks))
            except UnknownRankError:
                continue  # unregistered just now
            yield head
            lines = (_encoder.encode(_line(block)) + b"\n" for block in islice(blocks, most_blocks))
            while piece := b"".join(islice(lines, _LINES)):
                yield piece


def _head(partition: Partition, rank: str, blocks: int, listed: int) -> bytes:
    about = {
        "model": partition.model,
        "routing_group": partition.routing_group,
        "rank": rank,
        "blocks": blocks,
        "listed": listed,
    }
    return _encoder.encode(about) + b"\n"


def _line(block: msgspec.Struct) -> dict[str, object]:
    line = msgspec.structs.asdict(block)
    if isinstance(line["block_hash"], bytes):
        line["block_hash"] = line["block_hash"].hex()
    return line
