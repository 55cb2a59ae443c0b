"""Writes the tables of findings in doctor.md from the doctor's causes: python docs/findings.py."""

from __future__ import annotations

import re
from pathlib import Path

from kvindex.tools.doctor.causes import CAUSES, SECTIONS, words_for

_PAGE = Path(__file__).parent / "doctor.md"
_PART = re.compile(r"(<!-- findings: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Options, endpoints, settings of an engine and calls are shown as they are typed.
_CODE = re.compile(r'(--[a-z][\w-]*|\S*tcp://\S*[\w}]|"\w+": "[^"]+"|\w+\(\S*\))')
_PLACE = re.compile(r"{(\w+)(?:\[(\w+)\])?}")


def page(text: str) -> str:
    """Return the page with its tables as the causes are."""
    return _PART.sub(lambda part: part[1] + _table(part[2]) + part[3], text)


def _table(section: str) -> str:
    rows = ["| id | severity | meaning |", "|---|---|---|"]
    for kind, cause in CAUSES.items():
        if SECTIONS[kind] == section:
            rows.append(f"| `{kind}` | {cause.severity} | {_sentence(cause.what)} |")
    return "\n".join(rows) + "\n"


def _sentence(template: str) -> str:
    """Return a sentence of a cause with its places in italics, or in capitals within code."""
    for name, words in words_for("").items():
        template = template.replace(f"{{{name}}}", words)
    parts = _CODE.split(template)
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = f"`{_PLACE.sub(lambda place: place[1].upper(), part)}`"
        else:
            parts[number] = _PLACE.sub(lambda place: f"*{_name(*place.groups())}*", part)
    return "".join(parts)


def _name(evidence: str, item: str | None) -> str:
    return evidence.replace("_", " ") + (f" {item}" if item else "")


if __name__ == "__main__":
    _PAGE.write_text(page(_PAGE.read_text("utf-8")), "utf-8")
