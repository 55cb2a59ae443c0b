"""Where the KV lies: another rank that holds more of a prompt than the chosen one."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from kvindex.index import Hits
from kvindex.wire.rank import Rank

if TYPE_CHECKING:
    from kvindex.routing.policies import Candidates


class KvSource(NamedTuple):
    """A rank from which the chosen one may pull KV, rather than compute it.

    Attributes:
        rank: the rank that holds it.
        tokens: tokens of the prompt that it holds, as its events say.
        more: how many more these are than the chosen rank holds.
        by_tier: those on its "device", on its "host", in its "storage".
    """

    rank: Rank
    tokens: int
    more: int
    by_tier: dict[str, int]

    @property
    def why(self) -> str:
        """Why this rank, in words."""
        return f"{self.rank} holds {self.tokens} tokens, {self.more} more than the chosen rank"

    def was_pulled(self, cached_tokens: int | None) -> bool | None:
        """Return whether the engine found what it was to pull; None if it did not report.

        At least half of it counts. It may as well have come with another request meanwhile.

        Examples:
            >>> source = KvSource(Rank("a"), tokens=4096, more=4000, by_tier={})
            >>> source.was_pulled(4096), source.was_pulled(96), source.was_pulled(None)
            (True, False, None)
        """
        if cached_tokens is None:
            return None
        return 2 * (self.tokens - cached_tokens) <= self.more


class Holders(NamedTuple):
    """The ranks that a request's KV could be pulled from.

    Attributes:
        hits: what each holds by its events; predicted tokens may still be computed there.
        usable: a byte for each rank: 0 where a filter other than `Capacity` refuses it.
        min_tokens: how many more tokens a source has to hold than the rank that pulls.
    """

    hits: Hits
    usable: bytes | bytearray
    min_tokens: int

    def held(self) -> list[int]:
        """Return the tokens that each rank could give. O(ranks)."""
        return [t if ok else 0 for t, ok in zip(self.hits.tokens, self.usable, strict=True)]

    def source(self, candidates: Candidates, row: int) -> KvSource | None:
        """Return where the rank of a row may pull from: the least busy of those with most.

        None if nobody has enough more than it. O(ranks).
        """
        held, own = self.held(), candidates.hits.tokens[row]
        most = max(held, default=0)
        if most - own < self.min_tokens:
            return None
        opened = candidates.loads.open
        best = min((i for i, t in enumerate(held) if t == most), key=opened.__getitem__)
        device, host = self.hits.device[best], self.hits.host[best]
        tiers = {"device": device, "host": host - device, "storage": most - host}
        return KvSource(candidates.ranks[best], most, most - own, tiers)

    def discounted(self, candidates: Candidates, pull_rate: float) -> Candidates:
        """Return candidates as if a token that can be pulled cost only the time of that.

        `pull_rate` is in tokens per second. So of each such token a part counts as held. O(ranks).
        """
        saved, held = 1.0 - candidates.prefill_rate / pull_rate, self.held()
        most, hits = max(held, default=0), candidates.hits
        if saved <= 0.0 or most < self.min_tokens:
            return candidates
        missing = (most - tokens for tokens in hits.tokens)
        part = [int(saved * more) if more >= self.min_tokens else 0 for more in missing]
        device, host, tokens = (
            array("q", (t + p for t, p in zip(column, part, strict=True))) for column in hits[:3]
        )
        return candidates._replace(hits=hits._replace(device=device, host=host, tokens=tokens))
