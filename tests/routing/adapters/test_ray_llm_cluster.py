"""Ray's own `KVAwareRouter` in a real cluster: two ingresses, two replicas, kvindex in between."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="needs kvindex[ray]")
pytest.importorskip("pyarrow", reason="Ray's KVAwareRouter needs it")

from ray import serve
from ray.serve.config import RequestRouterConfig

from tests.live import PATIENCE, until
from tests.routing.adapters.ray_llm_apps import Ingress, LLMServer
from tests.routing.adapters.traffic import REQUESTS, in_turn

pytestmark = pytest.mark.adapter

RAYS = "ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router.KVAwareRouter"


def test_rays_router_finds_more_than_turns_do_and_every_ingress_has_all_load_back(
    cluster: None,
) -> None:
    server = serve.deployment(LLMServer).options(
        num_replicas=2,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(
            request_router_class=RAYS, request_routing_stats_period_s=0.1
        ),
        graceful_shutdown_timeout_s=0.1,
    )
    ingress = serve.deployment(Ingress).options(
        name="LLMRouter",
        num_replicas=2,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=0.1,
    )
    handle: Any = serve.run(ingress.bind(server.bind()), name="llm", route_prefix=None)

    def states() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = handle.broadcast("state").results(timeout_s=PATIENCE)
        return found

    until(lambda: [state["live"] for state in states()] == [2, 2])
    hits = tokens = 0
    for request in REQUESTS:
        served = handle.remote(list(request.token_ids), list(request.new_tokens))
        hit_tokens, prompt_tokens = served.result(timeout_s=PATIENCE)
        hits, tokens = hits + hit_tokens, tokens + prompt_tokens
    hit_rate = hits / tokens
    print(f"hit rate {hit_rate:.3f}, in turn {in_turn():.3f}")
    assert hit_rate > in_turn() + 0.03
    until(lambda: [state["busy"] for state in states()] == [0, 0])
    for state in states():
        assert state["service"] == "kvindex.routing.adapters.ray_llm"
        assert state["bookings"]["finished"] + state["bookings"]["cancelled"] > 0
    # Each of them has booked what it chose itself, and what the other one told of.
    assert sum(state["bookings"]["finished"] for state in states()) > len(REQUESTS)
    serve.delete("llm")
