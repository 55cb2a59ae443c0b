"""Findings as data: each is documented where it says, and brought about by a test."""

from __future__ import annotations

import re
import runpy
import string
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvindex.tools.doctor import CAUSES, Diagnosis, Finding
from kvindex.tools.doctor.case import finding_of, ordered

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "doctor.md").read_text()
TESTS = "".join(
    path.read_text()
    for folder in ("tools/doctor", "service/http")
    for path in (ROOT / "tests" / folder).glob("test_*.py")
    if (folder != "service/http" or "doctor" in path.name) and path != Path(__file__)
)
ROW = r"(?m)^\| `([a-z-]+)` \| (?:error|warning|info) \|"
SECTION = re.compile(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def any_of(kind: str) -> Finding:
    cause = CAUSES[kind]
    names = {
        name
        for text in (cause.what, cause.remedy)
        for _, name, _, _ in string.Formatter().parse(text)
        if name
    }
    evidence: dict[str, Any] = {name.split("[")[0]: defaultdict(lambda: "x") for name in names}
    return finding_of(kind, "a/0", **evidence)


def test_the_page_has_each_finding_in_its_section_as_the_doctor_prints_it() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "findings.py"))["page"]
    assert page(PAGE) == PAGE, "run docs/findings.py"
    assert re.findall(ROW, PAGE) == list(CAUSES)
    for title, text in SECTION.findall(PAGE):
        anchor = title.lower().replace(" ", "-")
        kinds = re.findall(ROW, text)
        assert all(any_of(kind).docs == f"docs/doctor.md#{anchor}" for kind in kinds)


@pytest.mark.parametrize("kind", CAUSES)
def test_every_finding_is_brought_about_by_a_test(kind: str) -> None:
    assert f'"{kind}"' in TESTS


def kept(*kinds: str) -> list[str]:
    return [finding.id for finding in ordered(map(any_of, kinds))]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["all-well", "block-large", "prefix-caching-off"], ["prefix-caching-off", "block-large"]),
        (["all-well", "dp-behind-one-port"], ["dp-behind-one-port", "all-well"]),
        (["publisher-refused", "replay-refused", "events-off"], ["events-off"]),
        (["caches-unpublished", "endpoints-differ"], ["endpoints-differ"]),
        (["caches-unpublished"], ["caches-unpublished"]),
        (["index-misses", "stream-not-live", "replay-refused"], ["replay-refused"]),
        (["index-misses", "stream-not-live"], ["stream-not-live"]),
        (["index-misses", "replay-running"], ["replay-running"]),
        (["blocks-left-out", "replay-missing"], ["replay-missing"]),
        (["all-well", "topic-filtered", "replay-running"], ["topic-filtered"]),
        (["all-well", "block-size-assumed"], ["block-size-assumed"]),
    ],
)
def test_what_follows_from_a_finding_is_left_out(kinds: list[str], expected: list[str]) -> None:
    assert kept(*kinds) == expected


def test_what_is_wrong_with_one_rank_explains_nothing_of_another() -> None:
    refused = finding_of("replay-refused", "a/0", endpoint="tcp://h:1", error="")
    not_live = [
        finding_of("stream-not-live", f"a/{rank}", state="x", reason="y") for rank in (0, 1)
    ]
    assert [finding.subject for finding in ordered([refused, *not_live])] == ["a/1", "a/0"]


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
def test_the_exit_code_is_clean_found_or_not_seen(kinds: list[str], code: int) -> None:
    assert Diagnosis(targets=(), findings=tuple(map(any_of, kinds))).exit_code == code
