"""The fake engine's routes: what each answers, as JSON in the engines' own shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
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
from kvindex.testing.http_stream import Streamed
from kvindex.testing.values import Served
from kvindex.wire.errors import KVIndexError

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
        self._options = service.options
        self._get: dict[str, Callable[[], Response]] = {
            "/health": lambda: Response(200, b""),
            "/v1/models": lambda: Response.of_json({"object": "list", "data": service.models()}),
        }
        self._post: dict[str, Callable[[Mapping[str, Any], str], Response | Streamed]] = {
            "/v1/completions": partial(self._complete, False),
            "/v1/chat/completions": partial(self._complete, True),
            "/tokenize": self._tokenize,
        }
        if service.options.metrics:
            self._get["/metrics"] = self._metrics
        if service.kind == "vllm":
            self._get["/version"] = lambda: Response.of_json({"version": service.version})
            if service.options.sources is not None:
                self._get["/kv_event_sources"] = self._sources
            self._post["/v1/completions/render"] = partial(self._render, False)
            self._post["/v1/chat/completions/render"] = partial(self._render, True)
        else:
            self._get["/server_info"] = lambda: Response.of_json(service.server_info())
            self._get["/get_server_info"] = self._get["/server_info"]
            self._get["/model_info"] = lambda: Response.of_json({"model_path": service.model})

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Response | Streamed:
        """Return the answer to one request, whatever it is."""
        try:
            self._check(method, path, headers)
            if method == "GET":
                return self._get[path]()
            _check_type(headers)
            return self._post[path](read_body(body), headers.get("x-data-parallel-rank", ""))
        except RequestError as error:
            return Response.of_error(error)
        except KVIndexError as error:  # the engine was closed, or its publisher has failed
            return Response.of_error(RequestError(503, str(error)))

    def _check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        key = self._options.api_key
        guarded = path.startswith("/v1") if self._service.kind == "vllm" else path != "/health"
        if key and guarded and headers.get("authorization") != f"Bearer {key}":
            raise RequestError(401, "Unauthorized")
        routes: Mapping[str, object] = self._get if method == "GET" else self._post
        if path not in routes:
            if path in self._get or path in self._post:
                raise RequestError(405, "Method Not Allowed")
            raise RequestError(404, "Not Found")

    def _sources(self) -> Response:
        sources = self._service.sources()
        if self._options.sources == "ranks":
            return Response.of_json({str(rank): source for rank, source in sources.items()})
        names = ("endpoint", "replay_endpoint", "topic")
        listed = [
            {"data_parallel_rank": rank, **{name: source[name] for name in names}}
            for rank, source in sources.items()
        ]
        return Response.of_json(listed if self._options.sources == "list" else {"sources": listed})

    def _metrics(self) -> Response:
        text = metrics_text(self._service).encode()
        return Response(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _complete(self, chat: bool, body: Mapping[str, Any], rank: str) -> Response | Streamed:
        many = _choices(body)
        prompts = [x for x in self._prompts(chat, body, rank) for _ in range(many)]
        results = [self._service.serve(prompt) for prompt in prompts]
        reported = self._usage([served for served, _ in results], many)
        if body.get("stream"):
            options = body.get("stream_options")
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            return Streamed(results, chat, prompts[0].model, usage, reported)
        choices = []
        for number, (_, tokens) in enumerate(results):
            text = text_of(tokens)
            content = (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            end = {"logprobs": None, "finish_reason": "length"}
            choices.append({"index": number, **content, **end})
        return Response.of_json(
            {
                "id": "chatcmpl-fake" if chat else "cmpl-fake",
                "object": "chat.completion" if chat else "text_completion",
                "created": 0,
                "model": prompts[0].model,
                "choices": choices,
                "usage": reported,
            }
        )

    def _usage(self, served: list[Served], choices: int) -> dict[str, Any]:
        prompt = sum(request.prompt_tokens for request in served[::choices])
        generated = sum(request.new_tokens for request in served)
        cached = sum(request.hit_tokens for request in served[::choices])
        details = {"cached_tokens": cached} if self._options.cached_tokens else None
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": details,
        }

    def _prompts(self, chat: bool, body: Mapping[str, Any], rank: str) -> list[Completion]:
        if chat and "messages" not in body:
            raise RequestError(400, "/v1/chat/completions needs messages")
        if "messages" in body and not chat:
            raise RequestError(400, "/v1/completions needs a prompt, not messages")
        return completions(body, default_model=self._service.model, header_rank=rank)

    def _tokenize(self, body: Mapping[str, Any], _: str) -> Response:
        tokens = tokenized(body)
        length = self._options.max_model_len
        return Response.of_json(
            {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None}
        )

    def _render(self, chat: bool, body: Mapping[str, Any], rank: str) -> Response:
        if not self._options.render:
            raise RequestError(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
                "enable them.",
            )
        rendered = [_generate_request(prompt) for prompt in self._prompts(chat, body, rank)]
        return Response.of_json(rendered[0] if chat else rendered)


def _check_type(headers: Mapping[str, str]) -> None:
    """Refuse what is not declared as JSON, as vLLM and SGLang do: with 400, though it says 415."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise RequestError(400, "Unsupported Media Type: Only 'application/json' is allowed")


def _choices(body: Mapping[str, Any]) -> int:
    number = body.get("n") or 1
    if not isinstance(number, int) or not 1 <= number <= 128:
        raise RequestError(400, f"n is {number!r}, not a number from 1 to 128")
    return number


def _generate_request(prompt: Completion) -> dict[str, Any]:
    """The answer of vLLM's render routes for one prompt: the request that the engine would get."""
    placed = sorted(prompt.images.items())
    features = {
        "mm_hashes": {"image": [digest for _, digest in placed]},
        "mm_placeholders": {"image": [{"offset": at, "length": 1} for at, _ in placed]},
    }
    return {
        "request_id": "render-fake",
        "token_ids": prompt.token_ids,
        "features": features if placed else None,
        "sampling_params": {"max_tokens": prompt.max_tokens},
        "model": prompt.model,
        "stream": False,
        "cache_salt": prompt.salt,
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
    label = "engine" if service.kind == "vllm" else "dp_rank"
    for counter, (name, what) in _COUNTERS[service.kind].items():
        lines += [f"# HELP {name} {what}", f"# TYPE {name} counter"]
        for rank, counts in sorted(service.counters.items()):
            labels = f'{label}="{rank}",model_name="{service.model}"'
            lines.append(f"{name}{{{labels}}} {float(counts[counter])}")
    if service.kind == "vllm":
        name = "vllm:cache_config_info"
        lines += [f"# HELP {name} Information of the LLMEngine CacheConfig", f"# TYPE {name} gauge"]
        for rank, engine in sorted(service.ranks.items()):
            labels = (
                f'block_size="{engine.block_size}",'
                f'enable_prefix_caching="{service.options.prefix_caching}",engine="{rank}",'
                f'num_gpu_blocks="{engine.num_blocks}",sliding_window="None"'
            )
            lines.append(f"{name}{{{labels}}} 1.0")
        name = "vllm:external_prefix_cache_hits_total"
        lines += [f"# TYPE {name} counter", f"{name} {float(service.options.external_hits)}"]
    return "\n".join([*lines, ""])
