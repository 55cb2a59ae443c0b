"""A fake engine with an HTTP front, as vLLM and SGLang have one."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast

from kvindex.testing.engine import FakeEngine
from kvindex.testing.http_requests import RequestError
from kvindex.testing.http_routes import Response, Routes, metrics_text
from kvindex.testing.http_service import EngineKind, EngineService, HttpOptions
from kvindex.wire.errors import ConfigurationError

_MAX_BODY: Final = 8 << 20  # bytes
_IDLE: Final = 30.0  # seconds that a connection may be silent


class HttpEngine:
    """Answer over HTTP for fake engines: completions, and what an engine reports of itself.

    Every request is served by the cache of a rank, whose events are published as always. Routes:

    - `/v1/completions`, `/v1/chat/completions` (not streamed): `prompt` is text, token ids, or a
      list of either. `usage.prompt_tokens_details.cached_tokens` is what was hit.
      `cache_salt`, `model` (an adapter's name), the header `X-data-parallel-rank`,
      `prompt_logprobs` and `echo` with `logprobs` (which have the cache left unread) work as in
      the engines. The ranks serve in turn.
    - `/tokenize`, and with kind "vllm" and `HttpOptions.render` also `/v1/completions/render`,
      `/v1/chat/completions/render`.
      Tokens are bytes: id 97 is "a"; 256 begins every text; 257 to 262 are those of the chat
      template.
    - `/kv_event_sources`, `/version` (vLLM), `/server_info`, `/get_server_info` (SGLang).
    - `/v1/models`, `/metrics`, `/health`.

    Args:
        engine: the engine, or one for each of its DP ranks. It stays the caller's to close.
        kind: whose routes and answers; None for the engine of their dialect.
        model: the model's name.
        host: where to listen.
        port: where to listen; 0 has the operating system choose.
        options: what it reports of itself, and its faults.

    Raises:
        ConfigurationError: no engine, two of one rank, or an address that cannot be used.

    Thread safety: all methods. Each connection has a thread of its own.

    Examples:
        >>> import json
        >>> from urllib.request import Request, urlopen
        >>> with FakeEngine(block_size=4) as engine, HttpEngine(engine) as server:
        ...     body = json.dumps({"prompt": [1, 2, 3, 4, 5], "max_tokens": 1}).encode()
        ...     for _ in range(2):
        ...         with urlopen(Request(f"{server.url}/v1/completions", body)) as answer:
        ...             usage = json.load(answer)["usage"]
        >>> usage["prompt_tokens_details"]
        {'cached_tokens': 4}
    """

    def __init__(
        self,
        engine: FakeEngine | Sequence[FakeEngine],
        *,
        kind: EngineKind | None = None,
        model: str = "fake-model",
        host: str = "127.0.0.1",
        port: int = 0,
        options: HttpOptions | None = None,
    ) -> None:
        ranks = [engine] if isinstance(engine, FakeEngine) else list(engine)
        if not ranks or len({rank.rank.dp_rank for rank in ranks}) < len(ranks):
            raise ConfigurationError(f"engine: one for each DP rank, not {len(ranks)} of some rank")
        self._service = EngineService(
            ranks,
            kind=kind or ranks[0].dialect.engine,
            model=model,
            options=options or HttpOptions(),
        )
        try:
            self._server = _Server((host, port), Routes(self._service).answer)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"cannot listen at {host}:{port}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="kvindex-http-engine", daemon=True
        )
        self._thread.start()
        self._closed = False

    @property
    def url(self) -> str:
        """The beginning of every URL that it answers, with host and port."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def requests(self) -> int:
        """How many prompts were served."""
        return sum(counts["requests"] for counts in self._service.counters.values())

    def metrics(self) -> str:
        """Return what `/metrics` has."""
        return metrics_text(self._service)

    def close(self) -> None:
        """Stop answering: open connections are cut. Idempotent."""
        if not self._closed:
            self._closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> HttpEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """Holds what its connections' threads answer with, and the connections, to cut them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        answer: Callable[[str, str, dict[str, str], bytes], Response],
    ) -> None:
        self.answer = answer
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:  # that of the base asks the DNS for this machine's name
        if os.name != "nt":  # an engine that was killed can start again at its port at once
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client went away, or `server_close`
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for connection in tuple(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended meanwhile


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "kvindex-fake-engine"
    timeout = _IDLE
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if not 0 <= length <= _MAX_BODY:
            self.close_connection = True
            refusal = RequestError(413, f"a body has at most {_MAX_BODY} bytes, in one piece")
            self._send(Response.of_error(refusal))
        else:
            self._answer(self.rfile.read(length))

    def _answer(self, body: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = self.path.partition("?")[0]
        self._send(cast(_Server, self.server).answer(self.command, path, headers, body))

    def _send(self, answer: Response) -> None:
        self.send_response(answer.code)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's name
        pass  # a test's output is its own
