"""The gaps in an audit's figures, in words: missing figures are named, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvindex.tools.audit.report import RankReport, Report

__all__ = ["trust_lines"]

_NAMES = 4  # of ranks in one line
_MANY = 0.15  # of the computed tokens; a prompt's last block alone is less, mostly

_LEFT_OUT = {
    "malformed": "blocks whose stores contradict themselves",
    "partial_block": "blocks that were not full yet",
    "max_blocks_per_rank": "blocks beyond max_blocks_per_rank: computed, but held by nobody",
    "too_many_media": "copies on more media than one block can have",
    "label_ambiguous": "blocks whose label names another block, too",
    "main_group_changed": "times, what was held was dropped: another group of the model counts now",
    "skipped_events": "events of an unknown kind",
}


def trust_lines(
    report: Report, hybrid: Sequence[str], unknown_kinds: Sequence[str], placeless: Sequence[str]
) -> list[str]:
    """Return what limits the figures, the most important first.

    Args:
        report: the figures.
        hybrid: ranks whose model has several KV cache groups.
        unknown_kinds: those of which the groups' kinds are not known.
        placeless: ranks whose engine's labels leave out what is before a block.
    """
    lines = [*_of_streams(report.ranks), *_of_unknown(report, placeless)]
    if hybrid:
        lines.append(
            f"{_named(hybrid)}: the model has several KV cache groups. The figures follow the one "
            "that needs all blocks; windows or states may have shortened the hits."
        )
    if unknown_kinds:
        lines.append(f"{_named(unknown_kinds)}: the kinds of the groups are unknown; use --group.")
    forgotten = sum(rank.evicted_forgotten for rank in report.ranks)
    if forgotten:
        kept = sum(rank.evicted_known for rank in report.ranks)
        lines.append(
            f"{forgotten:,} evicted blocks were forgotten for newer ones ({kept:,} are remembered)"
            ": more tokens may have been evicted before."
        )
    lines += _of_left_out(report.ranks)
    lines.append(
        "Events do not distinguish prompts from generated tokens: both are computed. A request's "
        "last tokens that fill no block are never reported."
    )
    return lines


def _of_streams(ranks: Sequence[RankReport]) -> list[str]:
    lines = []
    for name, what in (
        (
            "losses",
            "lost batches that no replay returned. What was held until then is unknown",
        ),
        ("restarts", "restarted: its cache was empty then"),
        ("clears", "cleared its cache"),
    ):
        those = _which(ranks, lambda rank, name=name: bool(rank.counts.get(name)))  # type: ignore[misc]
        if those:
            times = sum(rank.counts.get(name, 0) for rank in ranks)
            lines.append(f"{_named(those)} {what} ({_times(times)}).")
    partial = _which(ranks, lambda rank: rank.complete is False)
    if partial:
        lines.append(
            f"{_named(partial)}: the audit has not seen all batches since the engine's first. What "
            "was stored in the others counts as held by nobody."
        )
    away = [rank for rank in ranks if rank.away]
    if away:
        seconds = max(rank.away for rank in away)
        lines.append(
            f"{_named([rank.rank for rank in away])}: unreachable for up to {seconds:,.0f} s. "
            "Meanwhile nothing counts as held there."
        )
    return lines


def _of_unknown(report: Report, placeless: Sequence[str]) -> list[str]:
    lines = []
    if placeless:
        lines.append(
            f"{_named(placeless)}: the engine's labels leave out what is before a block (SGLang "
            "before 0.5.6): all its tokens are of unknown prompts."
        )
    tokens = report.tokens
    if tokens.unknown:
        lines.append(
            f"{tokens.unknown:,} of {tokens.computed:,} computed tokens "
            f"({tokens.unknown / tokens.computed:.1%}) follow a block that the audit never saw: "
            "their holders are unknown."
        )
    if tokens.here > _MANY * tokens.computed:
        lines.append(
            f"{tokens.here / tokens.computed:.1%} of the computed tokens were stored although the "
            'rank held them. If requests set kv_cache_report_mode to "full", they were announced '
            "and not computed: use --report-mode full."
        )
    return lines


def _of_left_out(ranks: Sequence[RankReport]) -> list[str]:
    lines = []
    for name, what in _LEFT_OUT.items():
        count = sum(rank.counts.get(name, 0) for rank in ranks)
        if count:
            lines.append(f"Left out: {count:,} {what}.")
    return lines


def _which(ranks: Sequence[RankReport], condition: Callable[[RankReport], bool]) -> list[str]:
    return [rank.rank for rank in ranks if condition(rank)]


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
