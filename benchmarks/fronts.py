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
        urls = [stack.enter_context(_engine(number)) for number in range(ENGINES)]
        fronts = {DIRECT: Front(_port(urls[0])), OURS: stack.enter_context(_ours(urls))}
        if _has_envoy():
            envoy = ("--proxy", "envoy", "--threads", "1")
            fronts[WITH_ENVOY] = stack.enter_context(_ours(urls, *envoy))
        if bench.peers:
            fronts[ENVOY] = stack.enter_context(_envoy(bench, folder, urls))
            fronts[VLLM_ROUTER] = stack.enter_context(_vllm_router(bench, urls))
            fronts[LITELLM] = stack.enter_context(_litellm(bench, folder, urls))
        yield fronts, urls


def _has_envoy() -> bool:
    """Return whether the extra `envoy` is installed."""
    try:
        return all(importlib.util.find_spec(name) for name in ("grpc", "envoy._bin"))
    except ModuleNotFoundError:
        return False


@contextmanager
def _process(
    command: Sequence[str], *, says: str = "", environment: Mapping[str, str] = {}
) -> Iterator[tuple[int, str]]:
    """Run a process; yield its id and the first line that has `says`."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE if says else subprocess.DEVNULL,
        stderr=None if says else subprocess.DEVNULL,
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
def _engine(number: int) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.streaming_engine", f"engine-{number}"]
    with _process(command, says="HTTP at ") as (_, line):
        yield line.split()[-1]


@contextmanager
def _ours(urls: Sequence[str], *options: str) -> Iterator[Front]:
    command = [sys.executable, "-m", "kvindex", "gateway", "--port", "0", *options, *urls]
    with _process(command, says="serves OpenAI's API") as (pid, line):
        front = _up(Front(_port(line.split()[-1].removesuffix("/v1")), pid))
        while not front.get("/v1/models")["data"]:
            time.sleep(0.05)
        yield front


@contextmanager
def _envoy(bench: Bench, folder: Path, urls: Sequence[str]) -> Iterator[Front]:
    port = _free_port()
    path = folder / "envoy.json"
    path.write_text(json.dumps(_envoy_config(port, [_port(url) for url in urls])))
    python = Path(bench.python("envoy"))
    binary = next(python.parents[1].glob("lib/python*/site-packages/envoy/_bin/envoy"))
    command = [str(binary), "-c", str(path), "--concurrency", "1", "-l", "off"]
    with _process([*command, "--use-dynamic-base-id"]) as (pid, _):
        yield _up(Front(port, pid))


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
def _vllm_router(bench: Bench, urls: Sequence[str]) -> Iterator[Front]:
    port = _free_port()
    command = [bench.python("router"), "-m", "vllm_router.launch_router"]
    command += ["--worker-urls", *urls, "--policy", "cache_aware"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())]
    with _process(command) as (pid, _):
        yield _up(Front(port, pid))


@contextmanager
def _litellm(bench: Bench, folder: Path, urls: Sequence[str]) -> Iterator[Front]:
    port, key = _free_port(), f"sk-{secrets.token_hex(8)}"
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
    with _process([*command, "--num_workers", "1"], environment=quiet) as (pid, _):
        yield _up(Front(port, pid, key))


def _up(front: Front) -> Front:
    """Return a front once it accepts connections."""
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", front.port), 1.0).close()
            return front
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nothing listens at port {front.port} after {_START_SECONDS:g} s")


def _free_port() -> int:
    holder, port = reserve_port()
    holder.close()
    return port


def _port(url: str) -> int:
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
