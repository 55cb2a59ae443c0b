"""A router in a FastAPI app: answers stream, and a client that disconnects releases its load.

python examples/12_fastapi_router.py                     # clients that disconnect, no server
python -m uvicorn --app-dir examples 12_fastapi_router:app            # needs uvicorn
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask

from kvindex import Rank, Worker, connect
from kvindex.routing import Booking, NoCandidateError, Router
from kvindex.testing import FakeEngine, Workload

NEW_TOKENS = 20


class Engines:
    """Fake engines as a router's upstream: prompts in, tokens out one by one."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self._engines = {engine.rank: engine for engine in engines}
        self.workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in engines]

    async def generate(self, rank: Rank, token_ids: list[int]) -> AsyncIterator[dict[str, int]]:
        served = self._engines[rank].serve(token_ids)
        for token in range(NEW_TOKENS):
            await asyncio.sleep(0.001)  # an engine needs time; other requests arrive
            yield {"token": token}
        yield {"cached_tokens": served.hit_tokens}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with ExitStack() as stack:
        fakes = [stack.enter_context(FakeEngine(f"vllm-{i}")) for i in range(3)]
        engines = Engines(fakes)
        async with connect(engines.workers) as client:
            await client.wait_live_async()
            app.state.engines, app.state.router = engines, Router(client)
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/generate")
async def generate(request: Request, token_ids: list[int]) -> StreamingResponse:
    state = request.app.state
    try:  # before the response begins, while there can be another one
        booking = state.router.reserve(token_ids)
    except NoCandidateError as error:
        raise HTTPException(503, str(error)) from error
    events = stream(booking, state.engines, token_ids)
    cancel = BackgroundTask(booking.cancel)  # if the stream never began; otherwise without effect
    return StreamingResponse(events, media_type="text/event-stream", background=cancel)


async def stream(booking: Booking, engines: Engines, token_ids: list[int]) -> AsyncIterator[str]:
    # Finished with the stream, or cancelled by the exception that ends this generator when the
    # client disconnects.
    with booking:
        yield event({"rank": str(booking.rank)})
        async for output in engines.generate(booking.rank, token_ids):
            if "token" in output:
                booking.output()  # the first one is the end of the prefill
                yield event(output)
            else:
                booking.finish(cached_tokens=output["cached_tokens"])


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def post(token_ids: list[int], leave_after: int = 1_000) -> int:
    """Post a prompt as a server would; return the events received before disconnecting."""
    events, gone, asked = 0, asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await gone.wait()
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": json.dumps(token_ids).encode()}

    async def send(message: Any) -> None:
        nonlocal events
        events += bool(message.get("body"))
        if events >= leave_after:
            gone.set()

    headers = [(b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/generate"}
    scope |= {"headers": headers, "query_string": b"", "http_version": "1.1", "scheme": "http"}
    await app(scope, receive, send)
    return events


async def main() -> None:
    async with lifespan(app):
        router: Router = app.state.router
        prompts = [list(request.token_ids) for request in Workload(40, seed=3)]
        leave = [3 if number % 4 == 0 else 1_000 for number in range(len(prompts))]
        asked = asyncio.gather(*map(post, prompts, leave))
        while not asked.done() and router.statistics()["decisions"] < len(prompts):
            await asyncio.sleep(0.001)
        for rank in router.ranks:
            print(f"{rank} while they come: {router.load(rank)}")
        events = await asked
        bookings = router.statistics()["bookings"]
        whole = sum(count == 1 + NEW_TOKENS for count in events)
        print(f"{whole} clients have the whole answer; {bookings['finished']} bookings finished")
        print(f"{len(events) - whole} clients went away; {bookings['cancelled']} were cancelled")
        for rank in router.ranks:
            print(f"{rank} afterwards: {router.load(rank)}")


if __name__ == "__main__":
    asyncio.run(main())
