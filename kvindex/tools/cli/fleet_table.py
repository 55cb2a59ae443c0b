"""A fleet as rows and lines of text: what `kvindex top` shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kvindex import State
from kvindex.service.overview import Fleet, RankView, Totals
from kvindex.tools.cli.output import counted, in_options, printable

__all__ = ["HEADER", "SORTS", "reasons", "row", "sorted_ranks", "totals_line"]

_MOST_MISSING: Final = 5

SORTS: Final[Mapping[str, str]] = {
    "state": "s",
    "name": "n",
    "lag": "l",
    "age": "a",
    "blocks": "b",
    "gaps": "g",
    "losses": "o",
    "restarts": "e",
}
"""What ranks can be sorted by, and the key for it."""

_WORST = [State.LIVE, State.SYNCING, State.STALE, State.REPAIRING, State.CONNECTING, State.CLOSED]
_Key: TypeAlias = Callable[[RankView], Any]
_KEYS: Final[Mapping[str, _Key]] = {
    "state": lambda rank: (_WORST.index(State(rank.state)), not rank.complete),
    "lag": lambda rank: rank.lag,
    "age": lambda rank: float("inf") if rank.last_event_age is None else rank.last_event_age,
    "blocks": lambda rank: sum(rank.blocks.values()),
    "gaps": lambda rank: rank.gaps,
    "losses": lambda rank: rank.losses,
    "restarts": lambda rank: rank.restarts,
}

HEADER: Final = (
    *("rank", "model", "state", "complete", "lag", "idle s"),
    *("blocks", "gaps", "losses", "restarts"),
)


def sorted_ranks(
    ranks: Sequence[RankView], sort: str = "state", *, reverse: bool = False
) -> list[RankView]:
    """Return ranks with the worst, most or longest first; by name, from the beginning.

    Args:
        ranks: of a fleet.
        sort: one of SORTS.
        reverse: the other way round.
    """
    found = sorted(ranks, key=lambda rank: (rank.worker, rank.dp_rank))
    if sort != "name":
        found.sort(key=_KEYS[sort], reverse=True)
    return found[::-1] if reverse else found


def totals_line(totals: Totals) -> str:
    """Return the sums in one line.

    Examples:
        >>> from kvindex import connect
        >>> from kvindex.service.overview import overview
        >>> with connect() as client:
        ...     print(totals_line(overview(client).totals))
        0 ranks of 0 workers: none live, 0 complete; 0 blocks; lag 0; 0 gaps, 0 losses, 0 restarts
    """
    states = ", ".join(f"{number} {state}" for state, number in totals.states.items())
    media = ", ".join(f"{number:,} {medium}" for medium, number in sorted(totals.blocks.items()))
    return printable(
        f"{counted(totals.ranks, 'rank')} of {counted(totals.workers, 'worker')}: "
        f"{states or 'none live'}, {totals.complete} complete; "
        f"{media or '0'} blocks; lag {totals.lag}; "
        f"{counted(totals.gaps, 'gap')}, {counted(totals.losses, 'loss', 'losses')}, "
        f"{counted(totals.restarts, 'restart')}"
    )


def row(rank: RankView) -> tuple[str, ...]:
    """Return the cells of a rank, as HEADER names them; text that cannot steer a terminal."""
    media = ", ".join(f"{number} {medium}" for medium, number in sorted(rank.blocks.items()))
    cells = (
        f"{rank.worker}/{rank.dp_rank}",
        rank.model or "-",
        rank.state,
        "yes" if rank.complete else "no",
        rank.lag,
        "-" if rank.last_event_age is None else f"{rank.last_event_age:.0f}",
        media or "-",
        rank.gaps,
        rank.losses,
        rank.restarts,
    )
    return tuple(printable(str(cell)) for cell in cells)


def reasons(fleet: Fleet, ranks: Iterable[RankView]) -> list[str]:
    """Return a line for each engine that was not found, and for each reason of some ranks.

    Reasons that differ in numbers and in the rank's own addresses only count as the same.
    """
    missing = [f"not found: {name}: {why}" for name, why in fleet.missing.items()]
    lines = missing[:_MOST_MISSING]
    if len(missing) > len(lines):
        lines.append(f"not found: {len(missing) - len(lines)} more")
    groups: dict[str, list[RankView]] = {}
    for rank in ranks:
        if rank.reason:
            common = rank.reason.replace(rank.endpoint, "").replace(
                rank.replay_endpoint or "\0", ""
            )
            groups.setdefault(re.sub(r"\d+", "#", common), []).append(rank)
    for first, *others in groups.values():
        more = f" and {counted(len(others), 'more rank')}" if others else ""
        lines.append(f"{first.worker}/{first.dp_rank}{more}: {in_options(first.reason)}")
    return [printable(line) for line in lines]
