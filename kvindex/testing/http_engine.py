"""A fake engine with an HTTP front, as vLLM and SGLang have one."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec

from kvindex.testing.blocks import PromptKeys, Served
from kvindex.testing.engine import FakeEngine
from kvindex.testing.handoffs import PATH, TOKEN_BYTES, Handoffs
from kvindex.testing.http_requests import (
    Completion,
    RequestError,
    completions,
    new_tokens,
    read_body,
    text_of,
    tokenized,
)
from kvindex.testing.http_server import JSON, EventStream, HttpFaults, Response, Server
from kvindex.wire.errors import ConfigurationError, KVIndexError, TokenError

EngineKind = Literal["vllm", "sglang"]

SourcesShape = Literal["ranks", "list", "sources"]
"""Of `/kv_event_sources`: an object by rank (vLLM 0.33), a list, or `{"sources": [...]}`."""


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An `HttpEngine`'s report about itself, and its faults.

    Attributes:
        version: its release; None for the release of the engines' dialect.
        loras: LoRA adapters: `model` in a request may name one.
        max_model_len: tokens of the longest request.
        sources: shape of vLLM's `/kv_event_sources`; None for no such route (before 0.31).
        announce: fields to replace in `/kv_event_sources`, or in SGLang's `kv_events`.
        prefix_caching: False caches nothing, and so publishes nothing.
        reads_cache: False computes every prompt anew, though what it stores is published.
        silent: True keeps back what it should publish.
        cached_tokens: whether `usage` has how many tokens were cached.
        render: whether vLLM's routes that show how a request is tokenized answer, as with its
            --enable-scale-out; else they refuse.
        metrics: whether there is `/metrics`.
        drops_blocks: hit so many blocks less than are cached; EAGLE makes vLLM drop one.
        prepends: True puts a token before prompts that are token ids already.
        keeps_rank: False lets the ranks serve in turn, whatever rank a request asks for.
        salt: cache salt of requests that have none, as a gateway may add it.
        external_hits: tokens hit, by its metrics, in a cache elsewhere that publishes nothing.
        role: "prefill" or "decode" if prefill and decode are apart, else "null". With vLLM it plays
            P or D, as NIXL has them; with SGLang `disaggregation_mode` says so, and no more.
        lease: seconds for which P keeps the blocks of a prompt that D does not fetch.
        load_failure: what D does if P has them no longer (`kv_load_failure_policy`).
        api_key: if not empty, what `Authorization: Bearer` must have: with vLLM for routes under
            `/v1`, with SGLang for all but `/health`.
    """

    version: str | None = None
    loras: tuple[str, ...] = ()
    max_model_len: int = 2_048
    sources: SourcesShape | None = "ranks"
    announce: Mapping[str, Any] = {}
    prefix_caching: bool = True
    reads_cache: bool = True
    silent: bool = False
    cached_tokens: bool = True
    render: bool = False
    metrics: bool = True
    drops_blocks: int = 0
    prepends: bool = False
    keeps_rank: bool = True
    salt: str = ""
    external_hits: int = 0
    role: str = "null"
    lease: float = 30.0
    load_failure: Literal["fail", "recompute"] = "fail"
    api_key: str = ""


class HttpEngine:
    """Answer over HTTP for fake engines: completions, and what an engine reports of itself.

    Every request is served by the cache of a rank, whose events are published as always. Routes:

    - `/v1/completions`, `/v1/chat/completions`, also streamed: `prompt` is text, token ids, or a
      list of either. `usage.prompt_tokens_details.cached_tokens` is what was hit.
      `cache_salt`, `model` (an adapter's name), the header `X-data-parallel-rank`,
      `prompt_logprobs` and `echo` with `logprobs` (which have the cache left unread) work as in
      the engines. The ranks serve in turn.
      Blocks are pulled first from the one of `peers` that `kv_transfer_params` name as
      `remote_kv_source`. With a role, a P answers `do_remote_decode` with `kv_transfer_params` that
      a D takes, on whichever engine: it fetches what it lacks and reports P's hit as its own.
    - `/tokenize`, and with kind "vllm" and `HttpOptions.render` also `/v1/completions/render`,
      `/v1/chat/completions/render`.
      Tokens are bytes: id 97 is "a"; 256 begins every text; 257 to 262 are those of the chat
      template.
    - `/kv_event_sources`, `/version` (vLLM), `/server_info`, `/get_server_info` (SGLang).
    - `/v1/models`, `/metrics`, `/health`.

    Args:
        engine: the engine, or one for each of its DP ranks. It stays the caller's to close.
        kind: whose routes and answers; None for the engine of their dialect.
        model: the model's name.
        host: where to listen.
        port: where to listen; 0 has the operating system choose.
        options: what it reports of itself, and its faults.
        clock: of P's leases, in seconds.

    Raises:
        ConfigurationError: no engine, two of one rank, or an address that cannot be used.

    Thread safety: all methods. One thread serves all connections.

    Examples:
        >>> import json
        >>> from urllib.request import Request, urlopen
        >>> with FakeEngine(block_size=4) as engine, HttpEngine(engine) as server:
        ...     body = json.dumps({"prompt": [1, 2, 3, 4, 5], "max_tokens": 1}).encode()
        ...     request = Request(f"{server.url}/v1/completions", body)
        ...     request.add_header("content-type", "application/json")
        ...     for _ in range(2):
        ...         with urlopen(request) as answer:
        ...             usage = json.load(answer)["usage"]
        >>> usage["prompt_tokens_details"]
        {'cached_tokens': 4}
    """

    def __init__(
        self,
        engine: FakeEngine | Sequence[FakeEngine],
        *,
        kind: EngineKind | None = None,
        model: str = "fake-model",
        host: str = "127.0.0.1",
        port: int = 0,
        options: HttpOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ranks = [engine] if isinstance(engine, FakeEngine) else list(engine)
        if not ranks or len({rank.rank.dp_rank for rank in ranks}) < len(ranks):
            raise ConfigurationError(f"engine: one for each DP rank, not {len(ranks)} of some rank")
        self._routes = Routes(
            ranks,
            kind=kind or ranks[0].dialect.engine,
            model=model,
            options=options or HttpOptions(),
            clock=clock,
        )
        try:
            self._server = server = Server(host, port, self._routes.answer)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"cannot listen at {host}:{port}: {error}") from error
        self._routes.faults = lambda: server.faults
        self._routes.address = server.address[:2]
        self._closed = False

    @property
    def url(self) -> str:
        """The beginning of every URL that it answers, with host and port."""
        host, port = self._server.address[:2]
        return f"http://{host!s}:{port}"

    @property
    def requests(self) -> int:
        """How many prompts were served."""
        return sum(counts["requests"] for counts in self._routes.counters.values())

    @property
    def counters(self) -> Mapping[str, int]:
        """Of streams: those `open` and `cancelled` by clients, and tokens `generated`.

        Of a P: blocks `pinned` now, and prompts `handed_over`, of which D has `fetched` and
        `refused` some, the lease of others `expired`, and D came too `late` for some of these.
        """
        return {**self._server.counters, **self._routes.handoffs.statistics()}

    @property
    def peers(self) -> dict[str, FakeEngine]:
        """The engines that it can pull blocks from, by "host:port" of their P2P tiers: add some."""
        return self._routes.peers

    @property
    def faults(self) -> HttpFaults:
        """What goes wrong with requests from now on; it can be set at any time."""
        return self._server.faults

    @faults.setter
    def faults(self, faults: HttpFaults) -> None:
        self._server.faults = faults

    def metrics(self) -> str:
        """Return what `/metrics` has."""
        return self._routes.metrics()

    def close(self) -> None:
        """Stop answering: open connections are cut. Idempotent."""
        if not self._closed:
            self._closed = True
            self._server.close()

    def __enter__(self) -> HttpEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


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


class Routes:
    """The answers of each path: prompts served on the ranks in turn, and what an engine reports.

    Any thread may use them.
    """

    def __init__(
        self,
        ranks: Sequence[FakeEngine],
        *,
        kind: EngineKind,
        model: str,
        options: HttpOptions,
        clock: Callable[[], float],
    ) -> None:
        self.ranks: Final = {engine.rank.dp_rank: engine for engine in ranks}
        self.kind: Final[EngineKind] = kind
        self.model: Final = model
        self.options: Final = options
        self.peers: Final[dict[str, FakeEngine]] = {}
        self.faults: Callable[[], HttpFaults] = HttpFaults
        self.address = ("", 0)
        self.handoffs: Final = Handoffs(options.lease, clock)
        self._role = options.role if kind == "vllm" else "null"
        dialect = next(iter(self.ranks.values())).dialect.name
        self.version: Final = options.version or dialect.split("-")[1]
        self._lock = threading.Lock()
        self._turns = itertools.cycle(sorted(self.ranks))
        self.counters: dict[int, Counter[str]] = {rank: Counter() for rank in self.ranks}
        self._get: dict[str, Callable[[], Response]] = {
            "/health": lambda: Response(200, b""),
            "/v1/models": lambda: Response.of_json({"object": "list", "data": self._models()}),
        }
        self._post: dict[str, Callable[[Mapping[str, Any], str], Response | EventStream]] = {
            "/v1/completions": partial(self._complete, False),
            "/v1/chat/completions": partial(self._complete, True),
            "/tokenize": self._tokenize,
        }
        if options.metrics:
            kind_of_text = "text/plain; version=0.0.4; charset=utf-8"
            self._get["/metrics"] = lambda: Response(200, self.metrics().encode(), kind_of_text)
        if kind == "vllm":
            self._get["/version"] = lambda: Response.of_json({"version": self.version})
            if options.sources is not None:
                self._get["/kv_event_sources"] = self._sources
            self._post["/v1/completions/render"] = partial(self._render, False)
            self._post["/v1/chat/completions/render"] = partial(self._render, True)
        else:
            self._get["/server_info"] = self._server_info
            self._get["/get_server_info"] = self._get["/server_info"]
            self._get["/model_info"] = lambda: Response.of_json({"model_path": model})

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Response | EventStream:
        try:
            # Who has no key does not learn which routes there are. vLLM guards /v1 alone.
            key = self.options.api_key
            guarded = path.startswith("/v1") if self.kind == "vllm" else path != "/health"
            if key and guarded and headers.get("authorization") != f"Bearer {key}":
                raise RequestError(401, "Unauthorized")
            if method == "DELETE" and path.startswith(PATH):
                if not self.handoffs.settle(path):
                    raise RequestError(404, "this was not handed over here")
                return Response(200, b"")
            routes: Mapping[str, object] = self._get if method == "GET" else self._post
            if path not in routes:
                if path in self._get or path in self._post:
                    raise RequestError(405, "Method Not Allowed")
                raise RequestError(404, "Not Found")
            if method == "GET":
                return self._get[path]()
            # As vLLM and SGLang do: with 400, though what they say is the text of 415.
            if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
                raise RequestError(
                    400, "Unsupported Media Type: Only 'application/json' is allowed"
                )
            return self._post[path](read_body(body), headers.get("x-data-parallel-rank", ""))
        except RequestError as error:
            return Response.of_error(error)
        except KVIndexError as error:  # the engine was closed, or its publisher has failed
            return Response.of_error(RequestError(503, str(error)))

    def _serve(self, prompt: Completion, offered: list[dict[str, Any]]) -> tuple[Served, list[int]]:
        """Serve one prompt; return what it cost and what was generated, or raise RequestError.

        What a P hands over is appended to `offered`.
        """
        self.handoffs.expire()
        lora = None if prompt.model == self.model else prompt.model
        if lora is not None and lora not in self.options.loras:
            raise RequestError(404, f"The model `{prompt.model}` does not exist.")
        if self.options.prepends:
            prompt = msgspec.structs.replace(prompt, token_ids=[0, *prompt.token_ids])
        length = len(prompt.token_ids) + prompt.max_tokens
        if length > self.options.max_model_len:
            raise RequestError(
                400, f"{length} tokens are more than max_model_len, {self.options.max_model_len}"
            )
        # One at a time over all ranks: whose turn it is, and what a test expects of it, stay exact.
        with self._lock:
            asked = prompt.dp_rank if self.options.keeps_rank else None
            # In turn, so that a test knows which rank is next.
            rank = next(self._turns) if asked is None else asked
            if rank not in self.ranks:
                raise RequestError(400, f"there is no data-parallel rank {rank}")
            # Decided by the prompt alone, so that a test can expect what a front passes on.
            tokens = new_tokens(prompt)
            served = self._served(self.ranks[rank], prompt, lora, tokens, offered)
            counters = self.counters[rank]
            counters["requests"] += 1
            counters["prompt_tokens"] += served.prompt_tokens
            counters["generation_tokens"] += served.new_tokens
            counters["hits"] += served.hit_tokens
            if prompt.reads_cache and self.options.prefix_caching:
                counters["queries"] += served.prompt_tokens
        return served, tokens

    def _sources(self) -> Response:
        sources = {
            rank: {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": engine.endpoint,
                "replay_endpoint": engine.replay_endpoint,
                "buffer_steps": engine.buffer_steps,
                "hwm": engine.hwm,
                "max_queue_size": 100_000,
                "topic": engine.topic,
                **self.options.announce,
            }
            for rank, engine in sorted(self.ranks.items())
            if engine.publishes
        }
        if self.options.sources == "ranks":
            return Response.of_json({str(rank): source for rank, source in sources.items()})
        names = ("endpoint", "replay_endpoint", "topic")
        listed = [
            {"data_parallel_rank": rank, **{name: source[name] for name in names}}
            for rank, source in sources.items()
        ]
        return Response.of_json(listed if self.options.sources == "list" else {"sources": listed})

    def _server_info(self) -> Response:
        first = self.ranks[min(self.ranks)]
        info: dict[str, Any] = {
            "model_path": self.model,
            "served_model_name": self.model,
            "version": self.version,
            "page_size": first.block_size,
            "dp_size": len(self.ranks),
            "max_total_num_tokens": first.num_blocks * first.block_size,
            "max_req_input_len": self.options.max_model_len,
            "disable_radix_cache": not self.options.prefix_caching,
            "enable_cache_report": self.options.cached_tokens,
            "enable_metrics": self.options.metrics,
            "disaggregation_mode": self.options.role,
            "speculative_algorithm": "EAGLE" if first.dialect.bigrams else None,
        }
        if first.publishes:
            # SGLang states rank 0's ports, from which those of the others follow.
            host, port = _host_and_port(first.endpoint)
            described = {
                "publisher": "zmq",
                "endpoint_host": host,
                "endpoint_port_base": port - first.rank.dp_rank,
                "topic": first.topic,
                "block_size": first.block_size,
                "dp_size": len(self.ranks),
            }
            if first.replay_endpoint is not None:
                replay_port = _host_and_port(first.replay_endpoint)[1]
                described["replay_endpoint_port_base"] = replay_port - first.rank.dp_rank
            info["kv_events"] = {**described, **self.options.announce}
        return Response.of_json(info)

    def _models(self) -> list[dict[str, Any]]:
        base = {"object": "model", "created": 0, "owned_by": self.kind}
        length = {"max_model_len": self.options.max_model_len}
        return [
            {"id": self.model, **base, "root": self.model, "parent": None, **length},
            *({"id": x, **base, "root": x, "parent": self.model} for x in self.options.loras),
        ]

    def _served(
        self,
        engine: FakeEngine,
        prompt: Completion,
        lora: str | None,
        tokens: list[int],
        offered: list[dict[str, Any]],
    ) -> Served:
        length = len(prompt.token_ids)
        # Without caching nothing is stored, and so no event is published either.
        if not self.options.prefix_caching:
            return Served(prompt_tokens=length, hit_tokens=0, new_tokens=len(tokens))
        keys: PromptKeys = {
            "lora": lora,
            "salt": prompt.salt or self.options.salt or None,
            "extra_keys": _extra_keys(prompt, engine.block_size),
        }
        from_p = self._received(engine, prompt, keys) if self._role == "decode" else None
        handoff = self.faults().handoff
        peer, fault, lie = self.peers.get(prompt.source), self.faults().pull, 0
        try:
            if peer is not None and fault == "lie":
                lie = peer.hit(prompt.token_ids, **keys)
            elif peer is not None and not fault:
                engine.pull(peer, prompt.token_ids, **keys)
            flush = not self.options.silent
            if self._role == "prefill" and prompt.hands_over and handoff != "none":
                running = engine.prefill(prompt.token_ids, **keys, flush=flush)
                lost = handoff == "lost"
                offered.append(self.handoffs.offer(engine, running, self.address, lost=lost))
                served = running.served
            else:
                served = engine.serve(prompt.token_ids, **keys, new_tokens=tokens, flush=flush)
        except (ConfigurationError, TokenError) as error:
            raise RequestError(400, str(error)) from None
        # vLLM computes the last hit block again for EAGLE, and reports the hit without it.
        hit = max(lie, served.hit_tokens - self.options.drops_blocks * engine.block_size)
        if not (self.options.reads_cache and prompt.reads_cache):
            hit = 0
        # vLLM 0.32 overwrites D's own hit, whatever it was.
        hit = hit if from_p is None else from_p
        return Served(prompt_tokens=length, hit_tokens=hit, new_tokens=len(tokens))

    def _received(self, engine: FakeEngine, prompt: Completion, keys: PromptKeys) -> int | None:
        """As D, fetch what P computed; return P's hit, None without P, or raise RequestError."""
        handoff, fault = prompt.handoff, self.faults().handoff
        if handoff is None and fault == "demand":
            raise RequestError(400, "kv_transfer_params of a P are missing")
        if handoff is None or fault == "ignore":
            return None
        blocks = -(-len(prompt.token_ids) // engine.block_size)
        if fault == "refuse" or handoff.remote_num_tokens != len(prompt.token_ids):
            handoff.settle("refused")
            told = f"{handoff.remote_num_tokens} tokens for {len(prompt.token_ids)}"
            raise RequestError(400, f"the engine refuses what P computed: {told}")
        if handoff.settle("fetched"):
            # The last block moves, too, though it is not full and so not announced.
            moved = blocks - engine.hit(prompt.token_ids, **keys) // engine.block_size
            counters = self.counters[engine.rank.dp_rank]
            counters["transfers"] += 1
            counters["moved_bytes"] += moved * engine.block_size * TOKEN_BYTES
        elif self.options.load_failure == "fail":
            raise RequestError(500, "the KV that P computed could not be loaded")
        return handoff.remote_prefill_cached_tokens

    def _complete(self, chat: bool, body: Mapping[str, Any], rank: str) -> Response | EventStream:
        # Each choice is served anew, as the engines do: the second hits what the first stored.
        many = body.get("n") or 1
        if not isinstance(many, int) or not 1 <= many <= 128:
            raise RequestError(400, f"n is {many!r}, not a number from 1 to 128")
        prompts = [x for x in self._prompts(chat, body, rank) for _ in range(many)]
        offered: list[dict[str, Any]] = []
        results = [self._serve(prompt, offered) for prompt in prompts]
        reported = self._usage([served for served, _ in results], many)
        if body.get("stream"):
            options = body.get("stream_options")
            # Without `include_usage` a stream has none, as in the engines.
            usage = isinstance(options, dict) and bool(options.get("include_usage"))
            return EventStream(results, chat, prompts[0].model, usage, reported)
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
                # Of several prompts vLLM tells those of the first; streams have none.
                "kv_transfer_params": offered[0] if offered else None,
            }
        )

    def _usage(self, served: list[Served], choices: int) -> dict[str, Any]:
        # A prompt counts once, however many choices it has.
        prompt = sum(request.prompt_tokens for request in served[::choices])
        generated = sum(request.new_tokens for request in served)
        cached = sum(request.hit_tokens for request in served[::choices])
        details = {"cached_tokens": cached} if self.options.cached_tokens else None
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
        return completions(body, default_model=self.model, header_rank=rank)

    def _tokenize(self, body: Mapping[str, Any], _: str) -> Response:
        tokens = tokenized(body)
        length = self.options.max_model_len
        return Response.of_json(
            {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None}
        )

    def _render(self, chat: bool, body: Mapping[str, Any], rank: str) -> Response:
        if not self.options.render:
            raise RequestError(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
                "enable them.",
            )
        rendered = []
        for prompt in self._prompts(chat, body, rank):
            placed = sorted(prompt.images.items())
            features = {
                "mm_hashes": {"image": [digest for _, digest in placed]},
                "mm_placeholders": {"image": [{"offset": at, "length": 1} for at, _ in placed]},
            }
            # vLLM answers with the request that its engine would get.
            rendered.append(
                {
                    "request_id": "render-fake",
                    "token_ids": prompt.token_ids,
                    "features": features if placed else None,
                    "sampling_params": {"max_tokens": prompt.max_tokens},
                    "model": prompt.model,
                    "stream": False,
                    "cache_salt": prompt.salt,
                }
            )
        return Response.of_json(rendered[0] if chat else rendered)

    def metrics(self) -> str:
        """Return the engine's metrics in Prometheus' text format."""
        lines: list[str] = []
        label = "engine" if self.kind == "vllm" else "dp_rank"
        for counter, (name, what) in _COUNTERS[self.kind].items():
            lines += [f"# HELP {name} {what}", f"# TYPE {name} counter"]
            for rank, counts in sorted(self.counters.items()):
                labels = f'{label}="{rank}",model_name="{self.model}"'
                lines.append(f"{name}{{{labels}}} {float(counts[counter])}")
        if self.kind == "vllm":
            name = "vllm:cache_config_info"
            lines += [
                f"# HELP {name} Information of the LLMEngine CacheConfig",
                f"# TYPE {name} gauge",
            ]
            for rank, engine in sorted(self.ranks.items()):
                labels = (
                    f'block_size="{engine.block_size}",'
                    f'enable_prefix_caching="{self.options.prefix_caching}",engine="{rank}",'
                    f'num_gpu_blocks="{engine.num_blocks}",sliding_window="None"'
                )
                lines.append(f"{name}{{{labels}}} 1.0")
            if self._role != "null":
                name = "vllm:nixl_bytes_transferred"
                lines.append(f"# TYPE {name} histogram")
            for rank, counts in sorted(self.counters.items() if self._role != "null" else ()):
                labels = f'engine="{rank}",model_name="{self.model}"'
                count, moved = float(counts["transfers"]), float(counts["moved_bytes"])
                lines += [
                    f'{name}_bucket{{le="+Inf",{labels}}} {count}',
                    f"{name}_count{{{labels}}} {count}",
                    f"{name}_sum{{{labels}}} {moved}",
                ]
            name = "vllm:external_prefix_cache_hits_total"
            lines += [f"# TYPE {name} counter", f"{name} {float(self.options.external_hits)}"]
        return "\n".join([*lines, ""])


def _extra_keys(prompt: Completion, block_size: int) -> list[tuple[Any, ...] | None] | None:
    """The extra keys of blocks with images: as in vLLM, (digest, offset) pairs."""
    if not prompt.images:
        return None
    keys: list[tuple[Any, ...] | None] = [None] * (max(prompt.images) // block_size + 1)
    for position, digest in sorted(prompt.images.items()):
        block, offset = divmod(position, block_size)
        keys[block] = (*(keys[block] or ()), (digest, offset))
    return keys


def _host_and_port(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)
