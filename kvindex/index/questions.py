"""A question to an index: the options of `match` and its like, checked and in canonical form."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Final, NamedTuple, TypedDict

from kvindex.index.tokens import ExtraKeys, Lora, pack_extra
from kvindex.wire.errors import ConfigurationError
from kvindex.wire.quirks import fold_medium
from kvindex.wire.rank import Rank
from kvindex.wire.rank_lookup import RankName, RankNames, find_ranks

_FEW_NAMES: Final = 4  # to find more, a table of all names is quicker


class MatchOptions(TypedDict, total=False):
    """The keyword options of `match`, `match_many` and `explain`, of an index and of a client.

    Functions that pass options on can take `**options: Unpack[MatchOptions]`.

    Attributes:
        lora: LoRA adapter name (or numeric id, for engines that send no name).
        salt: cache salt of the request.
        extra_keys: for each block, what its identity covers besides tokens, in the engine's
            form (e.g. `[None, [("image-digest", 3)]]`); missing blocks have none.
        media: count only blocks on these media, e.g. "GPU"; any medium by default.
        ranks: answer for these ranks only; all by default. "a/0" stands for `Rank("a", 0)`, "a"
            for all ranks of worker a.
        block_size: look at ranks with this block size only. While the size of some rank is not
            known yet, a size that no rank has gives an empty answer.
        recomputed: so many tokens at the end of the prompt do not take part, because the engine
            computes them in any case: as if they were cut off, but nothing is copied.
    """

    lora: Lora
    salt: str | None
    extra_keys: ExtraKeys | None
    media: Iterable[str] | str | None
    ranks: Iterable[RankName] | str | None
    block_size: int | None
    recomputed: int


class Question(NamedTuple):
    """Checked `MatchOptions` in canonical form."""

    lora: Lora  # None for none, however that was spelled
    extras: list[bytes]  # canonical, by block, salt included, as far as any block has some
    media: frozenset[str] | None  # folded names
    ranks: list[Rank] | None
    block_size: int | None
    recomputed: int
    sizes_matter: bool  # whether extra keys were given for blocks of a size that was not


def read_question(
    known: Collection[Rank],
    *,
    lora: Lora = None,
    salt: str | None = None,
    extra_keys: ExtraKeys | None = None,
    media: Iterable[str] | str | None = None,
    ranks: Iterable[RankName] | str | None = None,
    block_size: int | None = None,
    recomputed: int = 0,
) -> Question:
    """Return the question that `MatchOptions` ask an index with these ranks.

    Options that could match nothing, whatever is resident, are refused.
    """
    folded: frozenset[str] | None = None
    if media is not None:
        names = [media] if isinstance(media, str) else list(media)
        if not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"media must be names such as 'GPU', not {media!r}")
        folded = frozenset(map(fold_medium, names))
        if not folded:
            raise ConfigurationError("media is empty: name at least one medium, or leave it out")
    if not isinstance(lora, (str, int, type(None))) or isinstance(lora, bool):
        raise ConfigurationError(f"lora must be a name or a numeric id, not {lora!r}")
    if not isinstance(salt, (str, type(None))):
        raise ConfigurationError(f"salt must be a string, not {salt!r}")
    if block_size is not None and not (isinstance(block_size, int) and block_size > 0):
        raise ConfigurationError(f"block_size must be 1 token or more, not {block_size!r}")
    check_recomputed(recomputed)
    extras: list[bytes] = []
    if extra_keys is not None or salt:
        # The salt stands with the first block, so that there must be one.
        extras = [
            pack_extra(items, lora=lora, salt=salt if block == 0 else None)
            for block, items in enumerate(list(extra_keys or ()) or [None])
        ]
    return Question(
        lora=lora or None,
        extras=extras,
        media=folded,
        ranks=None if ranks is None else wanted_ranks(ranks, known),
        block_size=block_size,
        recomputed=recomputed,
        sizes_matter=extra_keys is not None and block_size is None,
    )


def check_recomputed(recomputed: object) -> None:
    """Reject a value that is no number of tokens."""
    if not (isinstance(recomputed, int) and recomputed >= 0):
        raise ConfigurationError(f"recomputed must be 0 tokens or more, not {recomputed!r}")


def check_block_size(wanted: int | None, sizes: Collection[int]) -> None:
    """Reject a block size that no rank has, once every rank's is known (0: unknown)."""
    # A rank that has stored nothing yet may come to have any size.
    if wanted is None or not sizes or 0 in sizes or wanted in sizes:
        return
    known = ", ".join(map(str, sorted(set(sizes))))
    raise ConfigurationError(f"no rank has block_size={wanted}; the ranks' block sizes: {known}")


def check_extra_keys(question: Question, sizes: Collection[int]) -> None:
    """Reject extra keys whose blocks could be of several sizes."""
    if question.sizes_matter and len(sizes) > 1:
        raise ConfigurationError(
            f"extra_keys are per block, and the index holds block sizes {sorted(sizes)}: "
            "say which with block_size="
        )


def wanted_ranks(ranks: Iterable[RankName] | str, known: Collection[Rank]) -> list[Rank]:
    """Return the ranks that a query names; raises UnknownRankError for a text that is none's."""
    # One Rank is a tuple of its two parts, and would be read as two ranks.
    if isinstance(ranks, tuple) and any(isinstance(rank, int) for rank in ranks):
        raise ConfigurationError(f"ranks takes several ranks: give [{ranks!r}]")
    names = [ranks] if isinstance(ranks, str) else list(ranks)
    many = sum(isinstance(name, str) for name in names) > _FEW_NAMES
    find = RankNames(known).find if many else partial(find_ranks, known=known)
    return [rank for name in names for rank in (find(name) if isinstance(name, str) else [name])]
