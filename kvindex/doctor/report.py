"""What an examination found, as a value and as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from kvindex.doctor.causes import CAUSES
from kvindex.doctor.finding import Finding

__all__ = ["Examined", "Report", "ordered"]

_SEVERITIES: Final = ("error", "warning", "info")
_ORDER: Final = {kind: place for place, kind in enumerate(CAUSES)}

# What follows from another error, and is not worth a line beside it.
_CONSEQUENCES: Final = {
    "stream-not-live",
    "index-misses",
    "index-and-engine-miss",
    "caches-unpublished",
    "nothing-cached",
    "silent-while-serving",
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
    """Return one target's findings, worst first, without what follows from another error."""
    known = list(findings)
    root = any(one.severity == "error" and one.id not in _CONSEQUENCES for one in known)
    kept = [one for one in known if not (root and one.id in _CONSEQUENCES)]
    return sorted(kept, key=rank_of)


def rank_of(finding: Finding) -> tuple[int, int, str]:
    """Return by what findings are sorted: severity, then how near the cause."""
    return _SEVERITIES.index(finding.severity), _ORDER[finding.id], finding.subject
