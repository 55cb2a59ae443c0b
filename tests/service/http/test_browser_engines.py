"""The page in a browser, beside engines that are killed, restarted and registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("httpx")

import httpx
from playwright.sync_api import Browser, expect

from kvindex.testing import FakeEngine
from tests.live import caught_up
from tests.service.http.browser import SHARED, box_of, tab_of, tiles
from tests.service.http.scenes import BLOCK, paged, register, serving

pytestmark = pytest.mark.service

PROMPTS = [SHARED + [1000 + n] * 16 * (n + 1) for n in range(3)]


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    """Three ranks: all hold the shared start, each what is its own; one has a CPU tier."""
    made = [FakeEngine(f"vllm-{n}", block_size=16, cpu_blocks=8 * (n == 0)) for n in range(3)]
    for engine, prompt in zip(made, PROMPTS, strict=True):
        engine.serve(prompt)
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def url(engines: list[FakeEngine]) -> Iterator[str]:
    """Where the page of the engines is, once all is known that they hold."""
    with paged(*engines) as (_, client, url):
        caught_up(client, *engines)
        yield url


def test_the_fleet_is_shown_and_an_engine_that_is_killed_is_told_within_seconds(
    browser: Browser, engines: list[FakeEngine], url: str
) -> None:
    with tab_of(browser, url) as tab:
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


def test_a_rank_is_chosen_by_keyboard_and_its_details_are_told(browser: Browser, url: str) -> None:
    with tab_of(browser, url) as tab:
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
    browser: Browser, url: str
) -> None:
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
        whole = box_of(tree)
        tab.keyboard.press("Enter")
        expect(tree.get_by_role("treeitem")).to_have_count(3)  # what leads there, and itself
        assert box_of(second)["width"] == pytest.approx(whole["width"], abs=2)
        tab.keyboard.press("Escape")
        expect(tree.get_by_role("treeitem")).to_have_count(5)
        tab.get_by_role("button", name="Table").click()
        expect(tab.get_by_role("table").get_by_role("row")).to_have_count(5)


def test_the_explorer_tells_how_far_a_prompt_matches_and_why_it_ends(
    browser: Browser, url: str
) -> None:
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
    browser: Browser, engines: list[FakeEngine], url: str
) -> None:
    with tab_of(browser, url, "timeline") as tab:
        engines[0].restart()
        engines[0].serve(SHARED)
        row = tab.get_by_role("row").filter(has_text="the engine restarted")
        expect(row).to_contain_text("vllm-0/0")
        expect(tab.locator(".lane .mark.restart")).to_have_count(1)


def test_a_lost_server_is_told_with_how_old_the_picture_is_and_found_again(
    browser: Browser, url: str
) -> None:
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
        registration = {
            "instance_id": 7,
            "model_name": "llama",
            "block_size": 16,
            "endpoint": fake.endpoint,
        }
        assert httpx.post(f"{url}/register", json=registration).status_code == 201
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


def test_a_service_that_wants_a_token_shows_its_page_to_who_has_it(
    browser: Browser, tmp_path: Path
) -> None:
    token = "a-token-for-the-browser"
    file = tmp_path / "token"
    file.write_text(f"{token}\n")
    with (
        serving("--token-file", file) as served,
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
