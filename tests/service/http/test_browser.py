"""The page in a browser: headless Chromium, against an app with fake engines."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("httpx")

import httpx
from playwright.sync_api import Browser, Locator, expect, sync_playwright
from playwright.sync_api import Page as Tab

from kvindex import EventBatch, Rank, State
from kvindex.service.assets import read_assets
from kvindex.service.page import Page
from kvindex.service.timeline import Timeline
from kvindex.service.traffic import AllTraffic
from kvindex.service.trends import Trends
from kvindex.testing import FakeEngine
from tests.index.index_events import apply, stored
from tests.live import PATIENCE, caught_up
from tests.service.http.page_server import MODEL, ManyRanks, at_a_port, page_of, paged
from tests.service.http.served import BLOCK, register, serving
from tests.service.test_fleet_overview import status_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.service, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]

SHARED = list(range(64))
PROMPTS = [SHARED + [1000 + n] * 16 * (n + 1) for n in range(3)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        expect.set_options(timeout=PATIENCE * 1000)
        yield running
        running.close()


@contextmanager
def tab_of(
    browser: Browser, url: str, view: str = "fleet", *, lossy: bool = False, **options: Any
) -> Iterator[Tab]:
    """Open a view. Any error on the console fails, and any request that leaves the host."""
    tab = browser.new_page(**options)
    tab.set_default_timeout(PATIENCE * 1000)
    errors: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"{url}/#{view}")
    yield tab
    tab.close()
    if lossy:
        errors = [error for error in errors if "net::" not in error]
    assert errors == []
    assert asked
    assert all(address.startswith(f"{url}/") for address in asked), asked


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    """Three ranks: all hold the shared start, each what is its own; one has a CPU tier."""
    made = [FakeEngine(f"vllm-{n}", block_size=16, cpu_blocks=8 * (n == 0)) for n in range(3)]
    for engine, prompt in zip(made, PROMPTS, strict=True):
        engine.serve(prompt)
    yield made
    for engine in made:
        engine.close()


def test_the_fleet_is_shown_and_an_engine_that_is_killed_is_told_within_seconds(
    browser: Browser, engines: list[FakeEngine]
) -> None:
    with paged(*engines) as (_, client, url), tab_of(browser, url) as tab:
        caught_up(client, *engines)
        options = tab.get_by_role("listbox", name="Ranks of llama").get_by_role("option")
        expect(options).to_have_count(3)
        expect(options.first).to_have_accessible_name(
            "vllm-0/0: live and complete, 5 GPU, 5 CPU blocks"
        )
        expect(tab.locator(".totals")).to_contain_text("3 of 3")
        engines[1].close()
        expect(tab.get_by_role("option", name="vllm-1/0: connecting")).to_be_visible()
        expect(tab.locator(".totals")).to_contain_text("2 of 3")
        expect(tab.get_by_role("status")).to_contain_text("vllm-1/0: connecting")
        row = tab.get_by_role("row").filter(has_text="vllm-1/0")
        expect(row).to_contain_text("connection to its publisher lost")


def test_a_rank_is_chosen_by_keyboard_and_its_details_are_told(
    browser: Browser, engines: list[FakeEngine]
) -> None:
    with paged(*engines) as (_, client, url), tab_of(browser, url) as tab:
        caught_up(client, *engines)
        tiles(tab).first.focus()
        tab.keyboard.press("ArrowRight")
        expect(tiles(tab).nth(1)).to_be_focused()
        tab.keyboard.press("End")
        tab.keyboard.press("Enter")
        details = tab.get_by_role("complementary", name="Rank vllm-2/0")
        expect(details).to_contain_text("16 tokens")
        expect(details.get_by_role("img", name="Blocks: 7 GPU")).to_be_visible()
        details.get_by_role("button", name="Close the details").click()
        expect(details).to_have_count(0)


def test_prefixes_are_zoomed_by_keyboard_and_tell_who_holds_them(
    browser: Browser, engines: list[FakeEngine]
) -> None:
    with paged(*engines) as (_, client, url):
        caught_up(client, *engines)
        with tab_of(browser, url, "prefixes") as tab:
            tree = tab.get_by_role("tree")
            expect(tree.get_by_role("treeitem")).to_have_count(5)
            tree.get_by_role("treeitem", name="All prompts").focus()
            tab.keyboard.press("ArrowDown")
            shared = tree.get_by_role("treeitem", name="4 blocks, 3 ranks")
            expect(shared).to_be_focused()
            details = tab.get_by_role("complementary", name="The chosen prefix")
            expect(details).to_contain_text("On GPU: 3 ranks")
            expect(details).to_contain_text("vllm-2/0")
            tab.keyboard.press("ArrowDown")
            expect(tree.get_by_role("treeitem", name="3 blocks, 1 rank")).to_be_focused()
            tab.keyboard.press("ArrowRight")
            second = tree.get_by_role("treeitem", name="2 blocks, 1 rank")
            expect(second).to_be_focused()
            whole = tree.bounding_box()
            assert whole is not None
            tab.keyboard.press("Enter")
            expect(tree.get_by_role("treeitem")).to_have_count(3)  # what leads there, and itself
            box = second.bounding_box()
            assert box is not None
            assert box["width"] == pytest.approx(whole["width"], abs=2)
            tab.keyboard.press("Escape")
            expect(tree.get_by_role("treeitem")).to_have_count(5)
            tab.get_by_role("button", name="Table").click()
            expect(tab.get_by_role("table").get_by_role("row")).to_have_count(5)


def test_the_explorer_tells_how_far_a_prompt_matches_and_why_it_ends(
    browser: Browser, engines: list[FakeEngine]
) -> None:
    with paged(*engines) as (_, client, url):
        caught_up(client, *engines)
        with tab_of(browser, url, "match") as tab:
            tab.get_by_label("Token ids", exact=True).last.fill(", ".join(map(str, PROMPTS[2])))
            tab.get_by_role("button", name="Explain the match").click()
            answers = tab.get_by_role("region", name="Answer").get_by_role("listitem")
            expect(answers).to_have_count(2)
            expect(answers.first).to_contain_text("vllm-2/0")
            expect(answers.first.get_by_role("img", name="112 of 112 tokens match")).to_be_visible()
            expect(answers.nth(1)).to_contain_text("64 of 112")
            expect(answers.nth(1)).to_contain_text("and 1 more rank with the same answer")
            tab.get_by_label("Token ids", exact=True).last.fill("1, two")
            tab.get_by_role("button", name="Explain the match").click()
            expect(tab.get_by_role("alert")).to_contain_text("token 2 is no number: two")


def test_the_timeline_shows_a_restart_in_a_lane_and_in_words(
    browser: Browser, engines: list[FakeEngine]
) -> None:
    with paged(*engines) as (_, client, url), tab_of(browser, url, "timeline") as tab:
        caught_up(client, *engines)
        engines[0].restart()
        engines[0].serve(SHARED)
        row = tab.get_by_role("row").filter(has_text="the engine restarted")
        expect(row).to_contain_text("vllm-0/0")
        expect(tab.locator(".lane .mark.restart")).to_have_count(1)


def test_a_lost_server_is_told_with_how_old_the_picture_is_and_found_again(
    browser: Browser, engines: list[FakeEngine]
) -> None:
    with paged(*engines) as (_, client, url):
        caught_up(client, *engines)
        with tab_of(browser, url, lossy=True) as tab:
            expect(tab.locator(".pulse.live")).to_be_visible()
            tab.route("**/*", lambda route: route.abort())
            tab.evaluate("dispatchEvent(new Event('offline'))")
            alert = tab.get_by_role("alert")
            expect(alert).to_contain_text("Connection lost")
            expect(alert).to_contain_text("What you see is from")
            tab.unroute("**/*")
            expect(tab.locator(".pulse.live")).to_be_visible()
            expect(alert).to_have_count(0)


def test_without_engines_the_page_says_how_to_register_one_and_then_shows_it(
    browser: Browser,
) -> None:
    with FakeEngine("7") as fake, paged() as (_, _, url), tab_of(browser, url) as tab:
        expect(tab.get_by_role("heading", name="No engines yet")).to_be_visible()
        expect(tab.locator("pre").first).to_contain_text("kvindex serve --worker")
        asked = {
            "instance_id": 7,
            "model_name": "llama",
            "block_size": 16,
            "endpoint": fake.endpoint,
        }
        assert httpx.post(f"{url}/register", json=asked).status_code == 201
        expect(tab.get_by_role("option", name="7/0: live")).to_be_visible()


def test_names_from_the_network_are_text(browser: Browser) -> None:
    evil = "<img src=x onerror=document.title='owned'>"
    with FakeEngine(evil, block_size=16) as fake, paged(fake) as (_, client, url):
        fake.serve(SHARED)
        caught_up(client, fake)
        with tab_of(browser, url) as tab:
            tab.get_by_role("option", name=evil).click()
            expect(tab.get_by_role("complementary")).to_contain_text(evil)
            assert tab.title() == "Fleet · kvindex"
            assert tab.locator("img[src=x]").count() == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_a_service_that_wants_a_token_shows_its_page_to_who_has_it(
    browser: Browser, tmp_path: Path, processes: int
) -> None:
    token = "a-token-for-the-browser"
    file = tmp_path / "token"
    file.write_text(f"{token}\n")
    with (
        serving("--token-file", file, "--processes", processes) as served,
        FakeEngine("7", block_size=BLOCK) as fake,
    ):
        headers = {"authorization": f"Bearer {token}"}
        assert register(served, fake, headers=headers).status == 201
        url = f"http://127.0.0.1:{served.port}"
        assert served.get("/").status == 401
        credentials: Any = {"username": "", "password": token, "send": "always"}
        with tab_of(browser, url, http_credentials=credentials) as tab:
            expect(tab.locator(".pulse.live")).to_be_visible()
            expect(tab.get_by_role("option", name="7/0: live")).to_be_visible()
            fake.close()
            expect(tab.get_by_role("option", name="7/0: connecting")).to_be_visible()
        assert served.end() == 0


@contextmanager
def shown(page: Page) -> Iterator[str]:
    with at_a_port(page.routes) as url:
        yield url
    page.close()


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    with shown(page_of(ManyRanks(512))) as url:
        yield url


def test_512_ranks_are_drawn_with_a_bounded_number_of_nodes(browser: Browser, many: str) -> None:
    with tab_of(browser, many) as tab:
        expect(tiles(tab)).to_have_count(512)
        assert tab.evaluate("document.querySelectorAll('*').length") < 3000
        tab.get_by_role("searchbox", name="Find").fill("vllm-63/")
        expect(tiles(tab)).to_have_count(8)
        tab.get_by_role("searchbox", name="Find").fill("")
        tab.locator(".chip.live").click()  # those that are live and complete: hidden
        assert not [name for name in names(tiles(tab)) if "live and complete" in name]


def tiles(tab: Tab) -> Locator:
    return tab.get_by_role("listbox").get_by_role("option")


def names(options: Locator) -> list[str]:
    found: list[str] = options.evaluate_all("all => all.map(one => one.ariaLabel)")
    return found


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


def test_equal_reasons_are_told_once_and_so_are_engines_that_were_not_found(
    browser: Browser,
) -> None:
    reason = "nothing listens at {}, or its host is unknown (failed attempts: 8): is it up?"
    fleet = ManyRanks(0)
    for n in range(16):
        at = f"tcp://h:{5557 + n}"
        fleet.told[Rank("vllm-7", n)] = status_of(
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
        box = row.bounding_box()
        assert box is not None
        assert box["height"] < 40  # one line
        wrong.last.get_by_role("button").click()
        expect(tab.get_by_role("complementary")).to_contain_text("is it up?")  # the details


def test_what_was_asked_before_the_page_was_opened_is_drawn_and_read_by_keys(
    browser: Browser,
) -> None:
    fleet = ManyRanks(16)
    page = page_of(fleet)
    now = [time.time() - 300.0]
    page.trends = Trends(AllTraffic(lambda: [fleet.traffic]).asked, clock=lambda: now[0])
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


READ_AGAIN = "document.dispatchEvent(new Event('visibilitychange'))"


def test_focus_caret_and_what_was_typed_stay_when_the_fleet_changes(browser: Browser) -> None:
    fleet = ManyRanks(64)

    def change(losses: int) -> None:
        fleet.told[Rank("vllm-3", 4)] = status_of(Rank("vllm-3", 4), losses=losses)
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
        told = {**fleet, "totals": None}
        tab.route("**/api/fleet", lambda route: route.fulfill(json=told))
        tab.evaluate(READ_AGAIN)
        expect(tab.get_by_role("alert")).to_contain_text("This view cannot be shown")
        expect(tiles(tab)).to_have_count(0)
        tab.get_by_role("link", name="Timeline").click()
        expect(tab.get_by_role("main")).to_contain_text("All 8 happenings")
        told |= {"totals": fleet["totals"], "version": "whole again"}
        expect(tab.get_by_role("contentinfo")).to_have_text("kvindex whole again")
        tab.get_by_role("link", name="Fleet").click()
        expect(tiles(tab)).to_have_count(8)


# What html.js makes of a list: each step is a list of names, of which null shows nothing.
KEPT = """async (steps) => {
  const { html, render, useEffect, useState } = await import("/static/html.js");
  const box = document.body.appendChild(document.createElement("div"));
  const left = [];
  let show;
  const Item = ({ name }) => {
    useEffect(() => () => left.push(name), []);
    return html`<li data-name=${name}><input aria-label=${name} /></li>`;
  };
  const List = () => {
    const [names, setNames] = useState(steps[0]);
    show = setNames;
    return html`<ul>${names.map((name) => name && html`<${Item} key=${name} name=${name} />`)}
      ${!names.includes("b") && html`<li>no b</li>`}</ul>`;
  };
  render(html`<${List} />`, box);
  const item = (name) => box.querySelector(`[data-name=${name}]`);
  const before = item("c");
  before.firstChild.focus();
  const seen = [];
  for (const names of steps) {
    show(names);
    await new Promise((done) => setTimeout(done));
    const texts = [...box.querySelectorAll("li")].map((one) => one.dataset.name || one.textContent);
    const stays = item("c") === before && document.activeElement === before.firstChild;
    seen.push([texts.join(" "), stays]);
  }
  box.remove();
  return { seen, left };
}"""


def test_what_is_drawn_again_is_the_same_element_wherever_it_moves(
    browser: Browser, many: str
) -> None:
    steps = [*map(list, ("abc", "cab", "acb", "xbyczd")), ["b", None, "c"], ["c"], list("dcba")]
    with tab_of(browser, many) as tab:
        told = tab.evaluate(KEPT, steps)
    assert told["seen"] == [
        ["a b c", True],
        ["c a b", True],
        ["a c b", True],
        ["x b y c z d", True],
        ["b c", True],
        ["c no b", True],
        ["d c b a", True],
    ]
    assert sorted(told["left"]) == list("abdxyz")


def test_an_object_of_the_network_is_no_element(browser: Browser, many: str) -> None:
    drawn = """async (evil) => {
      const { html, render } = await import("/static/html.js");
      const box = document.createElement("div");
      render(html`<p title=${evil}>${evil} <b>x</b></p>`, box);
      return box.innerHTML;
    }"""
    with tab_of(browser, many) as tab:
        evil = {"type": "img", "attributes": {"src": "x"}, "children": []}
        told = tab.evaluate(drawn, evil)
    assert told == '<p title="[object Object]">[object Object] <b>x</b></p>'


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names_in_every_view(
    browser: Browser, many: str, scheme: str
) -> None:
    with tab_of(browser, many, color_scheme=scheme) as tab:
        for view in ("fleet", "prefixes", "match", "timeline"):
            tab.goto(f"{many}/#{view}")
            expect(tab.locator("nav [aria-current=page]")).to_have_attribute("href", f"#{view}")
            expect(tab.get_by_role("main")).not_to_contain_text("Reading")
            if view == "fleet":
                tiles(tab).first.click()
                for colour in ("Blocks", "Load", "Last event", "State"):
                    tab.get_by_label("Colour by").select_option(colour)
                    assert tab.evaluate(POOR_CONTRAST) == [], colour
            assert tab.evaluate(WITHOUT_NAME) == [], view
            assert tab.evaluate(POOR_CONTRAST) == [], view
            expect(tab.get_by_role("main")).to_have_count(1)
            expect(tab.get_by_role("navigation", name="Views")).to_have_count(1)


def test_the_colours_follow_the_system_and_the_toggle(browser: Browser, many: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with tab_of(browser, many, color_scheme="dark") as tab:
        dark = tab.evaluate(ground)
        tab.get_by_role("button", name="Use light colours").click()
        light = tab.evaluate(ground)
        assert light != dark
        tab.reload()
        expect(tab.get_by_role("button", name="Use dark colours")).to_be_visible()
        assert tab.evaluate(ground) == light


def test_every_palette_pair_has_a_contrast_of_4_5() -> None:
    """Also of states that no rank of these tests is in."""
    style = read_assets()["style.css"].body.decode()
    colours = {
        name: pair
        for name, *pair in re.findall(
            r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", style
        )
    }
    washes = [name for name in colours if name.endswith("-wash")]
    pairs = [(name.removesuffix("-wash"), name) for name in washes]
    pairs += [("ink", name) for name in washes]
    pairs += [(f"h{n}-ink", f"h{n}") for n in range(6)]
    pairs += [("paper", wash.removesuffix("-wash")) for wash in washes]  # tiles that are not live
    pairs += [("ink", "tile-live")]
    pairs += [("accent-ink", "accent")]
    pairs += [(a, b) for a in ("ink", "faint", "link") for b in ("ground", "paper", "wash")]
    kinds = ("good", "warn", "bad", "cool", "orange")
    pairs += [(kind, ground) for kind in kinds for ground in ("paper", "wash")]
    assert len(pairs) > 30
    for ink, ground in pairs:
        for scheme in range(2):
            found = contrast(colours[ink][scheme], colours[ground][scheme])
            assert found >= 4.5, (ink, ground, ("light", "dark")[scheme], found)


def contrast(text: str, behind: str) -> float:
    """Return the contrast of two colours by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(text), luminance(behind)))
    return (high + 0.05) / (low + 0.05)


# Controls that a screen reader could not name, and ones that no label belongs to.
WITHOUT_NAME = """() => [...document.querySelectorAll(
    'button, a[href], input, select, textarea, [role=option], [role=treeitem], [role=img]')]
  .filter((one) => {
    const labels = [...(one.labels || [])].map((label) => label.textContent).join('');
    const name = one.getAttribute('aria-label') || labels || one.textContent || '';
    return !name.trim();
  }).map((one) => one.outerHTML.slice(0, 120))"""

# Pieces of text whose contrast with what is behind them is below 4.5:1.
POOR_CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const lum = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, place) => sum + c * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const one = text.parentElement;
    if (!text.textContent.trim() || one.closest('option, .unseen, .skip, noscript')) continue;
    const both = [lum(parse(getComputedStyle(one).color)), lum(behind(one))];
    const [a, b] = both.sort((x, y) => x - y);
    if ((b + 0.05) / (a + 0.05) < 4.5) poor.push(one.outerHTML.slice(0, 120));
  }
  return poor;
}"""
