"""Which publisher of a worker is which dp_rank: by its port, unless its batches say otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

__all__ = ["Claim", "settle"]


class Claim(msgspec.Struct, frozen=True):
    """What is known of one publisher's dp_rank.

    Attributes:
        expected: what its port tells.
        named: what its batches name, None while they have named none.
    """

    expected: int
    named: int | None


def settle(claims: Sequence[Claim]) -> list[int]:
    """Return each publisher's dp_rank: all different, whatever order they have spoken in.

    What a publisher names counts, unless another names the same: then neither is believed and both
    keep their port's. Publishers that have named nothing keep their port's where it is free, and
    get one that is left otherwise.

    Examples:
        >>> settle([Claim(0, None), Claim(1, None)])
        [0, 1]
        >>> settle([Claim(0, 1), Claim(1, None)])
        [1, 0]
        >>> settle([Claim(0, 0), Claim(1, 0)])
        [0, 1]
        >>> settle([Claim(0, 5)])
        [5]
    """
    said = Counter(claim.named for claim in claims if claim.named is not None)
    believed = [
        claim.named if claim.named is not None and said[claim.named] == 1 else None
        for claim in claims
    ]
    doubted = {
        claim.expected
        for claim, dp_rank in zip(claims, believed, strict=True)
        if dp_rank is None and claim.named is not None
    }
    # A port's own rank goes first to publishers whose word was not taken.
    believed = [None if dp_rank in doubted else dp_rank for dp_rank in believed]
    taken = {dp_rank for dp_rank in believed if dp_rank is not None}
    names: list[int | None] = list(believed)
    for i, claim in enumerate(claims):
        if names[i] is None and claim.expected not in taken:
            names[i] = claim.expected
            taken.add(claim.expected)
    left = iter(sorted({claim.expected for claim in claims} - taken))
    return [next(left) if dp_rank is None else dp_rank for dp_rank in names]
