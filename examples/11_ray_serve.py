"""Ray Serve: replicas with fake engines behind kvindex's request router, and behind Ray's own.

python examples/11_ray_serve.py    # pip install -e '.[ray]'; it starts a Ray of its own, on CPU
"""

import time

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from kvindex.routing.adapters.ray_serve import routers
from kvindex.testing import FakeEngine, Workload

REPLICAS = 2
AT_ONCE = 4
REQUESTS = list(
    Workload(200, seed=3, system_prompts=40, system_tokens=200, turn_tokens=60, max_tokens=900)
)


class Engine:
    """A replica. Yours starts vLLM or SGLang where this one starts a fake."""

    def __init__(self) -> None:
        self.engine = FakeEngine(num_blocks=400)

    def record_routing_stats(self) -> dict[str, object]:
        """Report to Ray, and so to kvindex's router, where this engine publishes its events."""
        return {
            "kvindex": {
                "endpoint": self.engine.endpoint,
                "replay": self.engine.replay_endpoint,
            }
        }

    def __call__(self, request: dict[str, list[int]]) -> tuple[int, int]:
        served = self.engine.serve(request["token_ids"], new_tokens=request["new_tokens"])
        return served.hit_tokens, served.prompt_tokens


def deploy(name: str, config: RequestRouterConfig) -> DeploymentHandle:
    engine = serve.deployment(Engine).options(
        num_replicas=REPLICAS,
        ray_actor_options={"num_cpus": 0},
        request_router_config=config,
    )
    return serve.run(engine.bind(), name=name, route_prefix=None)


def hit_rate(handle: DeploymentHandle) -> float:
    """Serve the requests, several at once; return the hit rate."""
    hits = tokens = 0
    for start in range(0, len(REQUESTS), AT_ONCE):
        responses = [
            handle.remote({"token_ids": list(item.token_ids), "new_tokens": list(item.new_tokens)})
            for item in REQUESTS[start : start + AT_ONCE]
        ]
        for response in responses:
            hit_tokens, prompt_tokens = response.result(timeout_s=30.0)
            hits, tokens = hits + hit_tokens, tokens + prompt_tokens
    return hits / tokens


ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(proxy_location="Disabled")  # requests arrive by a handle here, not by HTTP
by_queue_length = hit_rate(deploy("rays", RequestRouterConfig()))

handle = deploy(
    "kvindexs",
    RequestRouterConfig(
        request_router_class="kvindex.routing.adapters.ray_serve.KVIndexRouter",
        request_router_kwargs={"policy": "kvindex"},
        request_routing_stats_period_s=0.5,  # how soon a new replica is known
    ),
)
# The first request makes the handle's router. Until engines are known, the queues decide.
handle.remote({"token_ids": [1], "new_tokens": []}).result(timeout_s=30.0)
(router,) = routers
while len(router.client.ranks) < REPLICAS:
    time.sleep(0.01)
router.client.wait_live(timeout=30.0)
by_prefix_and_load = hit_rate(handle)

print(f"shortest of two queues  {by_queue_length:.1%} of the prompts' tokens were cached")
print(f"kvindex                 {by_prefix_and_load:.1%}")
for _ in range(1_000):  # Ray notifies the router of the last answers a moment later
    if not router.statistics()["bookings"]["open"]:
        break
    time.sleep(0.01)
bookings = router.statistics()["bookings"]
print(f"bookings: {bookings['finished']} finished, {bookings['open']} open")
serve.shutdown()
ray.shutdown()
