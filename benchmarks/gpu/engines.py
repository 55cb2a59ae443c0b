"""vLLM engines on one GPU that they share, or on one each."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.fronts import MODEL, Front, free_port, process, up

_BLOCK: Final = 16  # tokens
_START_SECONDS: Final = 900.0


@dataclass(frozen=True)
class Engines:
    """Which engines are started.

    Attributes:
        count: how many.
        model: a folder with a model's config, tokenizer and chat template; weights are random.
        vllm: the command, with any further options after `serve` in `more`.
        has_card_each: whether each has a GPU, instead of an equal part of the first one's SMs.
        cache: tokens of each cache.
        memory: bytes for it, as vLLM reads them.
    """

    count: int
    model: Path
    vllm: str = "vllm"
    more: str = ""
    has_card_each: bool = False
    cache: int = 60_000
    memory: str = "9G"

    def command(self, port: int) -> list[str]:
        """Return what starts an engine at a port."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{free_port()}",
            "replay_endpoint": f"tcp://*:{free_port()}",
        }
        options = {
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": port,
            "load-format": "dummy",
            "max-model-len": 16_384,
            "max-num-seqs": 64,
            "block-size": _BLOCK,
            "num-gpu-blocks-override": self.cache // _BLOCK,
            "kv-cache-memory-bytes": self.memory,
            "gpu-memory-utilization": 0.9 if self.has_card_each else round(0.8 / self.count, 2),
            "kv-events-config": json.dumps(events),
        }
        named = [part for name, value in options.items() for part in (f"--{name}", f"{value}")]
        command = [*shlex.split(self.vllm), "serve", str(self.model), *named]
        return [*command, "--enable-prompt-tokens-details", *shlex.split(self.more)]

    @contextmanager
    def started(self) -> Iterator[list[str]]:
        """Run the engines; yield their URLs once all of them answer."""
        with ExitStack() as stack:
            shared = {} if self.has_card_each else stack.enter_context(_shared_card(self.count))
            fronts = []
            for number in range(self.count):
                port, card = free_port(), f"{number if self.has_card_each else 0}"
                environment = {"CUDA_VISIBLE_DEVICES": card, **shared}
                pid, _ = stack.enter_context(
                    process(self.command(port), environment=environment, is_heard=True)
                )
                fronts.append(Front(port, pid))
            yield [f"http://127.0.0.1:{up(front, _START_SECONDS).port}" for front in fronts]


@contextmanager
def _shared_card(engines: int) -> Iterator[dict[str, str]]:
    """Run NVIDIA's MPS; yield what gives each engine an equal part of the SMs."""
    with TemporaryDirectory() as folder:
        mps = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **mps}
        control = "nvidia-cuda-mps-control"
        subprocess.run([control, "-d"], env=environment, check=True)
        try:
            yield {**mps, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 // engines}"}
        finally:
            subprocess.run([control], input="quit\n", text=True, env=environment, check=False)
