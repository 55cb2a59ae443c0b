"""A Kubernetes API server for tests: lists and watches of pods, and the faults of real ones."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.canned import CannedServer

NAMESPACE = "llm"
POOL = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools/llama"


def pod(name: str, port: int, *, ip: str = "127.0.0.1", ready: bool = True, **more: Any) -> Any:
    """A pod as the API server shows it, as far as anybody reads it."""
    return {
        "metadata": {"name": name, "uid": more.get("uid", name), "labels": more.get("labels", LLM)},
        "spec": {
            "containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": port}]}]
        },
        "status": {
            "phase": more.get("phase", "Running"),
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


LLM = {"app": "vllm"}


class KubeServer(CannedServer):
    """Keeps pods, and tells those who watch of every change."""

    def __init__(
        self, *, token: str | None = None, page: int = 500, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(tls=tls)
        self.token = token
        self.page = page
        self.pods: dict[str, Any] = {}
        self.lists = 0
        self.watches: list[int] = []  # the versions from which somebody watched
        self.compacted = 0  # versions up to this one are forgotten
        self.gone_as_event = True
        self.is_slow = False
        self._version = 100
        self._history: list[tuple[int, str, Any]] = []
        self._changed = threading.Condition()
        self._dropped = 0
        self.replies[f"/api/v1/namespaces/{NAMESPACE}/pods"] = self._pods

    def put(self, *pods: Any) -> None:
        """Add pods, or change them."""
        for item in pods:
            name = item["metadata"]["name"]
            self._tell("MODIFIED" if name in self.pods else "ADDED", item)

    def delete(self, name: str) -> None:
        self._tell("DELETED", self.pods[name])

    def bookmark(self) -> None:
        self._tell("BOOKMARK", {"kind": "Pod", "metadata": {}})

    def compact(self) -> None:
        """Forget every version, so that no watch can go on from an older one."""
        with self._changed:
            self._version += 1
            self.compacted = self._version
            self._history.clear()

    def drop(self) -> None:
        """Hang up on everybody who watches."""
        with self._changed:
            self._dropped += 1
            self._changed.notify_all()

    def wait_watched(self, count: int, timeout: float) -> None:
        """Wait until there were so many watches."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.watches) >= count, timeout)

    def __enter__(self) -> KubeServer:
        return self

    def close(self) -> None:
        self.drop()
        super().close()

    def _tell(self, kind: str, item: Any) -> None:
        with self._changed:
            self._version += 1
            item = json.loads(json.dumps(item))
            item["metadata"]["resourceVersion"] = str(self._version)
            name = item["metadata"].get("name")
            if kind == "DELETED":
                del self.pods[name]
            elif name is not None:
                self.pods[name] = item
            self._history.append((self._version, kind, item))
            self._changed.notify_all()

    def _pods(self, request: BaseHTTPRequestHandler) -> None:
        query = {key: values[0] for key, values in parse_qs(urlsplit(request.path).query).items()}
        if self.token is not None and request.headers["Authorization"] != f"Bearer {self.token}":
            self._answer(request, 401, {"message": "Unauthorized"})
        elif query.get("watch"):
            self._watch(request, int(query["resourceVersion"]), query["labelSelector"])
        else:
            self._list(request, query)

    def _list(self, request: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        with self._changed:
            self.lists += 1
            items = [item for item in self.pods.values() if selected(item, query["labelSelector"])]
            start = int(query.get("continue", 0))
            end = start + min(int(query["limit"]), self.page)
            metadata = {"resourceVersion": str(self._version)}
            if end < len(items):
                metadata["continue"] = str(end)
        self._answer(request, 200, {"items": items[start:end], "metadata": metadata})

    def _watch(self, request: BaseHTTPRequestHandler, version: int, selector: str) -> None:
        with self._changed:
            self.watches.append(version)
            self._changed.notify_all()
            dropped = self._dropped
            is_gone = version < self.compacted
        if is_gone and not self.gone_as_event:
            self._answer(request, 410, {"message": "too old resource version"})
            return
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        if is_gone:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            self._send(request, {"type": "ERROR", "object": status})
            request.wfile.write(b"0\r\n\r\n")
        else:
            self._stream(request, version, selector, dropped)
        request.close_connection = True

    def _stream(
        self, request: BaseHTTPRequestHandler, version: int, selector: str, dropped: int
    ) -> None:
        """Send what changes after a version, until somebody hangs up."""
        while True:
            with self._changed:
                while self._dropped == dropped and not self._after(version):
                    assert self._changed.wait(60.0)
                if self._dropped > dropped:
                    return
                events = self._after(version)
            version = events[-1][0]
            for _, kind, item in events:
                if kind == "BOOKMARK" or selected(item, selector):
                    self._send(request, {"type": kind, "object": item})

    def _after(self, version: int) -> list[tuple[int, str, Any]]:
        return [event for event in self._history if event[0] > version]

    def _send(self, request: BaseHTTPRequestHandler, event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        pieces = [line[place : place + 7] for place in range(0, len(line), 7)]
        for piece in pieces if self.is_slow else [line]:
            request.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    def _answer(self, request: BaseHTTPRequestHandler, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


def selected(item: Any, selector: str) -> bool:
    labels = item["metadata"].get("labels", {})
    for term in selector.split(","):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True
