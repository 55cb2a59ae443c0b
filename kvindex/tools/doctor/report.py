"""Findings, and an examination's results, as values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from kvindex.tools.doctor.causes import CAUSES, SECTIONS, Severity, words_for

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
    "replay-not-named": _LEFT_OUT,
    "stream-not-live": _TEST | {"blocks-left-out"},
    "replay-running": _TEST | {"blocks-left-out"},
    "stream-incomplete": frozenset({"blocks-left-out"}),
    "windows-only": frozenset({"index-misses", "index-and-engine-miss"}),
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, or a hint.

    Attributes:
        id: which kind of finding; `docs/doctor.md` lists them.
        severity: "error", "warning" or "info".
        subject: whose: an engine's name, one of its ranks, or a URL.
        what: the finding, as a sentence.
        evidence: what was seen, as plain values.
        remedy: what to do.
        docs: where more stands.
    """

    id: str
    severity: Severity
    subject: str
    what: str
    evidence: dict[str, Any]
    remedy: str
    docs: str


def finding_of(kind: str, subject: str, /, *, engine: str = "", **evidence: Any) -> Finding:
    """Return a finding of this kind, whose evidence also fills its sentences.

    Flags in the remedy are the engine's, "vllm" or "sglang"; both are named if it is not known.

    Examples:
        >>> finding_of("publisher-refused", "a/0", engine="vllm", endpoint="tcp://h:1").what
        'nothing listens at tcp://h:1'
    """
    cause = CAUSES[kind]
    filled = words_for(engine) | evidence
    return Finding(
        id=kind,
        severity=cause.severity,
        subject=subject,
        what=cause.what.format_map(filled),
        evidence=evidence,
        remedy=cause.remedy.format_map(filled),
        docs=f"docs/doctor.md#{SECTIONS[kind]}",
    )


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """One target that was examined.

    Attributes:
        name: what it is called in findings.
        url: its HTTP server, or "".
        engine: "vllm", "sglang" or "".
        version: as the engine reports it.
        ranks: by dp_rank, where it publishes.
        test: of the active test: `outcome`, and in tokens what was `sent`, reported as `stored`,
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
        """0 if nothing is wrong, 1 if something is, 2 if a target could not be examined."""
        problems = [finding for finding in self.findings if finding.severity != "info"]
        if any(not CAUSES[finding.id].blind for finding in problems):
            return 1
        return 2 if problems else 0


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return one target's findings, worst first, without what follows from others.

    A rank's findings explain others of this rank or of the whole engine.
    """
    known = list(findings)
    kept = [finding for finding in known if not any(_explains(cause, finding) for cause in known)]
    if any(finding.severity != "info" for finding in kept):
        kept = [finding for finding in kept if finding.id != "all-well"]
    return sorted(kept, key=rank_of)


def _explains(cause: Finding, finding: Finding) -> bool:
    if not (_covers(cause.subject, finding.subject) or _covers(finding.subject, cause.subject)):
        return False
    explained = _EXPLAINS.get(cause.id, frozenset())
    if cause.severity == "error" and cause.id not in _TEST | {"stream-not-live"}:
        explained = explained | _TEST | {"stream-not-live", "replay-running"}
    return finding.id in explained


def _covers(subject: str, other: str) -> bool:
    """Whether a subject is the other, or the engine whose rank the other is."""
    return subject == other or subject == other.rpartition("/")[0]


def rank_of(finding: Finding) -> tuple[int, int, str]:
    """Return by what findings are sorted: severity, then how near the cause."""
    return _SEVERITIES.index(finding.severity), _ORDER[finding.id], finding.subject
