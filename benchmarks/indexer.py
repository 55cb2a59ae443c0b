"""Indexers as services: they subscribe over ZMQ and answer over HTTP, in the same words."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.process import pinned
from benchmarks.workload import BLOCK_SIZE

MODEL = "benchmark"
_INSTANCE = 1
_START_SECONDS = 30.0
_POLL = 0.005


class Footprint(NamedTuple):
    """What a service takes of the machine, all its processes together."""

    threads: int
    mebibytes: float  # resident


class Indexer:
    """A running service.

    Args:
        command: starts it; it listens at `port`.
        port: of its HTTP.
        cpus: the cores that it may use; all by default.
    """

    def __init__(self, command: list[str], port: int, *, cpus: Iterable[int] | None = None) -> None:
        self.address = "127.0.0.1", port
        self._worker_ranks = 0
        self._process = subprocess.Popen(
            pinned(command, cpus), env={**os.environ, "DYN_LOG": "error"}, stdout=subprocess.DEVNULL
        )
        self._http = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            self._wait_up()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._process.pid

    def register(self, endpoints: Sequence[str], worker_ranks: int = 0) -> None:
        """Subscribe to the publishers, one for each rank.

        Args:
            endpoints: of the publishers.
            worker_ranks: ranks of each worker; 0: one worker has all.
        """
        self._worker_ranks = worker_ranks or len(endpoints)
        for rank, endpoint in enumerate(endpoints):
            self._post(
                "/register",
                instance_id=_INSTANCE + rank // self._worker_ranks,
                endpoint=endpoint,
                model_name=MODEL,
                block_size=BLOCK_SIZE,
                dp_rank=rank % self._worker_ranks,
            )

    def depths(self, tokens: list[int]) -> dict[int, int]:
        """Return the leading blocks of a prompt that each rank holds."""
        scores = self._post("/query", token_ids=tokens, model_name=MODEL)["scores"]
        return {
            (int(instance) - _INSTANCE) * self._worker_ranks + int(rank): tokens // BLOCK_SIZE
            for instance, ranks in scores.items()
            for rank, tokens in ranks.items()
        }

    def wait(self, sentinel: list[int], ranks: int, timeout: float) -> None:
        """Return when every rank holds the sentinel: all that was sent before is applied."""
        deadline = time.perf_counter() + timeout
        while len(self.depths(sentinel)) < ranks:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"the indexer has not drained within {timeout} s")
            time.sleep(_POLL)

    def footprint(self) -> Footprint:
        """Return its threads and memory now; Linux only."""
        threads, kibibytes = 0, 0
        for pid in _family(self.pid):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                name, _, value = line.partition(":")
                threads += int(value) if name == "Threads" else 0
                kibibytes += int(value.split()[0]) if name == "VmRSS" else 0
        return Footprint(threads, kibibytes / 1024)

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
            raise RuntimeError(f"the indexer: {path} gave {response.status}: {text!r}")
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
                    raise RuntimeError(f"{self._process.args!r} does not start") from None
                time.sleep(0.05)


def dynamo_indexer(python: str, *, threads: int, cpus: Iterable[int] | None = None) -> Indexer:
    """Start NVIDIA Dynamo's standalone indexer.

    Args:
        python: the interpreter of its virtual environment.
        threads: of its index; 1 is its own single-threaded form, 4 its default.
        cpus: the cores that it may use; all by default.
    """
    port = _free_port()
    command = [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", str(threads)]
    return Indexer(command, port, cpus=cpus)


def kvindex_server() -> Indexer:
    """Start `kvindex serve`."""
    port = _free_port()
    return Indexer([sys.executable, "-m", "kvindex", "serve", "--port", str(port)], port)


def _family(pid: int) -> list[int]:
    """A process and its children's children."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found += _family(int(child))
    return found


def _free_port() -> int:
    """A port that was free a moment ago: a service cannot tell which one it chose itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
