"""The pages of the docs as tests see them: fenced examples, links, headings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [ROOT / "llms.txt", *sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


class Fence(NamedTuple):
    """What stands between two ```: its language, its text, and the line where that begins."""

    language: str
    text: str
    line: int


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path) -> list[Fence]:
    text = page.read_text()
    return [
        Fence(fence[2], fence[3], text.count("\n", 0, fence.start(3)) + 1)
        for fence in _FENCE.finditer(text)
    ]


def fences_in(page: Path, language: str) -> list[Fence]:
    return [fence for fence in fences(page) if fence.language == language]


def links(page: Path) -> list[str]:
    return _LINK.findall(_FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """What headings of the page can be linked to as, by the rule of GitHub and of MyST."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
