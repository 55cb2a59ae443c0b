"""Makes the pictures of docs/page.md: `python -m tests.service.http.screenshots`.

512 fake ranks, some of them killed, restarted or without replay, and the page in Chromium.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import Page as Tab
from playwright.sync_api import sync_playwright

from kvindex import Client, Worker
from kvindex.service.app import app_routes
from kvindex.service.catalog import Partition
from kvindex.service.page import Page
from kvindex.service.service import Service
from kvindex.service.traffic import Traffic, Trends
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, until
from tests.service.http.scenes import listening_on

IMAGES = Path(__file__).parents[3] / "docs" / "images"
KEPT = ("fleet-light", "fleet-dark", "prefixes-light", "match-light", "timeline-dark")
MOST_BYTES = 150_000
RANKS, EACH = 512, 8
MODELS = (Partition("llama-3.3-70b"), Partition("llama-3.3-70b", "batch"), Partition("qwen3-32b"))
BLOCK = 16

chance = random.Random(3)


def tokens(blocks: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(50_000) for _ in range(BLOCK * blocks)]


# An agent's system prompt with its tools, a chat's, a document that many ask about, …
STARTS = [tokens(blocks, seed) for seed, blocks in enumerate((90, 24, 160, 40, 12))]
TOOLS = [[start + tokens(chance.randrange(4, 30), 50 + n) for n in range(4)] for start in STARTS]


def conversation(engine: FakeEngine) -> list[int]:
    kind = min(chance.randrange(len(STARTS)), chance.randrange(len(STARTS)))
    shared = chance.choice(TOOLS[kind])
    return shared + tokens(chance.randrange(1, 40), chance.randrange(400))


def serve(engine: FakeEngine) -> None:
    engine.serve(conversation(engine), lora=chance.choice([None] * 6 + ["sql-expert"]))


def fleet(opened: ExitStack) -> list[list[FakeEngine]]:
    """Start the engines of each worker; those of two workers have no replay."""
    workers = []
    for number in range(RANKS // EACH):
        has_replay = number not in (11, 40)
        engines = [
            opened.enter_context(
                FakeEngine(
                    f"vllm-{number}",
                    dp_rank=rank,
                    block_size=BLOCK,
                    num_blocks=500,
                    cpu_blocks=250,
                    replay=has_replay,
                )
            )
            for rank in range(EACH)
        ]
        for engine in engines:
            for _ in range(3):
                serve(engine)
        workers.append(engines)
    return workers


def registered(service: Service, workers: Sequence[Sequence[FakeEngine]]) -> None:
    for number, engines in enumerate(workers):
        endpoints = {engine.rank.dp_rank: engine.endpoint for engine in engines}
        replays = {
            engine.rank.dp_rank: engine.replay_endpoint
            for engine in engines
            if engine.replay_endpoint is not None
        }
        worker = Worker(engines[0].worker, endpoints, replay=replays or None)
        service.registry.add(worker, MODELS[(number % 8 > 4) + (number % 8 > 6)])


def trouble(workers: Sequence[Sequence[FakeEngine]], client: Client) -> None:
    """Kill a node's engines, restart others, and let all go on."""
    for engine in workers[23]:
        engine.close()
    for number in (3, 17, 30, 31, 52):
        chance.choice(workers[number]).restart()
    for number, engines in enumerate(workers):
        for engine in engines if number != 23 else ():
            serve(engine)
    until(lambda: len(client.live_ranks()) == RANKS - EACH)


def asked_of(traffic: Traffic) -> Trends:
    """Return twenty minutes of queries, at whose end time stands still: a wave, and bad choices."""
    now = [time.time() - 1200.0]
    trends = Trends(traffic.asked, clock=lambda: now[0])
    for n in range(240):
        now[0] += 5
        bad = 140 < n < 156
        for _ in range(int(25 + 14 * math.sin(n / 18) + chance.random() * 8)):
            prompt = chance.randrange(400, 4000)
            held = int(prompt * min(1.0, max(0.0, 0.62 + 0.12 * math.sin(n / 25))))
            chosen = int(held * (0.6 if bad else 0.93))
            model = chance.choice((MODELS[0], MODELS[0], MODELS[2]))
            for _ in range(10):
                traffic.query(model, prompt, held, 150_000 + chance.randrange(90_000))
            traffic.outcome(model, prompt, held, chosen, int(chosen * 0.95))
        trends.sample(RANKS - EACH * (n > 215), RANKS)
    return trends


def shoot(tab: Tab, name: str) -> None:
    if name not in KEPT:
        return
    path = IMAGES / f"page-{name}.png"
    tab.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path.name}: {size} bytes")
    assert size < MOST_BYTES, f"{path.name} is larger than {MOST_BYTES} bytes"


def pictures(tab: Tab, url: str, scheme: str) -> None:
    """Take each view."""
    tab.goto(f"{url}/#fleet")
    tab.locator(".pulse.live").wait_for()
    if scheme == "dark":
        tab.get_by_label("Colour by").select_option("Blocks")
        tab.get_by_role("option", name="vllm-23/5: connecting").click()
    tab.wait_for_timeout(700)
    shoot(tab, f"fleet-{scheme}")
    tab.goto(f"{url}/#prefixes")
    tab.get_by_role("treeitem", name="All prompts").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    tab.wait_for_timeout(700)
    shoot(tab, f"prefixes-{scheme}")
    tab.goto(f"{url}/#match")
    prompt = TOOLS[0][1] + tokens(9, 9_999)
    tab.locator("textarea").fill(" ".join(map(str, prompt)))
    tab.get_by_role("button", name="Explain the match").click()
    tab.get_by_role("region", name="Answer").wait_for()
    tab.wait_for_timeout(700)
    shoot(tab, f"match-{scheme}")
    tab.goto(f"{url}/#timeline")
    tab.get_by_role("button", name="added").click()
    tab.wait_for_timeout(700)
    shoot(tab, f"timeline-{scheme}")


def main() -> None:
    """Make all pictures."""
    with ExitStack() as opened:
        client = opened.enter_context(Client(stale_after=300.0))
        service = Service(client)
        page = Page(service)
        opened.callback(page.close)
        workers = fleet(opened)
        registered(service, workers)
        client.wait_live(timeout=PATIENCE)
        served = opened.enter_context(listening_on(app_routes(service, routes=page.routes)))
        url = served.url
        trouble(workers, client)
        page.trends = asked_of(service.traffic)
        playwright = opened.enter_context(sync_playwright())
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-background-networking"]
        )
        for scheme in ("light", "dark"):
            tab = browser.new_page(
                viewport={"width": 1280, "height": 760},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            pictures(tab, url, scheme)
        browser.close()


if __name__ == "__main__":
    main()
