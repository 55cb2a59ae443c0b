"""A real Ray Serve application on this machine: two replicas with fake engines, our router."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs kvindex[ray]")

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from kvindex import Rank
from kvindex.routing import Load
from kvindex.routing.adapters.ray_serve import routers
from tests.live import PATIENCE, until
from tests.routing.adapters.ray_apps import Engine
from tests.routing.adapters.traffic import REQUESTS

pytestmark = pytest.mark.adapter

OURS = "kvindex.routing.adapters.ray_serve.KVIndexRouter"
NUMBERS = itertools.count()
PROMPT = list(range(100))


@pytest.fixture
def deploy(cluster: None) -> Iterator[Callable[..., Any]]:
    """Return how to run two replicas, under our router or Ray's own."""

    def run(router: str | None, max_ongoing: int = 8, dp_size: int = 1, **kwargs: Any) -> Any:
        config = RequestRouterConfig(
            request_routing_stats_period_s=0.1,
            **({"request_router_class": router, "request_router_kwargs": kwargs} if router else {}),
        )
        engine = serve.deployment(Engine).options(
            num_replicas=2,
            max_ongoing_requests=max_ongoing,
            ray_actor_options={"num_cpus": 0},
            request_router_config=config,
            graceful_shutdown_timeout_s=0.1,
        )
        # Ray keeps a handle, and so its router, for each name of an application.
        names.append(f"app-{next(NUMBERS)}")
        return serve.run(engine.bind(dp_size), name=names[-1], route_prefix=None)

    names: list[str] = []
    yield run
    for name in names:
        serve.delete(name)


def router_of(handle: Any, ranks: int = 2) -> Any:
    """Return a new handle's router, when it follows so many ranks and all are live."""
    before = set(routers)
    handle.do_nothing.remote().result(timeout_s=PATIENCE)  # a router comes with the first request
    (router,) = set(routers) - before
    until(lambda: len(router.router.ranks) == ranks)
    router.client.wait_live(timeout=PATIENCE)
    return router


def ask(handle: Any, token_ids: Any, **more: Any) -> Any:
    return handle.remote({"token_ids": list(token_ids), **more})


def answer(handle: Any, token_ids: Any) -> dict[str, Any]:
    served: dict[str, Any] = ask(handle, token_ids).result(timeout_s=PATIENCE)
    return served


def serve_all(handle: Any, router: Any, at_once: int = 4) -> float:
    """Serve the workload; return the hit rate."""
    hits = tokens = 0
    requests = list(REQUESTS)
    for start in range(0, len(requests), at_once):
        batch = requests[start : start + at_once]
        calls = [ask(handle, r.token_ids, new_tokens=list(r.new_tokens)) for r in batch]
        for served in [call.result(timeout_s=PATIENCE) for call in calls]:
            hits, tokens = hits + served["hit_tokens"], tokens + served["prompt_tokens"]
            if router is not None:
                applied(router, served)
    return hits / tokens


def applied(router: Any, served: dict[str, Any]) -> None:
    """Wait until the router's index has what the engine had published with this answer."""
    rank = Rank(served["worker"], served["dp_rank"])
    until(
        router.client.statuses,
        lambda all_of: all_of[rank].seq is not None and all_of[rank].seq >= served["published"] - 1,
    )


def loads(router: Any) -> list[Load]:
    return [router.router.load(rank) for rank in router.router.ranks]


def wait_idle(router: Any) -> None:
    """Wait until no rank has load, and no booking is open."""
    until(lambda: {*loads(router)} <= {Load()} and not router.statistics()["bookings"]["open"])


def test_more_is_found_cached_than_by_power_of_two_and_all_load_returns(
    deploy: Callable[..., Any],
) -> None:
    by_queue_length = serve_all(deploy(None), None)
    handle = deploy(OURS)
    router = router_of(handle)
    hit_rate = serve_all(handle, router)
    print(f"hit rate {hit_rate:.3f}, power of two {by_queue_length:.3f}")
    assert hit_rate > by_queue_length + 0.03
    wait_idle(router)
    assert router.statistics()["unrouted"].keys() == {"no tokens"}  # Ray may ask again
    assert router.statistics()["bookings"]["finished"] == len(REQUESTS)


def test_a_request_is_load_from_the_choice_to_its_end(deploy: Callable[..., Any]) -> None:
    handle = deploy(OURS, prefill_rate=1e-3)
    router = router_of(handle)
    held = ask(handle, PROMPT, hold=True)
    until(lambda: sorted(loads(router)) == [Load(), Load(100, 1, 7)])
    held.cancel()
    wait_idle(router)
    # The prefill ends when its tokens have taken their time, since Ray shows no first token.
    router._bookings.prefill_rate = 1e6
    held = ask(handle, PROMPT, hold=True)
    until(lambda: any(load.open_requests and not load.queued_tokens for load in loads(router)))
    handle.broadcast("release").results(timeout_s=PATIENCE)
    held.result(timeout_s=PATIENCE)
    wait_idle(router)


def test_a_full_replica_is_passed_over_and_the_load_goes_along(
    deploy: Callable[..., Any],
) -> None:
    handle = deploy(OURS, max_ongoing=1)
    router = router_of(handle)
    first = answer(handle, PROMPT)
    applied(router, first)
    wait_idle(router)
    held = [ask(handle, PROMPT, hold=True) for _ in range(2)]
    until(lambda: [load.open_requests for load in loads(router)] == [1, 1])
    waiting = ask(handle, PROMPT)  # booked nowhere, or on one that may refuse it: never twice
    for call in held:
        call.cancel()
    waiting.result(timeout_s=PATIENCE)
    wait_idle(router)


def test_a_dead_replica_gives_its_load_back_and_the_next_one_is_followed(
    deploy: Callable[..., Any],
) -> None:
    handle = deploy(OURS)
    router = router_of(handle)
    prompt = range(2_000)  # long, so that what needs it goes where it is
    first = answer(handle, prompt)
    applied(router, first)
    busy, known = Rank(first["worker"], 0), set(router.router.ranks)
    held = ask(handle, range(2_100), hold=True)
    applied(router, {**first, "published": first["published"] + 1})  # so it was accepted there
    handle.die.remote({"token_ids": list(prompt)}).result(timeout_s=PATIENCE)
    with pytest.raises(ray.exceptions.RayActorError):
        held.result(timeout_s=PATIENCE)
    wait_idle(router)
    until(lambda: busy not in router.router.ranks and len(router.router.ranks) == 2)
    (new,) = set(router.router.ranks) - known
    router.client.wait_live(timeout=PATIENCE, ranks=[new])
    assert answer(handle, PROMPT)["prompt_tokens"] == 100
    wait_idle(router)


def test_an_unreadable_prompt_is_served_by_the_shortest_queue(
    deploy: Callable[..., Any],
) -> None:
    handle = deploy(OURS, tokens_of="tests.routing.adapters.ray_apps:token_ids_in_vain")
    router = router_of(handle)
    assert answer(handle, PROMPT)["prompt_tokens"] == 100
    assert router.statistics()["unrouted"].keys() == {"ValueError"}
    wait_idle(router)


def test_the_chosen_dp_rank_goes_along_with_the_request(deploy: Callable[..., Any]) -> None:
    handle = deploy(OURS, dp_size=2, rank_argument="dp_rank")
    router = router_of(handle, ranks=4)
    places = {}
    for start in range(0, 4_000, 1_000):
        served = answer(handle, range(start, start + 96))
        places[start] = served["worker"], served["dp_rank"]
        applied(router, served)
        wait_idle(router)
    assert len(set(places.values())) == 4, "each went where the least was given lately"
    for start, place in places.items():
        again = answer(handle, range(start, start + 100))
        assert (again["worker"], again["dp_rank"], again["hit_tokens"]) == (*place, 96)
    wait_idle(router)
