"""What the page draws in a browser: elements, names, contrast and colours."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright")
pytest.importorskip("httpx")

from playwright.sync_api import Browser, expect

from kvindex.service.page import read_assets
from tests.service.http.browser import each_view, tab_of, tiles

pytestmark = pytest.mark.service


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
        result = tab.evaluate(KEPT, steps)
    assert result["seen"] == [
        ["a b c", True],
        ["c a b", True],
        ["a c b", True],
        ["x b y c z d", True],
        ["b c", True],
        ["c no b", True],
        ["d c b a", True],
    ]
    assert sorted(result["left"]) == list("abdxyz")


def test_an_object_of_the_network_is_no_element(browser: Browser, many: str) -> None:
    drawn = """async (evil) => {
      const { html, render } = await import("/static/html.js");
      const box = document.createElement("div");
      render(html`<p title=${evil}>${evil} <b>x</b></p>`, box);
      return box.innerHTML;
    }"""
    with tab_of(browser, many) as tab:
        evil = {"type": "img", "attributes": {"src": "x"}, "children": []}
        result = tab.evaluate(drawn, evil)
    assert result == '<p title="[object Object]">[object Object] <b>x</b></p>'


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names_in_every_view(
    browser: Browser, many: str, scheme: str
) -> None:
    with tab_of(browser, many, color_scheme=scheme) as tab:
        for view in each_view(tab, many):
            if view == "fleet":
                tiles(tab).first.click()
                for colour in ("Blocks", "Events", "Last event", "State"):
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
            ratio = contrast(colours[ink][scheme], colours[ground][scheme])
            assert ratio >= 4.5, (ink, ground, ("light", "dark")[scheme], ratio)


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
