"""Gateways as processes, in front of fake engines that stream: ours, Envoy, and two others."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

from benchmarks.bench import Bench
from benchmarks.process import ROOT, cpu_seconds
from benchmarks.results import OURS
from kvindex.testing.ports import reserve_port

MODEL: Final = "fake-model"
ENGINES: Final = 3
DIRECT: Final = "no gateway"
WITH_ENVOY: Final = "kvindex with Envoy"
ENVOY: Final = "Envoy alone"
VLLM_ROUTER: Final = "vllm-router"
LITELLM: Final = "LiteLLM"
_BLOCKS: Final = 200_000  # of a fake engine's cache
_START_SECONDS: Final = 120.0
_TYPES: Final = "type.googleapis.com/envoy"


class Front(NamedTuple):
    """A running gateway, or an engine by itself.

    Attributes:
        port: where it listens.
        pid: of its process; 0 if none is measured.
        key: the API key that it wants; "" if none.
    """

    port: int
    pid: int = 0
    key: str = ""

    def cpu(self, *, without: str = "-") -> float:
        """Return the seconds of CPU that it has used, with the processes that it started.

        Args:
            without: the name of a program that does not count.
        """
        pids = _tree(self.pid) if self.pid else ()
        return sum(cpu_seconds(pid) for pid in pids if _program(pid) != without)

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)


@contextmanager
def started(bench: Bench) -> Iterator[tuple[dict[str, Front], list[str]]]:
    """Run the engines and all gateways; yield these by name, and the URLs of the engines."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        urls = [stack.enter_context(fake_engine(number)) for number in range(ENGINES)]
        fronts = {DIRECT: Front(port_of(urls[0])), OURS: stack.enter_context(ours(urls))}
        if _has_envoy():
            envoy = ("--proxy", "envoy", "--threads", "1")
            fronts[WITH_ENVOY] = stack.enter_context(ours(urls, *envoy))
        if bench.peers:
            fronts[ENVOY] = stack.enter_context(_envoy(bench, folder, urls))
            fronts[VLLM_ROUTER] = stack.enter_context(vllm_router(bench.python("router"), urls))
            fronts[LITELLM] = stack.enter_context(_litellm(bench, folder, urls))
        yield fronts, urls


def _has_envoy() -> bool:
    """Return whether the extra `envoy` is installed."""
    try:
        return all(importlib.util.find_spec(name) for name in ("grpc", "envoy._bin"))
    except ModuleNotFoundError:
        return False


@contextmanager
def process(
    command: Sequence[str],
    *,
    says: str = "",
    environment: Mapping[str, str] = {},
    is_heard: bool = False,
) -> Iterator[tuple[int, str]]:
    """Run a process; yield its id and the first line that has `says`.

    Without `says`, what it prints goes to stderr if it `is_heard`.
    """
    unread = sys.stderr if is_heard else subprocess.DEVNULL
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE if says else unread,
        stderr=None if says else unread,
        text=True,
    )
    try:
        line = ""
        if process.stdout is not None:
            line = next((line for line in process.stdout if says in line), "")
            if not line:
                raise RuntimeError(f"{command} ended with {process.wait()}")
        yield process.pid, line
    finally:
        process.terminate()
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextmanager
def fake_engine(number: int, blocks: int = _BLOCKS) -> Iterator[str]:
    """Run a fake engine with a cache of so many blocks; yield its URL."""
    command = [sys.executable, "-m", "benchmarks.streaming_engine", f"engine-{number}", f"{blocks}"]
    with process(command, says="HTTP at ") as (_, line):
        yield line.split()[-1]


@contextmanager
def ours(urls: Sequence[str], *options: str) -> Iterator[Front]:
    """Run our gateway in front of engines."""
    command = [sys.executable, "-m", "kvindex", "gateway", "--port", "0", *options, *urls]
    with process(command, says="serves OpenAI's API") as (pid, line):
        front = up(Front(port_of(line.split()[-1].removesuffix("/v1")), pid))
        while not front.get("/v1/models")["data"]:
            time.sleep(0.05)
        yield front


@contextmanager
def _envoy(bench: Bench, folder: Path, urls: Sequence[str]) -> Iterator[Front]:
    port = free_port()
    path = folder / "envoy.json"
    path.write_text(json.dumps(_envoy_config(port, [port_of(url) for url in urls])))
    python = Path(bench.python("envoy"))
    binary = next(python.parents[1].glob("lib/python*/site-packages/envoy/_bin/envoy"))
    command = [str(binary), "-c", str(path), "--concurrency", "1", "-l", "off"]
    with process([*command, "--use-dynamic-base-id"]) as (pid, _):
        yield up(Front(port, pid))


def _envoy_config(port: int, engines: Sequence[int]) -> dict[str, Any]:
    """Return a configuration that forwards to the engine with the fewest requests."""

    def address(at: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": at}}

    hosts = [{"endpoint": {"address": address(at)}} for at in engines]
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    manager = {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "in",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    connections = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    most = {"max_connections": 10_000, "max_pending_requests": 10_000, "max_requests": 10_000}
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": hosts}]},
        "circuit_breakers": {"thresholds": [most]},
    }
    chain = {"filters": [connections]}
    listener = {"name": "in", "address": address(port), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


@contextmanager
def vllm_router(python: str, urls: Sequence[str]) -> Iterator[Front]:
    """Run vLLM's router in front of engines."""
    port = free_port()
    command = [python, "-m", "vllm_router.launch_router"]
    command += ["--worker-urls", *urls, "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with process(command) as (pid, _):
        yield up(Front(port, pid))


@contextmanager
def _litellm(bench: Bench, folder: Path, urls: Sequence[str]) -> Iterator[Front]:
    port, key = free_port(), f"sk-{secrets.token_hex(8)}"
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
        }
        for url in urls
    ]
    path = folder / "litellm.yaml"  # JSON is YAML
    path.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))
    binary = str(Path(bench.python("litellm")).with_name("litellm"))
    command = [binary, "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    with process([*command, "--num_workers", "1"], environment=quiet) as (pid, _):
        yield up(Front(port, pid, key))


def up(front: Front, seconds: float = _START_SECONDS) -> Front:
    """Return a front once it accepts connections.

    Raises:
        RuntimeError: its process ended, or too many seconds have passed.
    """
    until = time.monotonic() + seconds
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while time.monotonic() < until:
        if front.pid and os.waitid(os.P_PID, front.pid, ended):
            raise RuntimeError(f"what should listen at port {front.port} has ended")
        try:
            socket.create_connection(("127.0.0.1", front.port), 1.0).close()
            return front
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nothing listens at port {front.port} after {seconds:g} s")


def free_port() -> int:
    """Return a port that nobody listens at."""
    holder, port = reserve_port()
    holder.close()
    return port


def port_of(url: str) -> int:
    """Return the port of a URL without a path."""
    return int(url.rpartition(":")[2])


def _program(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _tree(pid: int) -> list[int]:
    """Return a process and those below it."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids += _tree(int(child))
    return pids
