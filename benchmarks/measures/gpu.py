"""A dry run of `python -m benchmarks.gpu`: fake engines in place of vLLM."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from typing import Final

from benchmarks.bench import Bench
from benchmarks.fronts import VLLM_ROUTER, fake_engine, ours, vllm_router
from benchmarks.gpu.playing import Plan, measure
from benchmarks.results import OURS, Result

ENGINES: Final = 4
_SHARE: Final = 20  # a dry run's prompts are so many times shorter, and its caches smaller
_BLOCKS: Final = 60_000 // 16 // _SHARE
_NEEDED: Final = ("httptools", "tokenizers")


def run(bench: Bench) -> list[Result]:
    """Return the table; none if the extra `gateway` is missing."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print("\n`gpu` is left out: it needs `pip install -e '.[gateway]'`")
        return []
    seconds = bench.scale.gpu_seconds
    plan = Plan(seeds=(bench.seed,), warm=0.0, seconds=seconds, rate=40.0, share=_SHARE)
    with ExitStack() as stack:
        urls = [stack.enter_context(fake_engine(n, _BLOCKS)) for n in range(ENGINES)]
        fronts = {OURS: stack.enter_context(ours(urls, "--explain-headers"))}
        if bench.peers:
            router = vllm_router(bench.python("router"), urls)
            fronts[VLLM_ROUTER] = stack.enter_context(router)
        results = measure(plan, urls, fronts)
    if any(result.values["failed"] for result in results):
        raise AssertionError("requests have failed")
    return results
