"""A tab of a browser, and the page's parts in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, FloatRect, Locator, expect
from playwright.sync_api import Page as Tab

from kvindex.service.page import Page
from tests.live import PATIENCE
from tests.service.http.scenes import listening_on

SHARED = list(range(64))
READ_AGAIN = "document.dispatchEvent(new Event('visibilitychange'))"


@contextmanager
def tab_of(
    browser: Browser, url: str, view: str = "fleet", *, lossy: bool = False, **options: Any
) -> Iterator[Tab]:
    """Open a view. Any error on the console fails, and any request that leaves the host."""
    tab = browser.new_page(**options)
    tab.set_default_timeout(PATIENCE * 1000)
    errors: list[str] = []
    requested: list[str] = []
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("request", lambda request: requested.append(request.url))
    tab.goto(f"{url}/#{view}")
    yield tab
    tab.close()
    if lossy:
        errors = [error for error in errors if "net::" not in error]
    assert errors == []
    assert requested
    assert all(address.startswith(f"{url}/") for address in requested), requested


@contextmanager
def shown(page: Page) -> Iterator[str]:
    with listening_on(page.routes) as served:
        yield served.url
    page.close()


def tiles(tab: Tab) -> Locator:
    return tab.get_by_role("listbox").get_by_role("option")


def each_view(tab: Tab, url: str) -> Iterator[str]:
    """Open one view after the other, and yield its name once it is drawn."""
    for view in ("fleet", "prefixes", "match", "timeline"):
        tab.goto(f"{url}/#{view}")
        expect(tab.locator("nav [aria-current=page]")).to_have_attribute("href", f"#{view}")
        expect(tab.get_by_role("main")).not_to_contain_text("Reading")
        yield view


def box_of(shown: Locator) -> FloatRect:
    """Where something is drawn, and how large."""
    box = shown.bounding_box()
    assert box is not None
    return box


def names(options: Locator) -> list[str]:
    labels: list[str] = options.evaluate_all("all => all.map(one => one.ariaLabel)")
    return labels
