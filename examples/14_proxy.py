"""A KV-aware proxy in 40 lines; without arguments, before three fake engines, with some chats.

python examples/14_proxy.py                                   # try it
python examples/14_proxy.py http://h1:8000 http://h2:8000 …   # before your engines, at port 8080
"""

import json
import sys
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

from kvindex import Client, connect
from kvindex.routing import NoCandidateError, Router, reads_cache
from kvindex.testing import FakeEngine, HttpEngine


def post(url: str, body: bytes, **headers: str) -> bytes:
    headers["Content-Type"] = "application/json"
    with urlopen(Request(url, body, headers), timeout=600) as answer:
        return bytes(answer.read())


class Proxy(BaseHTTPRequestHandler):
    client: Client
    router: Router

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            status, answer = 200, self.forward(body)
        except (NoCandidateError, OSError) as error:  # no engine, or none that answers
            status, answer = 503, json.dumps({"error": str(error)}).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def forward(self, body: bytes) -> bytes:
        request = json.loads(body)
        any_of_them = min(self.client.live_ranks(), default=self.client.ranks[0]).worker
        tokens = json.loads(post(f"http://{any_of_them}/tokenize", body))["tokens"]
        with self.router.reserve(tokens, reads_cache=reads_cache(request)) as booking:
            headers = {"X-data-parallel-rank": str(booking.rank.dp_rank)}
            answer = post(f"http://{booking.rank.worker}{self.path}", body, **headers)
            usage = json.loads(answer)["usage"]["prompt_tokens_details"] or {}
            booking.finish(usage.get("cached_tokens"))
        return answer


def serve(urls: list[str], port: int, stack: ExitStack) -> ThreadingHTTPServer:
    Proxy.client = stack.enter_context(connect(urls))  # workers are named HOST:PORT of the URL
    Proxy.client.wait_live()
    Proxy.router = Router(Proxy.client)
    return stack.enter_context(ThreadingHTTPServer(("127.0.0.1", port), Proxy))


def send_chats(proxy: str) -> None:
    """Send the turns of six chats, and print how much of each prompt was cached."""
    asked = cached = 0
    for turn in range(4):
        for chat in range(6):
            system = f"You are assistant {chat % 3}. " * 20
            messages = [{"role": "system", "content": system}]
            messages += [{"role": "user", "content": f"{chat}: go on."}] * (turn + 1)
            body = {"model": "fake-model", "messages": messages, "max_tokens": 1}
            usage = json.loads(post(f"{proxy}/v1/chat/completions", json.dumps(body).encode()))[
                "usage"
            ]
            asked += usage["prompt_tokens"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
    print(f"24 prompts of {asked} tokens; the engines had {cached} of them cached")


with ExitStack() as stack:
    if urls := sys.argv[1:]:
        serve(urls, 8080, stack).serve_forever()
    engines = [stack.enter_context(FakeEngine(f"vllm-{number}")) for number in range(3)]
    servers = [stack.enter_context(HttpEngine(engine)) for engine in engines]
    server = serve([engine_server.url for engine_server in servers], 0, stack)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    send_chats(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()
    print(Proxy.router.statistics()["funnel"]["reported"])
