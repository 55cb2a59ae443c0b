"""What tests of the service share: a client, a service of it, and requests to its routes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if not find_spec("httptools") or not find_spec("xxhash"):  # the extra "server"
    collect_ignore_glob = ["*.py"]
else:
    from kvindex import Client
    from kvindex.service.app import app_routes
    from kvindex.service.service import Service
    from tests.live import client_of
    from tests.service.http.in_process import Asker

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
