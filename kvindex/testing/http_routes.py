"""The fake engine's routes: what each answers, as JSON in the engines' own shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvindex.testing.answers import Served
from kvindex.testing.http_metrics import metrics_text
from kvindex.testing.http_requests import (
    Prompt,
    RequestError,
    completion,
    read_body,
    tokenized,
)
from kvindex.testing.http_service import EngineService
from kvindex.testing.text import text_of
from kvindex.wire.errors import KVIndexError

__all__ = ["Answer", "Routes"]

_JSON = "application/json"
_ERROR_TYPES = {403: "PermissionDeniedError", 404: "NotFoundError"}


class Answer(msgspec.Struct, frozen=True):
    """One HTTP answer."""

    code: int
    body: bytes
    content_type: str = _JSON

    @classmethod
    def of_json(cls, value: object) -> Answer:
        """Return a value as JSON."""
        return cls(200, json.dumps(value).encode())

    @classmethod
    def of_error(cls, error: RequestError) -> Answer:
        """Return an error as the engines write it."""
        kind = _ERROR_TYPES.get(error.code, "BadRequestError")
        detail = {"message": str(error), "type": kind, "param": None, "code": error.code}
        return cls(error.code, json.dumps({"error": detail}).encode())


class Routes:
    """The answers of each path of the engine."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._get: dict[str, Callable[[], Answer]] = {
            "/health": lambda: Answer(200, b""),
            "/v1/models": lambda: Answer.of_json({"object": "list", "data": service.models()}),
        }
        self._post: dict[str, Callable[[Mapping[str, Any], str], Answer]] = {
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._chat,
            "/tokenize": lambda body, _: self._tokenize(body),
        }
        if service.options.metrics:
            self._get["/metrics"] = self._metrics
        if service.kind == "vllm":
            self._add_vllm()
        else:
            self._get["/server_info"] = lambda: Answer.of_json(service.server_info())
            self._get["/get_server_info"] = self._get["/server_info"]
            self._get["/model_info"] = lambda: Answer.of_json({"model_path": service.model})

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Return the answer to one request, whatever it is."""
        try:
            self._check(method, path, headers)
            if method == "GET":
                return self._get[path]()
            return self._post[path](read_body(body), headers.get("x-data-parallel-rank", ""))
        except RequestError as error:
            return Answer.of_error(error)
        except KVIndexError as error:  # the engine was closed, or its publisher has failed
            return Answer.of_error(RequestError(503, str(error)))

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
        self._get["/version"] = lambda: Answer.of_json({"version": service.version})
        if service.options.sources is not None:
            self._get["/kv_event_sources"] = self._sources
        self._post["/v1/completions/render"] = self._render
        self._post["/v1/chat/completions/render"] = self._render_chat

    def _sources(self) -> Answer:
        sources = self._service.sources()
        if self._service.options.sources == "ranks":
            return Answer.of_json({str(rank): source for rank, source in sources.items()})
        listed = [
            {
                "data_parallel_rank": rank,
                **{key: source[key] for key in ("endpoint", "replay_endpoint", "topic")},
            }
            for rank, source in sources.items()
        ]
        if self._service.options.sources == "list":
            return Answer.of_json(listed)
        return Answer.of_json({"sources": listed})

    def _metrics(self) -> Answer:
        text = metrics_text(self._service).encode()
        return Answer(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _complete(self, body: Mapping[str, Any], rank: str) -> Answer:
        if "messages" in body:
            raise RequestError(400, "/v1/completions takes a prompt, not messages")
        return self._served(body, rank, "text_completion")

    def _chat(self, body: Mapping[str, Any], rank: str) -> Answer:
        if "messages" not in body:
            raise RequestError(400, "/v1/chat/completions takes messages")
        return self._served(body, rank, "chat.completion")

    def _served(self, body: Mapping[str, Any], rank: str, kind: str) -> Answer:
        if body.get("stream"):
            raise RequestError(400, "this engine does not stream: leave out `stream`")
        prompts = self._prompts(body, rank)
        results = [self._service.serve(prompt) for prompt in prompts]
        choices = []
        for number, (_, tokens) in enumerate(results):
            text = text_of(tokens)
            said = (
                {"text": text}
                if kind == "text_completion"
                else {"message": {"role": "assistant", "content": text}}
            )
            choices.append({"index": number, **said, "logprobs": None, "finish_reason": "length"})
        return Answer.of_json(
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
        prompt = sum(one.prompt_tokens for one in served)
        generated = sum(one.new_tokens for one in served)
        cached = sum(one.hit_tokens for one in served)
        details = {"cached_tokens": cached} if self._service.options.cached_tokens else None
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": details,
        }

    def _prompts(self, body: Mapping[str, Any], rank: str) -> list[Prompt]:
        return completion(body, default_model=self._service.model, header_rank=rank)

    def _tokenize(self, body: Mapping[str, Any]) -> Answer:
        tokens = tokenized(body)
        length = self._service.options.max_model_len
        return Answer.of_json(
            {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None}
        )

    def _check_render(self) -> None:
        if not self._service.options.render:
            raise RequestError(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
                "enable them.",
            )

    def _render(self, body: Mapping[str, Any], rank: str) -> Answer:
        self._check_render()
        if "messages" in body:
            raise RequestError(400, "/v1/completions/render takes a prompt, not messages")
        return Answer.of_json([_generate_request(one) for one in self._prompts(body, rank)])

    def _render_chat(self, body: Mapping[str, Any], rank: str) -> Answer:
        self._check_render()
        if "messages" not in body:
            raise RequestError(400, "/v1/chat/completions/render takes messages")
        return Answer.of_json(_generate_request(self._prompts(body, rank)[0]))


def _generate_request(prompt: Prompt) -> dict[str, Any]:
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


def _features(prompt: Prompt) -> dict[str, Any] | None:
    if not prompt.images:
        return None
    placed = sorted(prompt.images.items())
    return {
        "mm_hashes": {"image": [digest for _, digest in placed]},
        "mm_placeholders": {"image": [{"offset": at, "length": 1} for at, _ in placed]},
    }
