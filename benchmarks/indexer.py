"""NVIDIA Dynamo's standalone indexer: a service that subscribes over ZMQ and answers over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.process import pinned
from benchmarks.workload import BLOCK_SIZE

__all__ = ["Indexer"]

_MODEL = "benchmark"
_INSTANCE = 1
_START_SECONDS = 30.0
_POLL = 0.005


class Indexer:
    """The running service.

    Args:
        python: the interpreter of its virtual environment.
        threads: of its index; 1 is its own single-threaded form, 4 its default.
        cpus: the cores that it may use; all by default.
    """

    def __init__(self, python: str, *, threads: int, cpus: Iterable[int] | None = None) -> None:
        self._port = _free_port()
        command = [python, "-m", "dynamo.indexer"]
        command += ["--port", str(self._port), "--threads", str(threads)]
        self._process = subprocess.Popen(
            pinned(command, cpus), env={**os.environ, "DYN_LOG": "error"}
        )
        self._http = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            self._wait_up()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._process.pid

    def register(self, endpoints: Iterable[str]) -> None:
        """Subscribe to the publishers of one worker, one for each rank."""
        for rank, endpoint in enumerate(endpoints):
            self._post(
                "/register",
                instance_id=_INSTANCE,
                endpoint=endpoint,
                model_name=_MODEL,
                block_size=BLOCK_SIZE,
                dp_rank=rank,
            )

    def depths(self, tokens: list[int]) -> dict[int, int]:
        """Return the leading blocks of a prompt that each rank holds."""
        scores = self._post("/query", token_ids=tokens, model_name=_MODEL)["scores"]
        ranks = scores.get(str(_INSTANCE), {})
        return {int(rank): tokens // BLOCK_SIZE for rank, tokens in ranks.items()}

    def wait(self, sentinel: list[int], ranks: int, timeout: float) -> None:
        """Return when every rank holds the sentinel: all that was sent before is applied."""
        deadline = time.perf_counter() + timeout
        while len(self.depths(sentinel)) < ranks:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"Dynamo's indexer has not drained within {timeout} s")
            time.sleep(_POLL)

    def close(self) -> None:
        """End the service."""
        self._http.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        self._http.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = self._http.getresponse()
        text = response.read()
        if response.status >= 300:
            raise RuntimeError(f"Dynamo's indexer: {path} gave {response.status}: {text!r}")
        value: dict[str, Any] = json.loads(text)
        return value

    def _wait_up(self) -> None:
        deadline = time.perf_counter() + _START_SECONDS
        while True:
            try:
                self._http.request("GET", "/health")
                self._http.getresponse().read()
                return
            except OSError:
                self._http.close()
                if self._process.poll() is not None or time.perf_counter() > deadline:
                    raise RuntimeError("Dynamo's indexer does not start") from None
                time.sleep(0.05)


def _free_port() -> int:
    """A port that was free a moment ago: the service cannot tell which one it chose itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
