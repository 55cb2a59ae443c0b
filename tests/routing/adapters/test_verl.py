"""The balancer as verl makes and calls it, without verl and Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex import ConfigurationError, Worker
from kvindex.routing.adapters.verl import KVAwareBalancer
from kvindex.testing import FakeEngine
from tests.live import caught_up

pytestmark = pytest.mark.adapter

PROMPT = list(range(200))
FIRST, SECOND, THIRD = SERVERS = [f"10.0.0.{n}:8000" for n in range(3)]


class Site:
    """A balancer before engines, at the addresses by which verl names them.

    Here an engine is its own handle.
    """

    def __init__(self, engines: list[FakeEngine]) -> None:
        self.engines = dict(zip(SERVERS, engines, strict=True))

    def start(self, *, servers: Any = None, **config: Any) -> KVAwareBalancer:
        NAMED["worker_of"] = self.worker_of
        config = {"worker_of": f"{__name__}:worker_of", "router": {"seed": 1}, **config}
        self.balancer = KVAwareBalancer(self.engines if servers is None else servers, config)
        return self.balancer

    def worker_of(self, server_id: str, handle: Any) -> Worker:
        engine = self.engines[server_id]
        return Worker("any name", engine.endpoint, replay=engine.replay_endpoint)

    def warm(self, server_id: str) -> None:
        """Serve the prompt, and wait until the events of all engines are in the index."""
        self.engines[server_id].serve(PROMPT)
        renamed = [
            SimpleNamespace(rank=(server_id, 0), published=engine.published)
            for server_id, engine in self.engines.items()
        ]
        caught_up(self.balancer._client, *renamed)  # type: ignore[arg-type]

    def acquire(self, request: str = "r", prompt: Any = PROMPT, **options: Any) -> str:
        """Acquire a server for a request; return its id."""
        return self.balancer.acquire_server(request, prompt_ids=prompt, **options)[0]


NAMED: dict[str, Callable[[str, Any], Worker]] = {}


def worker_of(server_id: str, handle: Any) -> Worker:
    return NAMED["worker_of"](server_id, handle)


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        site = Site([stack.enter_context(FakeEngine(f"e{n}")) for n in range(3)])
        yield site
        site.balancer._client.close()


def test_a_prompt_goes_to_the_server_that_holds_it(site: Site) -> None:
    balancer = site.start()
    site.warm(SECOND)
    acquired = balancer.acquire_server("r1", prompt_ids=PROMPT)
    assert acquired == (SECOND, site.engines[SECOND])


def test_a_request_whose_engine_reads_no_cache_goes_by_load(site: Site) -> None:
    balancer = site.start()
    site.warm(SECOND)
    assert set(balancer.require_acquire_fields()) == {"prompt_ids", "sampling_params"}
    parameters = {"prompt_logprobs": 0}
    servers = [site.acquire(f"r{n}", sampling_params=parameters) for n in range(3)]
    assert sorted(servers) == SERVERS


def test_load_is_counted_until_it_is_released(site: Site) -> None:
    balancer = site.start()
    servers = [site.acquire(f"r{n}", [n] * 50) for n in range(6)]
    assert Counter(servers) == dict.fromkeys(SERVERS, 2)
    assert balancer.get_total_inflight() == 6
    assert balancer.get_status()["servers"] == dict.fromkeys(SERVERS, 2)
    for n, server_id in enumerate(servers):
        for _ in range(2):  # once is enough
            balancer.release_server(server_id, f"r{n}")
    status = balancer.get_status()
    assert status["total_inflight"] == 0
    ranks = status["routing"]["ranks"].values()
    assert [rank["open_requests"] + rank["queued_tokens"] for rank in ranks] == [0, 0, 0]


def test_the_turns_of_a_request_stay_on_their_server(site: Site) -> None:
    balancer = site.start()
    first = site.acquire("r1")
    other = next(server_id for server_id in SERVERS if server_id != first)
    site.warm(other)
    assert site.acquire("r1") == first
    assert balancer.get_status()["servers"][first] == 2
    assert site.acquire("r2") == other
    cleared = balancer.clear_sticky_cache()
    assert cleared["cleared_entries"] == 2
    assert cleared["server_loads"][first] == 2
    assert site.acquire("r1") == other


def test_turns_need_not_be_sticky(site: Site) -> None:
    site.start(sticky=False)
    first = site.acquire()
    other = next(server_id for server_id in SERVERS if server_id != first)
    site.warm(other)
    assert site.acquire() == other


def test_servers_leave_with_their_requests_and_return_anew(site: Site) -> None:
    balancer = site.start(servers={})
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        site.acquire()
    for _ in range(2):  # verl removes hybrid servers while it trains, and adds them again
        for handle in ("old", "new"):  # a server that is added again starts anew
            balancer.add_servers({FIRST: handle})
            assert balancer.get_total_inflight() == 0
            assert balancer.acquire_server("r", prompt_ids=PROMPT) == (FIRST, handle)
            assert balancer.get_total_inflight() == 1
        balancer.add_servers({SECOND: "other"})
        balancer.remove_servers([FIRST, "unknown"])
        assert balancer.get_all_servers() == [SECOND]
        assert balancer.get_total_inflight() == 0
        balancer.release_server(FIRST, "r")  # late
        assert balancer.acquire_server("r", prompt_ids=PROMPT) == (SECOND, "other")
        balancer.remove_servers([SECOND])
    assert balancer.get_status()["routing"]["bookings"]["open"] == 0


def test_a_prompt_that_cannot_be_read_still_gets_a_server(site: Site) -> None:
    balancer = site.start()
    site.warm(SECOND)
    servers = {site.acquire(f"r{n}", [0.5] * 64) for n in range(3)}
    servers |= {site.acquire("none", None)}
    assert servers == set(SERVERS)
    assert balancer.get_status()["routing"]["unread"] == 3


def test_the_yaml_has_the_addresses_of_a_hosts_events() -> None:
    worker = {"endpoint": "tcp://{host}:5557", "replay": "tcp://{host}:5657", "dp_size": 2}
    balancer = KVAwareBalancer({"127.0.0.1:40001": None}, {"worker": worker})
    with balancer._client as client:
        ranks = [f"127.0.0.1:40001/{number}" for number in range(2)]
        assert list(balancer.get_status()["events"]) == ranks
        endpoints = ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
        assert [client.status(rank).endpoint for rank in ranks] == endpoints


def test_a_yaml_without_events_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker_of"):
        KVAwareBalancer({}, {"router_class": "kvindex.routing.adapters.verl.KVAwareBalancer"})
