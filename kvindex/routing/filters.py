"""Filters: which ranks may be chosen for a request at all. All given filters must agree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from kvindex.index import Lora
from kvindex.routing.loads import LoadColumns
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.rank import Rank

__all__ = ["Asked", "Capacity", "Filter", "Labels", "LoraLoaded", "OnlyLive", "Prefer"]


class Asked(NamedTuple):
    """The request and the ranks about which a filter decides.

    Attributes:
        ranks: the ranks, sorted.
        live: a byte for each rank: 0 if it is not live.
        loads: each rank's load.
        prompt_tokens: tokens of the prompt.
        lora: the request's adapter.
        labels: the labels that the request wants.
    """

    ranks: Sequence[Rank]
    live: bytes | bytearray
    loads: LoadColumns
    prompt_tokens: int
    lora: Lora
    labels: Mapping[str, str]


_Value = TypeVar("_Value")
ByRank: TypeAlias = Mapping[Rank, _Value] | Mapping[str, _Value]


def _told(table: ByRank[_Value], rank: Rank) -> list[_Value]:
    """Return the values given for a rank's worker and for the rank, by any of its names."""
    entries: Mapping[Any, _Value] = table
    return [entries[name] for name in _names(rank) if name in entries]


@lru_cache(maxsize=4_096)
def _names(rank: Rank) -> tuple[str, str, Rank]:
    return rank.worker, str(rank), rank


class Filter(Protocol):
    """Decides which ranks may be chosen. Called under the router's lock, so it must be quick."""

    @property
    def name(self) -> str:
        """Its name in errors and statistics."""

    def keeps(self, asked: Asked) -> Iterable[object]:
        """Return for each rank whether it may be chosen (by its truth)."""


class Labels:
    """Keeps the ranks that have all labels that the request asks for (`labels=`).

    Args:
        labels: the labels of ranks, read at each request. A rank may be given as text; a worker's
            name stands for all its ranks, and each may have labels of its own, too.

    Examples:
        >>> zones = Labels({"vllm-0": {"gpu": "h100"}, "vllm-0/1": {"zone": "b"}})
    """

    name = "labels"

    def __init__(self, labels: ByRank[Mapping[str, str]]) -> None:
        self._labels = labels

    def keeps(self, asked: Asked) -> Iterable[object]:
        """See `Filter`."""
        wanted = asked.labels.items()
        if not wanted:
            return _all(asked)
        return (wanted <= self._of(rank).items() for rank in asked.ranks)

    def _of(self, rank: Rank) -> Mapping[str, str]:
        told = _told(self._labels, rank)
        if len(told) == 1:
            return told[0]
        return dict(pair for labels in told for pair in labels.items())


class LoraLoaded:
    """Keeps the ranks that have loaded the request's LoRA adapter; all, for a request without one.

    Args:
        loaded: the adapters of ranks, read at each request, so that you may change it. Ranks are
            given as for `Labels`.
    """

    name = "lora"

    def __init__(self, loaded: ByRank[Collection[str | int]]) -> None:
        self._loaded = loaded

    def keeps(self, asked: Asked) -> Iterable[object]:
        """See `Filter`."""
        lora = asked.lora
        if lora is None:
            return _all(asked)
        return (
            any(lora == some or lora in some for some in _told(self._loaded, rank))
            for rank in asked.ranks
        )


class Capacity:
    """Keeps the ranks that have room for one more request.

    Args:
        open_requests: most open requests of a rank.
        queued_tokens: most tokens to prefill of a rank, this prompt's not among them.
        decode_blocks: most blocks of a rank's open requests.

    Raises:
        ConfigurationError: no limit is given.
    """

    name = "capacity"

    def __init__(
        self,
        *,
        open_requests: int | None = None,
        queued_tokens: int | None = None,
        decode_blocks: int | None = None,
    ) -> None:
        limits = (queued_tokens, open_requests, decode_blocks)
        if limits == (None, None, None):
            raise ConfigurationError("give Capacity at least one limit")
        self._limits = [limit if limit is not None else float("inf") for limit in limits]

    def keeps(self, asked: Asked) -> Iterable[object]:
        """See `Filter`."""
        queued, opened, decode = self._limits
        columns = zip(asked.loads.queued, asked.loads.open, asked.loads.decode, strict=True)
        return (q <= queued and o < opened and d <= decode for q, o, d in columns)


class OnlyLive:
    """Keeps the live ranks.

    Without it, a rank that is not live may be chosen, as one that holds nothing.
    """

    name = "live"

    def keeps(self, asked: Asked) -> Iterable[object]:
        """See `Filter`."""
        return asked.live


class Prefer:
    """Keeps the ranks that another filter keeps, or all ranks if that would keep none.

    A router asks it last, so it is a preference among the eligible and connected ranks.

    Examples:
        >>> nearby = Prefer(Labels({"vllm-0": {"zone": "a"}}))
        >>> nearby.name
        'prefer labels'
    """

    def __init__(self, preferred: Filter) -> None:
        self._preferred = preferred
        self.name = f"prefer {preferred.name}"

    def keeps(self, asked: Asked) -> Iterable[object]:
        """See `Filter`."""
        kept = list(map(bool, self._preferred.keeps(asked)))
        return kept if any(kept) else _all(asked)


def _all(asked: Asked) -> bytes:
    return b"\1" * len(asked.ranks)
