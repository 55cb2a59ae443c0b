"""Run a trace in NVIDIA Dynamo's own simulator. Needs Dynamo's environment, and nothing of ours.

`python replay.py TRACE RANKS CACHE_TOKENS` prints one JSON object: by policy, what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

BLOCK = 64
TRACE_BLOCK = 512
AGENTIC = {
    "overlap_score_credit": 2.0,
    "prefill_load_scale": 4.0,
    "decode_active_request_weight": 64.0,
}


def main() -> None:
    os.environ.setdefault("DYN_LOG", "error")  # it logs every choice
    trace, ranks, cache = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({name: _replay(name, trace, ranks, cache) for name in _POLICIES}))


_POLICIES: dict[str, dict[str, Any] | None] = {
    "round-robin": None,
    "dynamo": {},
    "dynamo-agentic": AGENTIC,
}


def _replay(name: str, trace: str, ranks: int, cache: int) -> dict[str, float]:
    from dynamo.llm import KvRouterConfig
    from dynamo.replay.api import run_trace_replay

    weights = _POLICIES[name]
    summary = run_trace_replay(
        [trace],
        num_workers=ranks,
        router_mode="round_robin" if weights is None else "kv_router",
        router_config=None if weights is None else KvRouterConfig(**weights),
        trace_block_size=TRACE_BLOCK,
        extra_engine_args={"engine": {"num_gpu_blocks": cache // BLOCK, "block_size": BLOCK}},
    ).summary
    return {
        "mean": summary["mean_ttft_ms"],
        "p99": summary["p99_ttft_ms"],
        "hit": 100.0 * summary["prefix_cache_reused_ratio"],
    }


if __name__ == "__main__":
    main()
