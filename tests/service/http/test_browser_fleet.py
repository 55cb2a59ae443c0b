"""The view of the fleet in a browser: tiles, traffic, troubles and the table."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("httpx")

import httpx
from playwright.sync_api import Browser, expect

from kvindex import EventBatch, Rank, State
from kvindex.service.overview import Routed
from kvindex.service.timeline import Timeline
from kvindex.service.traffic import Trends
from kvindex.testing import FakeEngine
from tests.index.index_events import apply, stored
from tests.service.http.browser import READ_AGAIN, box_of, each_view, names, shown, tab_of, tiles
from tests.service.http.scenes import MODEL, ManyRanks, page_of, paged
from tests.service.test_fleet_overview import status_of

pytestmark = pytest.mark.service


def test_512_ranks_are_drawn_with_a_bounded_number_of_nodes(browser: Browser, many: str) -> None:
    with tab_of(browser, many) as tab:
        expect(tiles(tab)).to_have_count(512)
        assert tab.evaluate("document.querySelectorAll('*').length") < 3000
        tab.get_by_role("searchbox", name="Find").fill("vllm-63/")
        expect(tiles(tab)).to_have_count(8)
        tab.get_by_role("searchbox", name="Find").fill("")
        tab.locator(".chip.live").click()  # those that are live and complete: hidden
        assert not [name for name in names(tiles(tab)) if "live and complete" in name]


def test_tiles_are_grouped_by_worker_and_say_who_they_are_on_hover_and_focus(
    browser: Browser, many: str
) -> None:
    with tab_of(browser, many) as tab:
        worker = tab.get_by_role("group", name="vllm-12", exact=True)
        expect(worker.get_by_role("option")).to_have_count(8)
        worker.get_by_role("option").nth(3).hover()
        expect(tab.locator(".tip")).to_contain_text("vllm-12/3")
        tiles(tab).first.focus()
        tab.keyboard.press("ArrowRight")
        expect(tab.locator(".tip")).to_contain_text("vllm-0/1")
        tab.keyboard.press("Escape")
        expect(tab.locator(".tip")).to_have_count(0)
        tab.keyboard.press("ArrowDown")  # the same place in the worker below
        expect(tab.locator(".tip b")).to_have_text(re.compile(r"vllm-[1-9]\d*/1"))
        tab.keyboard.press("End")
        expect(tab.locator(".tip b")).to_have_text("vllm-63/7")


def test_the_blocks_of_a_few_ranks_are_written_out_on_their_tiles(browser: Browser) -> None:
    with ExitStack() as opened:
        engines = [
            opened.enter_context(
                FakeEngine("vllm-0", dp_rank=n, block_size=4, num_blocks=500, cpu_blocks=250)
            )
            for n in range(4)
        ]
        for each in engines:
            each.serve(list(range(1200)))
        _, _, url = opened.enter_context(paged(*engines))
        with tab_of(browser, url) as tab:
            expect(tiles(tab).locator(".more")).to_have_text(["300 GPU, 250 CPU"] * 4)
            cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
            assert tiles(tab).locator(".more").evaluate_all(cut) == 0


def test_tiles_are_coloured_by_what_is_asked_for_and_the_legend_says_what_it_means(
    browser: Browser,
) -> None:
    fleet = ManyRanks(64)
    apply(fleet.index, fleet.ranks[0], stored(*range(100)))
    apply(fleet.index, fleet.ranks[1], stored(*range(30)))
    with shown(page_of(fleet)) as url, tab_of(browser, url) as tab:
        tab.get_by_label("Colour by").select_option("Blocks")
        for row, shade in enumerate(("h5", "h2", "none")):
            expect(tiles(tab).nth(row)).to_have_class(re.compile(rf"shade {shade}$"))
        legend = tab.get_by_role("region", name="Ranks", exact=True).locator(".legend")
        expect(legend).to_contain_text("to 100")
        tab.get_by_label("Colour by").select_option("Last event")
        expect(legend).to_contain_text("under 10 s")
        expect(tiles(tab).first).to_have_class(re.compile("shade h5$"))
        tab.get_by_label("Colour by").select_option("State")
        expect(legend).to_have_count(0)


def test_a_gateways_page_shows_the_load_of_ranks_and_why_some_get_no_requests(
    browser: Browser,
) -> None:
    fleet = ManyRanks(0)
    for worker in ("busy", "drained", "failing", "sleeping"):
        rank = Rank(worker, 0)
        fleet.present[rank] = status_of(rank)
        fleet.index.add(rank)
    fleet.present[Rank("failing")] = status_of(
        Rank("failing"), State.CONNECTING, reason="nothing listens at tcp://h:1: is it up?"
    )
    routed = {
        "busy/0": Routed(open_requests=12, queued_tokens=34_567),
        "drained/0": Routed(
            open_requests=3, queued_tokens=0, left_out="drained", reason="an operator drained it"
        ),
        "failing/0": Routed(
            open_requests=0, queued_tokens=0, left_out="ejected", reason="2 failures", seconds=7.6
        ),
        "sleeping/0": Routed(
            open_requests=0, queued_tokens=0, left_out="asleep", reason="it sleeps"
        ),
    }
    page = page_of(fleet, routed=lambda: routed)
    with shown(page) as url, tab_of(browser, url) as tab:
        expect(tab.locator(".total").last).to_have_text(
            re.compile("Open requests.*15.*34.6k tokens queued, 3 ranks left out", re.DOTALL)
        )
        row = tab.get_by_role("row").filter(has_text="busy/0")
        expect(row).to_contain_text("12")
        expect(row).to_contain_text("34.6k")
        wrong = tab.get_by_role("region", name="What is wrong").get_by_role("listitem")
        for words in (
            r"ejected.*failing/0.*2 failures; tried again in 8 s",
            r"connecting.*failing/0.*nothing listens",
            r"drained.*drained/0.*an operator drained it",
            r"asleep.*sleeping/0.*it sleeps",
        ):
            expect(wrong.filter(has_text=re.compile(words, re.DOTALL))).to_have_count(1)
        failing = tab.get_by_role("row").filter(has_text="failing/0").locator(".badge")
        expect(failing).to_have_text([re.compile("ejected"), re.compile("connecting")])
        tab.locator(".chip.drained").click()
        expect(tiles(tab)).to_have_count(3)
        tab.get_by_label("Colour by").select_option("Queued tokens")
        expect(tiles(tab).first).to_have_class(re.compile("shade h5$"))
        expect(tiles(tab).first).to_contain_text("12 open, 34.6k queued")
        tiles(tab).nth(1).click()
        details = tab.get_by_role("complementary")
        expect(details).to_contain_text("2 failures; tried again in 8 s")
        expect(details).to_contain_text("is it up?")


def test_a_page_of_what_routes_nothing_shows_no_load(browser: Browser, many: str) -> None:
    with tab_of(browser, many) as tab:
        expect(tiles(tab)).to_have_count(512)
        for words in ("Open", "Queued"):
            expect(tab.get_by_role("columnheader", name=words)).to_have_count(0)
            expect(tab.get_by_role("option", name=words)).to_have_count(0)
        expect(tab.locator(".total")).to_have_count(6)


def test_equal_reasons_are_told_once_and_so_are_engines_that_were_not_found(
    browser: Browser,
) -> None:
    reason = "nothing listens at {}, or its host is unknown (failed attempts: 8): is it up?"
    fleet = ManyRanks(0)
    for n in range(16):
        at = f"tcp://h:{5557 + n}"
        fleet.present[Rank("vllm-7", n)] = status_of(
            Rank("vllm-7", n), State.CONNECTING, reason=reason.format(at), endpoint=at
        )
        fleet.index.add(Rank("vllm-7", n))
    with shown(page_of(fleet)) as url, tab_of(browser, url) as tab:
        wrong = tab.get_by_role("region", name="What is wrong").get_by_role("listitem")
        expect(wrong).to_have_count(2)
        expect(wrong.first).to_contain_text("http://vllm-99:8000")
        expect(wrong.last).to_contain_text("vllm-7: 16 ranks")
        expect(wrong.last).to_contain_text("nothing listens at its publisher, or its host")
        expect(wrong.last).not_to_contain_text("is it up?")
        row = tab.get_by_role("row").filter(has_text="vllm-7/3")
        assert box_of(row)["height"] < 40  # one line
        wrong.last.get_by_role("button").click()
        expect(tab.get_by_role("complementary")).to_contain_text("is it up?")  # the details


def test_what_was_asked_before_the_page_was_opened_is_drawn_and_read_by_keys(
    browser: Browser,
) -> None:
    fleet = ManyRanks(16)
    page = page_of(fleet)
    now = [time.time() - 300.0]
    page.trends = Trends(fleet.traffic.asked, clock=lambda: now[0])
    for number in range(60):
        now[0] += 5
        for _ in range(10):
            fleet.traffic.query(MODEL, 100, 80, 1_000_000)
            fleet.traffic.outcome(MODEL, 100, 80, 60 if number < 30 else 70, 50)
        page.trends.sample(live=16 - (number < 30), ranks=16)
    with shown(page) as url, tab_of(browser, url) as tab:
        traffic = tab.get_by_role("region", name="Traffic")
        queries = traffic.get_by_role("slider", name="Queries over the last 15 min")
        expect(queries).to_have_attribute("aria-valuetext", re.compile("2.0$"))
        hits = traffic.get_by_role("slider", name="Hit rate")
        now_text = "attainable 80 %, chosen 70 %, delivered 50 %"
        expect(hits).to_have_attribute("aria-valuetext", re.compile(now_text))
        expect(traffic.locator(".chart").nth(2)).to_contain_text("0 of 16")
        hits.focus()
        tab.keyboard.press("Home")
        expect(hits).to_have_attribute("aria-valuetext", re.compile("chosen 60 %"))
        expect(traffic.locator(".chart").nth(2)).to_contain_text("1 of 16")  # all charts go along
        tab.keyboard.press("Escape")
        expect(hits).to_have_attribute("aria-valuetext", re.compile("chosen 70 %"))
        expect(traffic.locator(".plot .unknown").first).to_be_visible()  # before it was watched
        traffic.get_by_role("combobox").select_option("5 minutes")
        expect(traffic.get_by_role("slider", name="Queries over the last 5 min")).to_be_visible()


def test_the_table_is_sorted_by_its_headers(browser: Browser, many: str) -> None:
    with tab_of(browser, many) as tab:
        header = tab.get_by_role("columnheader", name="Losses")
        header.get_by_role("button").click()
        expect(header).to_have_attribute("aria-sort", "descending")
        cells = tab.locator("tbody tr td:nth-last-child(3)")
        expect(cells.first).to_have_text("2")
        header.get_by_role("button").click()
        expect(cells.first).to_have_text("0")
        expect(tab.get_by_role("row")).to_have_count(51)


def test_focus_caret_and_what_was_typed_stay_when_the_fleet_changes(browser: Browser) -> None:
    fleet = ManyRanks(64)

    def change(losses: int) -> None:
        fleet.present[Rank("vllm-3", 4)] = status_of(Rank("vllm-3", 4), losses=losses)
        tab.evaluate(READ_AGAIN)

    with shown(page_of(fleet)) as url, tab_of(browser, url) as tab:
        expect(tab.locator(".pulse.live")).to_be_visible()
        tab.get_by_role("columnheader", name="Losses").get_by_role("button").click()
        rows = tab.locator("tbody tr")
        expect(rows.first).not_to_contain_text("vllm-3/4")
        rows.filter(has_text="vllm-3/4").get_by_role("button").focus()
        change(1_000)
        expect(rows.first).to_contain_text("vllm-3/4")  # the row moved, and kept the focus
        expect(rows.first.get_by_role("button")).to_be_focused()

        find = tab.get_by_role("searchbox", name="Find")
        find.press_sequentially("vlm-3")
        find.press("Home")
        find.press("ArrowRight")
        change(2_000)
        expect(tab.locator(".totals")).to_contain_text("2,0")
        find.press_sequentially("l")  # where the caret was
        expect(find).to_have_value("vllm-3")
        expect(rows).to_have_count(8)
        expect(find).to_be_focused()

        tab.goto(f"{url}/#match")
        tab.get_by_label("Salt").fill("secret")
        tab.locator("textarea").fill("1 2 3")
        with tab.expect_response("**/api/fleet"):
            tab.evaluate(READ_AGAIN)
        tab.get_by_role("button", name="Text").click()  # another prompt, the same form
        expect(tab.get_by_label("Salt")).to_have_value("secret")


def test_a_view_that_cannot_be_shown_says_so_and_the_others_go_on(browser: Browser) -> None:
    with shown(page_of(ManyRanks(8))) as url, tab_of(browser, url) as tab:
        expect(tiles(tab)).to_have_count(8)
        fleet = httpx.get(f"{url}/api/fleet").json()
        broken = {**fleet, "totals": None}
        tab.route("**/api/fleet", lambda route: route.fulfill(json=broken))
        tab.evaluate(READ_AGAIN)
        expect(tab.get_by_role("alert")).to_contain_text("This view cannot be shown")
        expect(tiles(tab)).to_have_count(0)
        tab.get_by_role("link", name="Timeline").click()
        expect(tab.get_by_role("main")).to_contain_text("All 8 happenings")
        broken |= {"totals": fleet["totals"], "version": "whole again"}
        expect(tab.get_by_role("contentinfo")).to_have_text("kvindex whole again")
        tab.get_by_role("link", name="Fleet").click()
        expect(tiles(tab)).to_have_count(8)


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
        # Of 720, though there are three lines only.
        assert box_of(tab.get_by_role("tree"))["height"] > 400
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
            widths[name] = box_of(lanes.filter(has_text=name).locator("i.unknown"))["width"]
        assert widths["old/0"] >= widths["new/0"] > 0  # the new one was not there yet
        expect(tab.locator(".lanes .legend")).to_contain_text("not known")


def test_ranks_that_hold_nothing_of_a_prompt_are_one_line(browser: Browser, many: str) -> None:
    with tab_of(browser, many, "match") as tab:
        tab.locator("textarea").fill(" ".join(map(str, range(64))))
        tab.get_by_role("button", name="Explain the match").click()
        answers = tab.locator(".answers > li")
        expect(answers).to_have_count(1)
        expect(answers).to_contain_text("512 ranks hold nothing of it")
        assert box_of(answers)["height"] < 60
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
        for view in each_view(tab, many):
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, view
            assert box_of(tab.get_by_role("banner"))["height"] < 100, view  # two lines
