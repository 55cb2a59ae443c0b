"""The fake engine's routes: what each answers, as JSON in the engines' own shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvindex.testing.http_requests import (
    Completion,
    RequestError,
    completions,
    read_body,
    text_of,
    tokenized,
)
from kvindex.testing.http_service import EngineService
from kvindex.testing.values import Served
from kvindex.wire.errors import KVIndexError

__all__ = ["Response", "Routes", "metrics_text"]

_JSON = "application/json"
_ERROR_TYPES = {403: "PermissionDeniedError", 404: "NotFoundError"}


class Response(msgspec.Struct, frozen=True):
    """One HTTP answer."""

    code: int
    body: bytes
    content_type: str = _JSON

    @classmethod
    def of_json(cls, value: object) -> Response:
        """Return a value as JSON."""
        return cls(200, json.dumps(value).encode())

    @classmethod
    def of_error(cls, error: RequestError) -> Response:
        """Return an error as the engines write it."""
        kind = _ERROR_TYPES.get(error.code, "BadRequestError")
        detail = {"message": str(error), "type": kind, "param": None, "code": error.code}
        return cls(error.code, json.dumps({"error": detail}).encode())


class Routes:
    """The answers of each path of the engine."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._get: dict[str, Callable[[], Response]] = {
            "/health": lambda: Response(200, b""),
            "/v1/models": lambda: Response.of_json({"object": "list", "data": service.models()}),
        }
        self._post: dict[str, Callable[[Mapping[str, Any], str], Response]] = {
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._chat,
            "/tokenize": lambda body, _: self._tokenize(body),
        }
        if service.options.metrics:
            self._get["/metrics"] = self._metrics
        if service.kind == "vllm":
            self._add_vllm()
        else:
            self._get["/server_info"] = lambda: Response.of_json(service.server_info())
            self._get["/get_server_info"] = self._get["/server_info"]
            self._get["/model_info"] = lambda: Response.of_json({"model_path": service.model})

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Return the answer to one request, whatever it is."""
        try:
            self._check(method, path, headers)
            if method == "GET":
                return self._get[path]()
            return self._post[path](read_body(body), headers.get("x-data-parallel-rank", ""))
        except RequestError as error:
            return Response.of_error(error)
        except KVIndexError as error:  # the engine was closed, or its publisher has failed
            return Response.of_error(RequestError(503, str(error)))

    def _check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        key = self._service.options.api_key
        guarded = path.startswith("/v1") if self._service.kind == "vllm" else path != "/health"
        if key and guarded and headers.get("authorization") != f"Bearer {key}":
            raise RequestError(401, "Unauthorized")
        routes: Mapping[str, object] = self._get if method == "GET" else self._post
        if path not in routes:
            known = path in self._get or path in self._post
            raise RequestError(
                405 if known else 404, "Method Not Allowed" if known else "Not Found"
            )

    def _add_vllm(self) -> None:
        service = self._service
        self._get["/version"] = lambda: Response.of_json({"version": service.version})
        if service.options.sources is not None:
            self._get["/kv_event_sources"] = self._sources
        self._post["/v1/completions/render"] = self._render
        self._post["/v1/chat/completions/render"] = self._render_chat

    def _sources(self) -> Response:
        sources = self._service.sources()
        if self._service.options.sources == "ranks":
            return Response.of_json({str(rank): source for rank, source in sources.items()})
        listed = [
            {
                "data_parallel_rank": rank,
                **{key: source[key] for key in ("endpoint", "replay_endpoint", "topic")},
            }
            for rank, source in sources.items()
        ]
        if self._service.options.sources == "list":
            return Response.of_json(listed)
        return Response.of_json({"sources": listed})

    def _metrics(self) -> Response:
        text = metrics_text(self._service).encode()
        return Response(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _complete(self, body: Mapping[str, Any], rank: str) -> Response:
        if "messages" in body:
            raise RequestError(400, "/v1/completions takes a prompt, not messages")
        return self._served(body, rank, "text_completion")

    def _chat(self, body: Mapping[str, Any], rank: str) -> Response:
        if "messages" not in body:
            raise RequestError(400, "/v1/chat/completions takes messages")
        return self._served(body, rank, "chat.completion")

    def _served(self, body: Mapping[str, Any], rank: str, kind: str) -> Response:
        if body.get("stream"):
            raise RequestError(400, "this engine does not stream: leave out `stream`")
        prompts = self._prompts(body, rank)
        results = [self._service.serve(prompt) for prompt in prompts]
        choices = []
        for number, (_, tokens) in enumerate(results):
            text = text_of(tokens)
            content = (
                {"text": text}
                if kind == "text_completion"
                else {"message": {"role": "assistant", "content": text}}
            )
            choices.append(
                {"index": number, **content, "logprobs": None, "finish_reason": "length"}
            )
        return Response.of_json(
            {
                "id": "cmpl-fake" if kind == "text_completion" else "chatcmpl-fake",
                "object": kind,
                "created": 0,
                "model": prompts[0].model,
                "choices": choices,
                "usage": self._usage([served for served, _ in results]),
            }
        )

    def _usage(self, served: list[Served]) -> dict[str, Any]:
        prompt = sum(request.prompt_tokens for request in served)
        generated = sum(request.new_tokens for request in served)
        cached = sum(request.hit_tokens for request in served)
        details = {"cached_tokens": cached} if self._service.options.cached_tokens else None
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": details,
        }

    def _prompts(self, body: Mapping[str, Any], rank: str) -> list[Completion]:
        return completions(body, default_model=self._service.model, header_rank=rank)

    def _tokenize(self, body: Mapping[str, Any]) -> Response:
        tokens = tokenized(body)
        length = self._service.options.max_model_len
        return Response.of_json(
            {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None}
        )

    def _check_render(self) -> None:
        if not self._service.options.render:
            raise RequestError(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
                "enable them.",
            )

    def _render(self, body: Mapping[str, Any], rank: str) -> Response:
        self._check_render()
        if "messages" in body:
            raise RequestError(400, "/v1/completions/render takes a prompt, not messages")
        return Response.of_json([_generate_request(prompt) for prompt in self._prompts(body, rank)])

    def _render_chat(self, body: Mapping[str, Any], rank: str) -> Response:
        self._check_render()
        if "messages" not in body:
            raise RequestError(400, "/v1/chat/completions/render takes messages")
        return Response.of_json(_generate_request(self._prompts(body, rank)[0]))


def _generate_request(prompt: Completion) -> dict[str, Any]:
    """The answer of vLLM's render routes for one prompt: the request that the engine would get."""
    return {
        "request_id": "render-fake",
        "token_ids": prompt.token_ids,
        "features": _features(prompt),
        "sampling_params": {"max_tokens": prompt.max_tokens},
        "model": prompt.model,
        "stream": False,
        "cache_salt": prompt.salt,
    }


def _features(prompt: Completion) -> dict[str, Any] | None:
    if not prompt.images:
        return None
    placed = sorted(prompt.images.items())
    return {
        "mm_hashes": {"image": [digest for _, digest in placed]},
        "mm_placeholders": {"image": [{"offset": at, "length": 1} for at, _ in placed]},
    }


# Metrics -----------------------------------------------------------------------------------------

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
