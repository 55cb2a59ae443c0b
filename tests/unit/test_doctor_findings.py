"""Findings as data: each is documented where it says, and brought about by a test."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from kvindex.doctor import CAUSES, Finding, Report
from kvindex.doctor.causes import SECTIONS
from kvindex.doctor.finding import found
from kvindex.doctor.report import ordered

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text()
TESTS = "".join(
    path.read_text()
    for folder in ("e2e", "service")
    for path in (ROOT / "tests" / folder).glob("test_doctor_*.py")
)
SECTION = re.compile(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def any_of(kind: str) -> Finding:
    cause = CAUSES[kind]
    names = {
        name
        for text in (cause.what, cause.remedy)
        for _, name, _, _ in string.Formatter().parse(text)
        if name
    }
    return found(kind, "a/0", **dict.fromkeys(names, "x"))


@pytest.mark.parametrize("kind", CAUSES)
def test_every_finding_is_documented_with_its_severity_in_its_section(kind: str) -> None:
    sections = {title.lower().replace(" ", "-"): text for title, text in SECTION.findall(PAGE)}
    row = f"| `{kind}` | {CAUSES[kind].severity} | "
    assert sections[SECTIONS[kind]].count(row) == 1
    assert any_of(kind).docs == f"docs/doctor.md#{SECTIONS[kind]}"


@pytest.mark.parametrize("kind", CAUSES)
def test_every_finding_is_brought_about_by_a_test(kind: str) -> None:
    assert f'"{kind}"' in TESTS


def test_the_page_documents_no_other_findings() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (?:error|warning|info) \|", PAGE, re.MULTILINE)
    assert rows == list(CAUSES)


def test_the_worst_comes_first_and_what_follows_from_it_is_left_out() -> None:
    kinds = ["all-well", "caches-unpublished", "replay-missing", "events-off"]
    kept = [one.id for one in ordered(any_of(kind) for kind in kinds)]
    assert kept == ["events-off", "replay-missing", "all-well"]
    alone = [one.id for one in ordered([any_of("caches-unpublished")])]
    assert alone == ["caches-unpublished"]


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ([], 0),
        (["all-well"], 0),
        (["replay-missing"], 1),
        (["engine-unreachable"], 2),
        (["engine-unreachable", "replay-missing"], 1),
    ],
)
def test_the_exit_code_says_clean_found_or_not_seen(kinds: list[str], code: int) -> None:
    report = Report(targets=(), findings=tuple(map(any_of, kinds)))
    assert report.exit_code == code
