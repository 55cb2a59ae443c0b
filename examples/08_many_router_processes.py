"""A router of several processes, as uvicorn or gunicorn start them, fed by one subscriber.

python examples/08_many_router_processes.py                              # three fake engines
python examples/08_many_router_processes.py a=tcp://h:5557 b=tcp://i:5557 …   # ask about yours
"""

import asyncio
import http.client
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from kvindex import Worker, replicas
from kvindex.testing import FakeEngine, Workload

PROCESSES = 3
CLIENTS = 8
REQUESTS = Workload(60, seed=4, max_tokens=500)


# A router process ------------------------------------------------------------------------------


def run_router(listener: socket.socket, path: str) -> None:
    """Answer HTTP on a socket that all router processes share, until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # until `serve` has its own way
    # Join in the new process: a replica's thread does not survive a fork.
    with replicas.join(path) as replica:
        asyncio.run(serve(listener, replica))


async def serve(listener: socket.socket, replica: replicas.Replica) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with await asyncio.start_server(partial(answer, replica), sock=listener):
        await stopped.wait()


async def answer(
    replica: replicas.Replica, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    token_ids = json.loads(await reader.readexactly(length))
    best = replica.match(token_ids, recomputed=1).best  # some microseconds: no need for a thread
    answer = {
        "process": os.getpid(),
        "route": str(best.rank) if best else "anywhere",
        "tokens": best.tokens if best else 0,
        # Answers continue after the subscriber's death; the state shows how far to trust them.
        "state": best.state if best else None,
    }
    body = json.dumps(answer).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
    writer.write(body)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


# The process that subscribes, and starts the others ----------------------------------------------


def ask(address: tuple[str, int], token_ids: list[int]) -> dict[str, object]:
    """Send a request to the router, as a client."""
    connection = http.client.HTTPConnection(*address, timeout=20)
    try:
        connection.request("POST", "/route", json.dumps(token_ids))
        answer: dict[str, object] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def main() -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())  # only this user may enter
        path = f"{folder}/kvindex.sock"
        if len(sys.argv) > 1:
            workers = [Worker(n, e) for n, _, e in (a.partition("=") for a in sys.argv[1:])]
        else:
            engines = [stack.enter_context(FakeEngine(f"vllm-{i}")) for i in range(3)]
            workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in engines]
            for number, request in enumerate(REQUESTS):
                engines[number % 3].serve(request.token_ids)
        server = stack.enter_context(replicas.FanOut(workers, path))
        server.client.wait_live()

        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))
        start = multiprocessing.get_context("spawn").Process
        routers = [start(target=run_router, args=(listener, path)) for _ in range(PROCESSES)]
        for router in routers:
            router.start()
        while server.statistics()["replicas"] < PROCESSES:
            time.sleep(0.01)

        prompts = [list(request.token_ids) for request in REQUESTS]
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(partial(ask, listener.getsockname()), prompts))

        served = Counter(answer["process"] for answer in answers)
        for process, count in served.items():
            print(f"process {process} answered {count} requests")
        right = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            best = server.client.match(prompt, recomputed=1).best
            right += answer["tokens"] == (best.tokens if best else 0)
        print(f"{right} of {len(answers)} answers are the subscriber's own")
        print(f"replicas: {server.statistics()['replicas']}, subscribers: 1")

        for router in routers:
            router.terminate()
        for router in routers:
            router.join()


if __name__ == "__main__":
    main()
