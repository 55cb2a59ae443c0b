"""Prefixes, the timeline and matches in a browser, of many ranks."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("httpx")

from playwright.sync_api import Browser, expect

from kvindex import EventBatch, Rank, State
from kvindex.service.timeline import Timeline
from tests.index.index_events import stored
from tests.service.http.browser import shown, tab_of
from tests.service.http.page_server import ManyRanks, page_of
from tests.service.test_fleet_overview import status_of

pytestmark = pytest.mark.service


def test_prefixes_of_512_ranks_are_shaded_by_share_say_their_units_and_use_the_height(
    browser: Browser,
) -> None:
    fleet = ManyRanks(512)
    for row, rank in enumerate(fleet.ranks):
        events = [stored(*range(20 if row < 376 else 5))]
        if row < 20:
            events.append(stored(*range(900, 906), parent=119))
        fleet.index.apply(rank, EventBatch(ts=0.0, events=[*events]))
    with shown(page_of(fleet)) as url, tab_of(browser, url, "prefixes") as tab:
        cells = tab.get_by_role("treeitem")
        expect(cells).to_have_count(4)
        expect(cells.nth(1)).to_contain_text("5 blocks, 512 ranks")
        expect(cells.nth(2)).to_contain_text("15 blocks, 376 ranks")
        expect(cells.nth(2)).to_contain_text("60 tokens")
        for row, shade in ((1, "h5"), (2, "h4"), (3, "h1")):
            expect(cells.nth(row)).to_have_class(re.compile(rf"\b{shade}\b"))
        box = tab.get_by_role("tree").bounding_box()
        assert box is not None
        assert box["height"] > 400  # of 720, though there are three lines only
        expect(tab.locator(".legend")).to_contain_text(re.compile(r"75 % or more\s+of 512 ranks"))


def test_a_timeline_says_what_it_left_out_and_paints_what_is_not_known(browser: Browser) -> None:
    now = [time.time() - 60]
    timeline = Timeline(most=4, clock=lambda: now[0])
    page = page_of(ManyRanks(0), timeline=timeline)
    old, new = Rank("old", 0), Rank("new", 0)
    for rank, states in ((old, "SLSLS"), (new, "LSL")):
        for state in states:
            now[0] += 5
            timeline.observe(status_of(rank, {"S": State.STALE, "L": State.LIVE}[state]))
    with shown(page) as url, tab_of(browser, url, "timeline") as tab:
        expect(tab.get_by_role("main")).to_contain_text(
            re.compile(r"The latest 4 of 8 happenings: those before [\d:]+ are no longer kept")
        )
        lanes = tab.locator(".lane:not(.axis)")
        widths = {}
        for name in ("old/0", "new/0"):
            unknown = lanes.filter(has_text=name).locator("i.unknown")
            box = unknown.bounding_box()
            assert box is not None
            widths[name] = box["width"]
        assert widths["old/0"] >= widths["new/0"] > 0  # the new one was not there yet
        expect(tab.locator(".lanes .legend")).to_contain_text("not known")


def test_ranks_that_hold_nothing_of_a_prompt_are_one_line(browser: Browser, many: str) -> None:
    with tab_of(browser, many, "match") as tab:
        tab.locator("textarea").fill(" ".join(map(str, range(64))))
        tab.get_by_role("button", name="Explain the match").click()
        answers = tab.locator(".answers > li")
        expect(answers).to_have_count(1)
        expect(answers).to_contain_text("512 ranks hold nothing of it")
        box = answers.bounding_box()
        assert box is not None
        assert box["height"] < 60
        answers.locator("summary").click()
        expect(answers).to_contain_text("vllm-0/0")


def test_words_instead_of_tokens_lead_to_how_to_get_them(browser: Browser, many: str) -> None:
    with tab_of(browser, many, "match") as tab:
        tab.locator("textarea").fill("hello world")
        tab.get_by_role("button", name="Explain the match").click()
        expect(tab.get_by_role("alert")).to_contain_text("hello. For words, choose Text above")
        tab.get_by_role("button", name="Text").click()
        expect(tab.get_by_role("note")).to_contain_text("/tokenize")
        expect(tab.get_by_role("note")).to_contain_text('"model": "llama"')
        expect(tab.get_by_role("button", name="Explain the match")).to_have_count(0)


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, many: str) -> None:
    phone: Any = {"width": 390, "height": 844}
    with tab_of(browser, many, viewport=phone) as tab:
        for view in ("fleet", "prefixes", "match", "timeline"):
            tab.goto(f"{many}/#{view}")
            expect(tab.locator("nav [aria-current=page]")).to_have_attribute("href", f"#{view}")
            expect(tab.get_by_role("main")).not_to_contain_text("Reading")
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, view
            header = tab.get_by_role("banner").bounding_box()
            assert header is not None
            assert header["height"] < 100, view  # two lines
