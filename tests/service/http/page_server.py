"""The page of a service in this process, at a port that the system chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvindex import Client, Rank, State
from kvindex.service.app import app_routes
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.http.guards import Guard
from kvindex.service.http.messages import Route
from kvindex.service.http.site import Site
from kvindex.service.page import Page
from kvindex.service.service import Service
from kvindex.service.traffic import Traffic
from kvindex.testing import FakeEngine
from tests.live import worker_of
from tests.service.http.listening import listening_on
from tests.service.test_fleet_overview import Source, status_of

MODEL = Partition("llama")


class ManyRanks(Source):
    """Ranks without engines, for what would take hundreds of sockets."""

    def __init__(self, number: int) -> None:
        states = [State.LIVE] * 12 + [State.STALE, State.REPAIRING, State.CONNECTING, State.SYNCING]
        super().__init__(
            *(
                status_of(
                    Rank(f"vllm-{n // 8}", n % 8),
                    states[n * 7 % 16],
                    reason="" if n * 7 % 16 < 12 else "a reason in words",
                    complete=n % 5 != 0,
                    losses=n % 3,
                )
                for n in range(number)
            )
        )
        self.source = self
        self.traffic = Traffic()
        self.missing: Any = lambda: {"http://vllm-99:8000": "nothing listens there"}
        self.catalog = Catalog(
            Registration(
                instance_id=rank.worker, partition=MODEL, dp_rank=rank.dp_rank, endpoint="tcp://h:1"
            )
            for rank in self.present
        )

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(sorted(self.present))

    def statuses(self) -> dict[Rank, Any]:
        return dict(self.present)

    def on_change(self, callback: object) -> Any:
        return lambda: None

    def explain(self, token_ids: list[int], **options: Any) -> Any:
        return self.index.explain(token_ids, **options)


def page_of(ranks: ManyRanks, **options: Any) -> Page:
    """Return a page of ranks without a service."""
    return Page(ranks, **options)  # type: ignore[arg-type]


def register(
    service: Service, *engines: FakeEngine, partition: Partition = MODEL, **details: Any
) -> None:
    for engine in engines:
        service.registry.add(worker_of(engine), partition, **details)


@contextmanager
def paged(*engines: FakeEngine, **details: Any) -> Iterator[tuple[Page, Client, str]]:
    """Serve a page of these engines, all of them registered; give its client and its URL too."""
    with Client(probe_interval=0.3, stale_after=20.0) as client:
        service = Service(client)
        register(service, *engines, **details)
        page = Page(service)
        try:
            with at_a_port(app_routes(service, routes=page.routes)) as url:
                yield page, client, url
        finally:
            page.close()


@contextmanager
def at_a_port(routes: Sequence[Route]) -> Iterator[str]:
    """Serve routes from a thread; give their URL."""
    with listening_on(Site(routes, Guard())) as port:
        yield f"http://127.0.0.1:{port}"
