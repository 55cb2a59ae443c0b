"""The gaps in an audit's figures, in words: missing figures are named, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvindex.tools.audit.rank_audit import RankAudit
from kvindex.tools.audit.report import Report

_NAMES = 4  # of ranks in one line
_MANY = 0.15  # of the computed tokens; a prompt's last block alone is less, mostly

# What a rank has of something, and what that means for the figures.
_OF_RANKS: tuple[tuple[Callable[[RankAudit], float], str], ...] = (
    (
        lambda rank: rank.counts["losses"],
        "{ranks} lost batches that no replay returned. What was held until then is unknown "
        "({times}).",
    ),
    (
        lambda rank: rank.counts["restarts"],
        "{ranks} restarted: its cache was empty then ({times}).",
    ),
    (lambda rank: rank.counts["clears"], "{ranks} cleared its cache ({times})."),
    (
        lambda rank: rank.complete is False,
        "{ranks}: the audit has not seen all batches since the engine's first. What was stored in "
        "the others counts as held by nobody.",
    ),
    (
        lambda rank: rank.away,
        "{ranks}: unreachable for up to {most:,.0f} s. Meanwhile nothing counts as held there.",
    ),
    (
        lambda rank: rank.places_unknown,
        "{ranks}: the engine's labels leave out what is before a block (SGLang before 0.5.6): all "
        "its tokens are of unknown prompts.",
    ),
    (
        lambda rank: rank.groups.others_limit_hits,
        "{ranks}: the model has several KV cache groups. The figures follow the one that needs all "
        "blocks; windows or states may have shortened the hits.",
    ),
    (
        lambda rank: rank.groups.kinds_unknown,
        "{ranks}: the kinds of the groups are unknown; use --group.",
    ),
)
_LEFT_OUT = {
    "malformed": "blocks whose stores contradict themselves",
    "partial_block": "blocks that were not full yet",
    "max_blocks_per_rank": "blocks beyond max_blocks_per_rank: computed, but held by nobody",
    "too_many_media": "copies on more media than one block can have",
    "label_ambiguous": "blocks whose label names another block, too",
    "main_group_changed": "times, what was held was dropped: another group of the model counts now",
    "skipped_events": "events of an unknown kind",
}


def trust_lines(report: Report, audits: Sequence[RankAudit]) -> Iterator[str]:
    """Yield what limits the figures of a report, the most important first."""
    if _recorded_apart(audits):
        yield "Some recordings end before others begin: what ended counts as still held."
    for measure, text in _OF_RANKS:
        by_rank = {str(rank.rank): value for rank in audits if (value := measure(rank))}
        if by_rank:
            total = sum(by_rank.values())
            times = "once" if total == 1 else f"{total:.0f} times"
            yield text.format(ranks=_named(list(by_rank)), times=times, most=max(by_rank.values()))
    tokens = report.tokens
    if tokens.unknown:
        yield (
            f"{tokens.unknown:,} of {tokens.computed:,} computed tokens "
            f"({tokens.unknown / tokens.computed:.1%}) follow a block that the audit never saw: "
            "their holders are unknown."
        )
    if tokens.here > _MANY * tokens.computed:
        yield (
            f"{tokens.here / tokens.computed:.1%} of the computed tokens were stored although the "
            'rank held them. If requests set kv_cache_report_mode to "full", they were announced '
            "and not computed: use --report-mode full."
        )
    if forgotten := sum(rank.evicted_forgotten for rank in report.ranks):
        kept = sum(rank.evicted_known for rank in report.ranks)
        yield (
            f"{forgotten:,} evicted blocks were forgotten for newer ones ({kept:,} are remembered)"
            ": more tokens may have been evicted before."
        )
    for name, what in _LEFT_OUT.items():
        if count := sum(rank.counts[name] for rank in audits):
            yield f"Left out: {count:,} {what}."
    yield (
        "Events do not distinguish prompts from generated tokens: both are computed. A request's "
        "last tokens that fill no block are never reported."
    )


def _recorded_apart(audits: Sequence[RankAudit]) -> bool:
    spans = [audit.received for audit in audits if audit.received is not None and not audit.state]
    return bool(spans) and max(first for first, _ in spans) > min(last for _, last in spans)


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES])
    return shown + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
