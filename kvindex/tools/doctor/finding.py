"""Findings: what is wrong, how it shows, and what to do about it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvindex.tools.doctor.causes import CAUSES, SECTIONS, Severity, words_for

__all__ = ["Finding", "found"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was found.

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


def found(kind: str, subject: str, /, *, engine: str = "", **evidence: Any) -> Finding:
    """Return a finding of this kind.

    Args:
        kind: its id.
        subject: whose.
        engine: "vllm" or "sglang", for flags in the remedy; both are named if it is not known.
        evidence: what was seen; it also fills the sentences.

    Examples:
        >>> found("publisher-refused", "a/0", engine="vllm", endpoint="tcp://h:1").what
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
