"""An HTTP server for tests that answers as told, on a port that the system chooses."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Reply: TypeAlias = "tuple[int, Any] | Callable[[BaseHTTPRequestHandler], None]"


class CannedServer:
    """Serves `replies` by path (without the query); everything else is 404."""

    def __init__(
        self, replies: dict[str, Reply] | None = None, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.replies: dict[str, Reply] = dict(replies or {})
        self.asked: list[tuple[str, str | None]] = []
        canned = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                canned.asked.append((self.path, self.headers["Authorization"]))
                reply = canned.replies.get(self.path.partition("?")[0], (404, {}))
                if callable(reply):
                    reply(self)
                    return
                status, value = reply
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients hang up: that is what some tests are about

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> CannedServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
