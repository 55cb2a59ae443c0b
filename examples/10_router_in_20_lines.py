"""A router in 20 lines: where each request goes, why, and what the engine found."""

from contextlib import ExitStack

from kvindex import Worker, connect
from kvindex.routing import Router
from kvindex.testing import FakeEngine, Workload

with ExitStack() as stack:
    engines = {e.rank: stack.enter_context(e) for e in map(FakeEngine, ("vllm-0", "vllm-1"))}
    workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in engines.values()]
    client = stack.enter_context(connect(workers))
    client.wait_live()
    router = Router(client)
    for request in Workload(40, seed=2):
        with router.reserve(request.token_ids) as booking:  # chosen, and its load booked
            served = engines[booking.rank].serve(request.token_ids)
            booking.first_token()  # the prefill is done
            booking.finish(cached_tokens=served.hit_tokens)  # releases the rest of the load
        print(booking.decision.reason)
    print(router.statistics()["funnel"]["reported"])
