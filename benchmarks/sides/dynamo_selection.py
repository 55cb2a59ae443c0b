"""NVIDIA Dynamo's SelectionService, of the PyPI package ai-dynamo-runtime: what Ray embeds."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from itertools import count
from time import perf_counter_ns
from typing import Any

from benchmarks.sides.matching import LONGEST_NS, collected
from benchmarks.sides.publishing import Publishers
from benchmarks.workload import BLOCK_SIZE, MsgpackEncoder

_MODEL = "benchmark"
_BATCHED_TOKENS = 8_192  # of an engine's step


class DynamoSelection:
    """The service with its defaults: a worker for each rank, fed over ZMQ, asked in its process.

    Its calls are coroutines. They run in uvloop, which the package wants, one after the other; the
    clock is read within the coroutine that awaits them.
    """

    def __init__(self) -> None:
        self._service_type: Any = importlib.import_module("dynamo.llm").SelectionService
        self._loop: Any = importlib.import_module("uvloop").new_event_loop()
        self._service: Any = None
        self._publishers: Publishers | None = None
        self._ids = map(str, count())

    def encoder(self) -> MsgpackEncoder:
        """Return what writes engines' payloads."""
        return MsgpackEncoder()

    def reset(self, ranks: int, fed: str) -> None:
        """Begin again with an empty service; it is always fed over ZMQ."""
        if self._publishers is not None:
            self._service.shutdown()
            self._publishers.close()
        self._publishers = Publishers(ranks)
        self._loop.run_until_complete(self._start(self._publishers.endpoints))
        self._publishers.wait_joined()

    def rank(self, number: int) -> int:
        """Return a worker id; which is its one dp_rank too."""
        return number

    def applier(self) -> Callable[[Any, bytes], object]:
        """Return what publishes."""
        assert self._publishers is not None
        return self._publishers.send

    def held(self, tokens: list[int]) -> dict[int, int]:
        """Return the blocks by worker id."""
        answer = self._wait(lambda: self._service.overlap_scores(_request(tokens)))
        scores = {worker["worker_id"]: worker["device_blocks"] for worker in answer["workers"]}
        return {worker: blocks for worker, blocks in scores.items() if blocks}

    def chosen(self, tokens: list[int]) -> tuple[int, int]:
        """Return what `select` says."""
        answer = self._wait(lambda: self._service.select(_request(tokens)))
        return answer["worker_id"], (len(tokens) - answer["effective_prefill_tokens"]) // BLOCK_SIZE

    def creditable(self, blocks: int) -> int:
        """Return all of them: a prompt that is held wholly counts as one without prefill."""
        return blocks

    def occupy(self, tokens: list[int]) -> None:
        """Reserve a request."""
        self._wait(lambda: self._service.select_and_reserve(self._reservation(tokens)))

    def timed(self, call: str, prompts: list[Any], repeats: int) -> list[int]:
        """Return the nanoseconds of each call: "select" or "reserve"."""
        calls = {"select": self._select, "reserve": self._reserve}
        samples: list[int] = self._loop.run_until_complete(_timed(calls[call], prompts, repeats))
        return samples

    async def _start(self, endpoints: list[str]) -> None:
        self._service = self._service_type()
        for worker, endpoint in enumerate(endpoints):
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": _MODEL,
                    "endpoint": f"http://worker-{worker}",  # part of the answer, never dialled
                    "block_size": BLOCK_SIZE,
                    "max_num_batched_tokens": _BATCHED_TOKENS,
                    "data_parallel_start_rank": worker,  # what its events say of themselves
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {worker: endpoint},
                }
            )

    async def _select(self, tokens: list[int]) -> object:
        return await self._service.select(_request(tokens))

    async def _reserve(self, tokens: list[int]) -> None:
        request = self._reservation(tokens)
        await self._service.select_and_reserve(request)
        await self._service.free_reservation(request["selection_id"])

    def _reservation(self, tokens: list[int]) -> dict[str, Any]:
        return {**_request(tokens), "selection_id": next(self._ids)}

    def _wait(self, call: Callable[[], Any]) -> Any:
        async def called() -> Any:
            return await call()

        return self._loop.run_until_complete(called())


def _request(tokens: list[int]) -> dict[str, Any]:
    return {"model_name": _MODEL, "token_ids": tokens}


async def _timed(
    call: Callable[[list[int]], Awaitable[object]], prompts: list[list[int]], repeats: int
) -> list[int]:
    """As `timed`, for coroutines."""
    for prompt in prompts:
        await call(prompt)
    samples: list[int] = []
    with collected():
        latest = perf_counter_ns() + LONGEST_NS
        while len(samples) < repeats and perf_counter_ns() < latest:
            for prompt in prompts:
                started = perf_counter_ns()
                await call(prompt)
                samples.append(perf_counter_ns() - started)
    return samples
