"""The fake engine's `/metrics`: the series of both engines about the cache."""

from __future__ import annotations

from kvindex.testing.http_service import EngineService

__all__ = ["metrics_text"]

# Counter here -> the engine's series, and what it counts.
_COUNTERS = {
    "vllm": {
        "queries": ("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
        "hits": ("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache."),
        "prompt_tokens": ("vllm:prompt_tokens_total", "Prompt tokens."),
        "generation_tokens": ("vllm:generation_tokens_total", "Generated tokens."),
        "requests": ("vllm:request_success_total", "Requests that ended."),
    },
    "sglang": {
        "hits": ("sglang:cached_tokens_total", "Prompt tokens found in the cache."),
        "prompt_tokens": ("sglang:prompt_tokens_total", "Prompt tokens."),
        "generation_tokens": ("sglang:generation_tokens_total", "Generated tokens."),
        "requests": ("sglang:num_requests_total", "Requests that ended."),
    },
}


def metrics_text(service: EngineService) -> str:
    """Return the engine's metrics in Prometheus' text format."""
    lines: list[str] = []
    for counter, (name, what) in _COUNTERS[service.kind].items():
        lines += [f"# HELP {name} {what}", f"# TYPE {name} counter"]
        for rank, counts in sorted(service.counters.items()):
            label = "engine" if service.kind == "vllm" else "dp_rank"
            lines.append(
                f'{name}{{{label}="{rank}",model_name="{service.model}"}} {float(counts[counter])}'
            )
    if service.kind == "vllm":
        lines += _cache_config(service)
        name = "vllm:external_prefix_cache_hits_total"
        lines += [f"# TYPE {name} counter", f"{name} {float(service.options.external_hits)}"]
    return "\n".join([*lines, ""])


def _cache_config(service: EngineService) -> list[str]:
    name = "vllm:cache_config_info"
    return [
        f"# HELP {name} Information of the LLMEngine CacheConfig",
        f"# TYPE {name} gauge",
        *(
            f'{name}{{block_size="{engine.block_size}",'
            f'enable_prefix_caching="{service.options.prefix_caching}",engine="{rank}",'
            f'num_gpu_blocks="{engine.num_blocks}",sliding_window="None"}} 1.0'
            for rank, engine in sorted(service.ranks.items())
        ),
    ]
