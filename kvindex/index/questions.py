"""Checks of a question's arguments, and their canonical forms."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Final, TypedDict

from kvindex.index.keys import ExtraKeys, Lora, pack_extra
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.quirks import fold_medium
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, RankNames, find_ranks

__all__ = [
    "MatchOptions",
    "ambiguous_extras",
    "check_block_size",
    "check_options",
    "check_recomputed",
    "folded_media",
    "packed_extras",
    "wanted_ranks",
]


_FEW_NAMES: Final = 4  # to find more, a table of all names is quicker


class MatchOptions(TypedDict, total=False):
    """The keyword options of `Index.match` and `Client.match`, which say what each one means.

    Functions that pass options on can take `**options: Unpack[MatchOptions]`.
    """

    lora: Lora
    salt: str | None
    extra_keys: ExtraKeys | None
    media: Iterable[str] | str | None
    ranks: Iterable[RankName] | str | None
    block_size: int | None
    recomputed: int


def check_options(lora: object, salt: object, block_size: object, recomputed: object) -> None:
    """Reject options that could match nothing, whatever is resident."""
    if not isinstance(lora, (str, int, type(None))) or isinstance(lora, bool):
        raise ConfigurationError(f"lora must be a name or a numeric id, not {lora!r}")
    if not isinstance(salt, (str, type(None))):
        raise ConfigurationError(f"salt must be a string, not {salt!r}")
    if block_size is not None and not (isinstance(block_size, int) and block_size > 0):
        raise ConfigurationError(f"block_size must be 1 token or more, not {block_size!r}")
    check_recomputed(recomputed)


def check_recomputed(recomputed: object) -> None:
    """Reject a value that is no number of tokens."""
    if not (isinstance(recomputed, int) and recomputed >= 0):
        raise ConfigurationError(f"recomputed must be 0 tokens or more, not {recomputed!r}")


def check_block_size(asked: int | None, sizes: Collection[int]) -> None:
    """Reject a block size that no rank has, once every rank's is known (0: unknown)."""
    if asked is None or not sizes or 0 in sizes or asked in sizes:
        return
    known = ", ".join(map(str, sorted(set(sizes))))
    raise ConfigurationError(f"no rank has block_size={asked}; the ranks' block sizes: {known}")


def folded_media(media: Iterable[str] | str | None) -> frozenset[str] | None:
    """Return the media that count, by their folded names; None for all."""
    if media is None:
        return None
    names = [media] if isinstance(media, str) else list(media)
    if not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"media must be names such as 'GPU', not {media!r}")
    folded = frozenset(map(fold_medium, names))
    if not folded:
        raise ConfigurationError("media is empty: name at least one medium, or leave it out")
    return folded


def packed_extras(extra_keys: ExtraKeys | None, lora: Lora, salt: str | None) -> list[bytes]:
    """Return the canonical extra keys of a query's blocks, as far as any has some."""
    if extra_keys is None and not salt:
        return []
    items = list(extra_keys or [None])
    return [
        pack_extra(item, lora=lora, salt=salt if position == 0 else None)
        for position, item in enumerate(items or [None])
    ]


def ambiguous_extras(sizes: Iterable[int]) -> ConfigurationError:
    """Return the error for extra keys whose blocks could be of several sizes."""
    return ConfigurationError(
        f"extra_keys are per block, and the index holds block sizes {sorted(sizes)}: "
        "say which with block_size="
    )


def wanted_ranks(ranks: Iterable[RankName] | str, known: Collection[Rank]) -> list[Rank]:
    """Return the ranks that a query asks for; raises UnknownRankError for a text that is none's."""
    if isinstance(ranks, tuple) and any(isinstance(rank, int) for rank in ranks):
        raise ConfigurationError(f"ranks takes several ranks: give [{ranks!r}]")
    names = [ranks] if isinstance(ranks, str) else list(ranks)
    many = sum(isinstance(name, str) for name in names) > _FEW_NAMES
    find = RankNames(known).find if many else partial(find_ranks, known=known)
    return [rank for name in names for rank in (find(name) if isinstance(name, str) else [name])]
