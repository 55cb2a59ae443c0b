"""What tests of the service share: a client, a service of it, and requests to its routes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if not find_spec("httptools"):  # the extra "server"
    collect_ignore_glob = ["*.py"]
else:
    from kvindex import Client
    from kvindex.service.app import app_routes
    from kvindex.service.service import Service
    from tests.live import PATIENCE, client_of
    from tests.service.http.scenes import Asker, ManyRanks, listening_on, page_of

    @pytest.fixture
    def client() -> Iterator[Client]:
        with client_of() as client:
            yield client

    @pytest.fixture
    def now() -> list[float]:
        """The time of `service`, in seconds: a test moves it."""
        return [0.0]

    @pytest.fixture
    def service(client: Client, now: list[float]) -> Service:
        return Service(client, patience=30.0, clock=lambda: now[0])

    @pytest.fixture
    def ask(service: Service) -> Asker:
        """Requests to the routes of `service`."""
        return Asker(app_routes(service))

    @pytest.fixture(scope="module")
    def browser() -> Iterator[Any]:
        """A headless Chromium."""
        playwright = pytest.importorskip("playwright.sync_api")
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        if chromium is None:
            pytest.skip("needs chromium")
        with playwright.sync_playwright() as started:
            arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            running = started.chromium.launch(executable_path=chromium, args=arguments)
            playwright.expect.set_options(timeout=PATIENCE * 1000)
            yield running
            running.close()

    @pytest.fixture(scope="module")
    def many() -> Iterator[str]:
        """The URL of a page of 512 ranks."""
        page = page_of(ManyRanks(512))
        with listening_on(page.routes) as served:
            yield served.url
        page.close()
