"""A vLLM server in processes of its own, and requests to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from kvindex.testing.ports import reserve_port

MODEL = "tiny"
BLOCK_SIZE = 32  # tokens
BLOCKS = 200  # of each rank's cache
LONGEST = 1_024  # tokens of a prompt and its answer
PATIENCE = 900.0  # seconds for anything: an engine starts within 1 to 3 minutes on 2 cores

_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, of which 200 small blocks use little
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled: it starts sooner
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Vllm:
    """One `vllm serve`, with `dp` ranks that publish events and replay them.

    Args:
        venv: the environment that vLLM is installed in.
        model: the folder of the model.
        log: the file that its output goes to.
        role: "kv_producer" or "kv_consumer" for NIXL's P or D; "" for neither.
    """

    def __init__(self, venv: Path, model: Path, log: Path, *, dp: int = 1, role: str = "") -> None:
        reserved = [_reserve_adjacent(dp) for _ in range(4)]
        self._holders = [holder for holders, _ in reserved for holder in holders]
        self.port, self.events_port, self.replay_port, side_port = (port for _, port in reserved)
        self.url = f"http://127.0.0.1:{self.port}"
        self.dp = dp
        self.model = model
        self._log = log
        self._command = [
            *[str(venv / "bin" / "vllm"), "serve", str(model), "--served-model-name", MODEL],
            *["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"],
            *["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS)],
            *["--max-model-len", str(LONGEST), "--max-num-seqs", "8", "--enforce-eager"],
            *["--enable-prompt-tokens-details", "--data-parallel-size", str(dp)],
            *["--kv-events-config", json.dumps(self._events())],
        ]
        self._settings = dict(_SETTINGS)
        if role:
            transfers = {"kv_connector": "NixlConnector", "kv_role": role}
            self._command += ["--kv-transfer-config", json.dumps(transfers)]
            self._settings |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
                "UCX_TLS": "tcp,sm,self",
            }
        self._process: subprocess.Popen[bytes] | None = None
        # vLLM closes what was idle for 5 s, maybe just as a request leaves.
        limits = httpx.Limits(keepalive_expiry=1.0)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, limits=limits)

    def _events(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }

    def start(self) -> None:
        """Start the processes; `wait_until_ready` waits for them."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | self._settings,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Return once the server answers.

        Raises:
            RuntimeError: it ended instead; the message has the end of its log.
        """
        assert self._process is not None
        until = time.monotonic() + PATIENCE
        pause = threading.Event()
        while self._process.poll() is None and time.monotonic() < until:
            with suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            pause.wait(0.5)
        last = self._log.read_text(errors="replace")[-3_000:]
        raise RuntimeError(f"vLLM did not start ({' '.join(self._command)}):\n{last}")

    def kill(self) -> None:
        """End every process of the server at once, as a crash does."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.http.close()
        for holder in self._holders:
            holder.close()

    # Requests ---------------------------------------------------------------------------------

    def complete(self, body: dict[str, Any], dp_rank: int = 0) -> dict[str, Any]:
        """Send a request with `prompt` or `messages`; return the answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        headers = {"X-data-parallel-rank": str(dp_rank)} if self.dp > 1 else {}
        answer = self.http.post(path, json={"model": MODEL, **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def hang_up(self, body: dict[str, Any]) -> None:
        """Ask for a stream and close the connection at its first line."""
        body = {"model": MODEL, **body, "stream": True}
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())

    def tokenize(self, messages: Sequence[dict[str, str]]) -> list[int]:
        body = {"model": MODEL, "messages": messages, "add_generation_prompt": True}
        answer = self.http.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]  # type: ignore[no-any-return]

    def reset_prefix_cache(self) -> None:
        assert self.http.post("/reset_prefix_cache").status_code == 200

    def prefix_cache(self) -> tuple[int, int]:
        """Return the engine's own counters: tokens that it asked its cache for, and that it hit."""
        return self._metric("prefix_cache_queries_total"), self._metric("prefix_cache_hits_total")

    def received_bytes(self) -> int:
        """Return how much KV it has fetched from other engines."""
        return self._metric("nixl_bytes_transferred_sum")

    def _metric(self, name: str) -> int:
        metrics = self.http.get("/metrics").text
        found = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", metrics, re.MULTILINE)
        return int(sum(map(float, found)))


def _reserve_adjacent(count: int) -> tuple[list[socket.socket], int]:
    """Return sockets that hold so many adjacent free ports, and the first of these ports."""
    while True:
        holder, first = reserve_port("0.0.0.0")
        held = [holder]
        try:
            for port in range(first + 1, first + count):
                held.append(reserve_port("0.0.0.0", port)[0])
        except (OSError, OverflowError):
            for holder in held:
                holder.close()
            continue
        return held, first
