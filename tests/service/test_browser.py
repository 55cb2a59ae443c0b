"""The page in a browser: headless Chromium, against an app with fake engines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs kvindex[server]")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")
pytest.importorskip("httpx")

import httpx
from playwright.sync_api import Browser, expect, sync_playwright
from playwright.sync_api import Page as Tab
from starlette.applications import Starlette

from kvindex.server.assets import read_assets
from kvindex.server.page import Page
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, caught_up
from tests.service.page_server import ManyRanks, at_a_port, paged
from tests.service.served import BLOCK, register, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

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
        expect(options.first).to_have_accessible_name("vllm-0/0: live, 5 GPU, 5 CPU blocks")
        expect(tab.locator(".totals")).to_contain_text("3 of 3")
        engines[1].close()
        expect(tab.get_by_role("option", name="vllm-1/0: connecting")).to_be_visible()
        expect(tab.locator(".totals")).to_contain_text("2 of 3")
        expect(tab.get_by_role("status")).to_contain_text("vllm-1/0: connecting")
        row = tab.get_by_role("row").filter(has_text="vllm-1/0")
        expect(row).to_contain_text("connection to tcp://")


def test_a_rank_is_chosen_by_keyboard_and_its_details_are_told(
    browser: Browser, engines: list[FakeEngine]
) -> None:
    with paged(*engines) as (_, client, url), tab_of(browser, url) as tab:
        caught_up(client, *engines)
        tab.get_by_role("option").first.focus()
        tab.keyboard.press("ArrowRight")
        expect(tab.get_by_role("option").nth(1)).to_be_focused()
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
            expect(answers).to_have_count(3)
            expect(answers.first).to_contain_text("vllm-2/0")
            expect(answers.first.get_by_role("img", name="112 of 112 tokens match")).to_be_visible()
            expect(answers.nth(1)).to_contain_text("64 of 112")
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
    with FakeEngine("7") as one, paged() as (_, _, url), tab_of(browser, url) as tab:
        expect(tab.get_by_role("heading", name="No engines yet")).to_be_visible()
        expect(tab.locator("pre").first).to_contain_text("kvindex serve --worker")
        asked = {
            "instance_id": 7,
            "model_name": "llama",
            "block_size": 16,
            "endpoint": one.endpoint,
        }
        assert httpx.post(f"{url}/register", json=asked).status_code == 201
        expect(tab.get_by_role("option", name="7/0: live")).to_be_visible()


def test_names_from_the_network_are_text(browser: Browser) -> None:
    evil = "<img src=x onerror=document.title='owned'>"
    with FakeEngine(evil, block_size=16) as one, paged(one) as (_, client, url):
        one.serve(SHARED)
        caught_up(client, one)
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
        FakeEngine("7", block_size=BLOCK) as one,
    ):
        headers = {"authorization": f"Bearer {token}"}
        assert register(served, one, headers=headers).status == 201
        url = f"http://127.0.0.1:{served.port}"
        assert served.get("/").status == 401
        credentials: Any = {"username": "", "password": token, "send": "always"}
        with tab_of(browser, url, http_credentials=credentials) as tab:
            expect(tab.locator(".pulse.live")).to_be_visible()
            expect(tab.get_by_role("option", name="7/0: live")).to_be_visible()
            one.close()
            expect(tab.get_by_role("option", name="7/0: connecting")).to_be_visible()
        assert served.end() == 0


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    page = Page(ManyRanks(512))
    with at_a_port(Starlette(routes=page.routes)) as url:
        yield url
    page.close()


def test_512_ranks_are_drawn_with_a_bounded_number_of_nodes(browser: Browser, many: str) -> None:
    with tab_of(browser, many) as tab:
        expect(tab.get_by_role("option")).to_have_count(512)
        assert tab.evaluate("document.querySelectorAll('*').length") < 3000
        tab.get_by_role("searchbox", name="Find").fill("vllm-63/")
        expect(tab.get_by_role("option")).to_have_count(8)
        tab.get_by_role("searchbox", name="Find").fill("")
        tab.locator(".chip.live").click()  # those that are live and complete: hidden
        shown = tab.get_by_role("option")
        assert all("live," not in name or "not complete" in name for name in names(shown))


def names(options: Any) -> list[str]:
    found: list[str] = options.evaluate_all("all => all.map(one => one.ariaLabel)")
    return found


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
                tab.get_by_role("option").first.click()
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
    pairs += [("accent-ink", "accent")]
    pairs += [(a, b) for a in ("ink", "faint", "link") for b in ("ground", "paper", "wash")]
    kinds = ("good", "warn", "bad", "cool", "orange")
    pairs += [(kind, ground) for kind in kinds for ground in ("paper", "wash")]
    assert len(pairs) > 30
    for ink, ground in pairs:
        for scheme in range(2):
            found = contrast(colours[ink][scheme], colours[ground][scheme])
            assert found >= 4.5, (ink, ground, ("light", "dark")[scheme], found)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
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
