"""An examination's results, as a value and as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from kvindex.tools.doctor.causes import CAUSES, SECTIONS
from kvindex.tools.doctor.finding import Finding

__all__ = ["Examined", "Report", "ordered"]

_SEVERITIES: Final = ("error", "warning", "info")
_ORDER: Final = {kind: place for place, kind in enumerate(CAUSES)}

# What follows from other findings, and is not worth a line beside them.
_TEST: Final = frozenset(
    {
        "silent-while-serving",
        "index-misses",
        "index-and-engine-miss",
        "caches-unpublished",
        "nothing-cached",
    }
)
_LEFT_OUT: Final = frozenset({"stream-incomplete", "blocks-left-out"})
_STREAM: Final = _LEFT_OUT | {"stream-not-live", "replay-running"}
_PORTS: Final = frozenset(kind for kind, section in SECTIONS.items() if section == "ports")
_EXPLAINS: Final[dict[str, frozenset[str]]] = {
    "events-off": _PORTS | _STREAM,
    "publisher-not-zmq": _PORTS | _STREAM,
    "ranks-differ": _STREAM,
    "endpoints-differ": _PORTS | _STREAM,
    "several-publishers": _STREAM | {"replay-of-another"},
    "replay-refused": _STREAM,
    "replay-silent": _STREAM,
    "replay-wrong-socket": _STREAM,
    "replay-of-another": _STREAM,
    "replay-missing": _LEFT_OUT,
    "replay-not-given": _LEFT_OUT,
    "stream-not-live": _TEST | {"blocks-left-out"},
    "replay-running": _TEST | {"blocks-left-out"},
    "stream-incomplete": frozenset({"blocks-left-out"}),
    "windows-only": frozenset({"index-misses", "index-and-engine-miss"}),
}


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """One target that was examined.

    Attributes:
        name: what it is called in findings.
        url: its HTTP server, or "".
        engine: "vllm", "sglang" or "".
        version: as it says.
        ranks: by dp_rank, where it publishes.
        test: of the active test: `outcome`, and in tokens what was `sent`, told to be `stored`,
            `predicted` by the index and `cached` by the engine; None if there was none.
    """

    name: str
    url: str
    engine: str
    version: str
    ranks: dict[int, str]
    test: dict[str, Any] | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an examination found.

    Attributes:
        targets: what was examined.
        findings: what was found, worst first.
        notes: how far the prompt asked for is held, rank by rank.
        seconds: how long it took.
    """

    targets: tuple[Examined, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 if something is, 2 if that could not be looked at."""
        problems = [one for one in self.findings if one.severity != "info"]
        if any(not CAUSES[one.id].blind for one in problems):
            return 1
        return 2 if problems else 0


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return one target's findings, worst first, without what follows from others.

    A rank's findings explain others of this rank or of the whole engine.
    """
    known = list(findings)
    kept = [one for one in known if not any(_explains(cause, one) for cause in known)]
    if any(one.severity != "info" for one in kept):
        kept = [one for one in kept if one.id != "all-well"]
    return sorted(kept, key=rank_of)


def _explains(cause: Finding, one: Finding) -> bool:
    if not (_covers(cause.subject, one.subject) or _covers(one.subject, cause.subject)):
        return False
    explained = _EXPLAINS.get(cause.id, frozenset())
    if cause.severity == "error" and cause.id not in _TEST | {"stream-not-live"}:
        explained = explained | _TEST | {"stream-not-live", "replay-running"}
    return one.id in explained


def _covers(subject: str, other: str) -> bool:
    """Whether it is the other, or the engine whose rank the other is."""
    return subject == other or subject == other.rpartition("/")[0]


def rank_of(finding: Finding) -> tuple[int, int, str]:
    """Return by what findings are sorted: severity, then how near the cause."""
    return _SEVERITIES.index(finding.severity), _ORDER[finding.id], finding.subject
