"""The balancer as verl makes and asks it: from YAML, as a Ray actor, by verl's own client."""

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


class Servers:
    """Engines behind the addresses that verl knows them by; here an engine is its own handle."""

    def __init__(self, engines: list[FakeEngine], stack: ExitStack) -> None:
        self._stack = stack
        self.engines = {f"10.0.0.{n}:8000": engine for n, engine in enumerate(engines)}
        self.served: Counter[str] = Counter()

    def worker_of(self, server_id: str, handle: Any) -> Worker:
        engine = self.engines[server_id]
        return Worker("any name", engine.endpoint, replay=engine.replay_endpoint)

    def balancer(self, *, servers: Any = None, **config: Any) -> KVAwareBalancer:
        NAMED["worker_of"] = self.worker_of
        config = {"worker_of": f"{__name__}:worker_of", "router": {"seed": 1}, **config}
        balancer = KVAwareBalancer(self.engines if servers is None else servers, config)
        self._stack.callback(balancer._client.close)
        return balancer

    def told(self, balancer: Any) -> None:
        """Wait until the events of all engines are in the balancer's index."""
        renamed = [
            SimpleNamespace(rank=(server_id, 0), published=engine.published)
            for server_id, engine in self.engines.items()
        ]
        caught_up(balancer._client, *renamed)  # type: ignore[arg-type]


NAMED: dict[str, Callable[[str, Any], Worker]] = {}


def worker_of(server_id: str, handle: Any) -> Worker:
    return NAMED["worker_of"](server_id, handle)


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers([stack.enter_context(FakeEngine(f"e{n}")) for n in range(3)], stack)


def test_a_prompt_goes_where_it_is_held(servers: Servers) -> None:
    balancer = servers.balancer()
    home = "10.0.0.1:8000"
    servers.engines[home].serve(PROMPT)
    servers.told(balancer)
    server_id, handle = balancer.acquire_server("r1", prompt_ids=PROMPT)
    assert (server_id, handle) == (home, servers.engines[home])


def test_a_request_whose_engine_reads_no_cache_goes_by_load(servers: Servers) -> None:
    balancer = servers.balancer()
    home = "10.0.0.1:8000"
    servers.engines[home].serve(PROMPT)
    servers.told(balancer)
    assert set(balancer.require_acquire_fields()) == {"prompt_ids", "sampling_params"}
    asked = [
        balancer.acquire_server(f"r{n}", prompt_ids=PROMPT, sampling_params={"prompt_logprobs": 0})
        for n in range(3)
    ]
    assert {server_id for server_id, _ in asked} == set(servers.engines)


def test_load_is_counted_until_it_is_released(servers: Servers) -> None:
    balancer = servers.balancer()
    got = [balancer.acquire_server(f"r{n}", prompt_ids=[n] * 50)[0] for n in range(6)]
    assert Counter(got) == dict.fromkeys(servers.engines, 2)
    assert balancer.get_total_inflight() == 6
    assert balancer.get_status()["servers"] == dict.fromkeys(servers.engines, 2)
    for n, server_id in enumerate(got):
        balancer.release_server(server_id, f"r{n}")
        balancer.release_server(server_id, f"r{n}")  # once is enough
    status = balancer.get_status()
    assert status["total_inflight"] == 0
    ranks = status["routing"]["ranks"].values()
    assert [rank["open_requests"] + rank["queued_tokens"] for rank in ranks] == [0, 0, 0]


def test_the_turns_of_a_request_stay_on_their_server(servers: Servers) -> None:
    balancer = servers.balancer()
    first, _ = balancer.acquire_server("r1", prompt_ids=PROMPT)
    other = next(server_id for server_id in servers.engines if server_id != first)
    servers.engines[other].serve(PROMPT)
    servers.told(balancer)
    assert balancer.acquire_server("r1", prompt_ids=PROMPT)[0] == first
    assert balancer.get_status()["servers"][first] == 2
    assert balancer.acquire_server("r2", prompt_ids=PROMPT)[0] == other
    cleared = balancer.clear_sticky_cache()
    assert cleared["cleared_entries"] == 2
    assert cleared["server_loads"][first] == 2
    assert balancer.acquire_server("r1", prompt_ids=PROMPT)[0] == other


def test_turns_need_not_be_sticky(servers: Servers) -> None:
    balancer = servers.balancer(sticky=False)
    first, _ = balancer.acquire_server("r1", prompt_ids=PROMPT)
    other = next(server_id for server_id in servers.engines if server_id != first)
    servers.engines[other].serve(PROMPT)
    servers.told(balancer)
    assert balancer.acquire_server("r1", prompt_ids=PROMPT)[0] == other


def test_servers_come_and_go_with_their_requests(servers: Servers) -> None:
    balancer = servers.balancer(servers={})
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        balancer.acquire_server("r1", prompt_ids=PROMPT)
    one, two, _ = servers.engines
    for _ in range(2):  # verl takes hybrid servers away while it trains, and gives them back
        balancer.add_servers({one: "handle"})
        assert balancer.acquire_server("r1", prompt_ids=PROMPT) == (one, "handle")
        assert balancer.get_total_inflight() == 1
        balancer.add_servers({two: "other"})
        balancer.remove_servers([one, "unheard-of"])
        assert balancer.get_all_servers() == [two]
        assert balancer.get_total_inflight() == 0
        balancer.release_server(one, "r1")  # late
        assert balancer.acquire_server("r1", prompt_ids=PROMPT) == (two, "other")
        balancer.remove_servers([two])
    assert balancer.get_status()["routing"]["bookings"]["open"] == 0


def test_a_server_that_is_added_again_starts_anew(servers: Servers) -> None:
    balancer = servers.balancer()
    server_id, _ = balancer.acquire_server("r1", prompt_ids=PROMPT)
    balancer.add_servers({server_id: "a new handle"})
    assert balancer.get_total_inflight() == 0
    assert balancer.acquire_server("r1", prompt_ids=PROMPT) == (server_id, "a new handle")


def test_a_prompt_that_cannot_be_read_still_gets_a_server(servers: Servers) -> None:
    balancer = servers.balancer()
    servers.engines["10.0.0.1:8000"].serve(PROMPT)
    servers.told(balancer)
    got = {balancer.acquire_server(f"r{n}", prompt_ids=[0.5] * 64)[0] for n in range(3)}
    got |= {balancer.acquire_server("none")[0]}
    assert got == set(servers.engines)
    assert balancer.get_status()["routing"]["unread"] == 3


def test_the_yaml_says_where_the_events_of_a_host_are() -> None:
    worker = {"endpoint": "tcp://{host}:5557", "replay": "tcp://{host}:5657", "dp_size": 2}
    balancer = KVAwareBalancer({"127.0.0.1:40001": None}, {"worker": worker})
    with balancer._client:
        ranks = [f"127.0.0.1:40001/{number}" for number in range(2)]
        assert list(balancer.get_status()["events"]) == ranks
        assert [balancer._client.status(rank).endpoint for rank in ranks] == [
            "tcp://127.0.0.1:5557",
            "tcp://127.0.0.1:5558",
        ]


def test_a_yaml_without_events_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker_of"):
        KVAwareBalancer({}, {"router_class": "kvindex.routing.adapters.verl.KVAwareBalancer"})
