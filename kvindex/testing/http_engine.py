"""A fake engine with an HTTP front, as vLLM and SGLang have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvindex.testing.engine import FakeEngine
from kvindex.testing.http_routes import Routes, metrics_text
from kvindex.testing.http_server import Server
from kvindex.testing.http_service import EngineKind, EngineService, HttpOptions
from kvindex.testing.http_stream import HttpFaults
from kvindex.wire.errors import ConfigurationError


class HttpEngine:
    """Answer over HTTP for fake engines: completions, and what an engine reports of itself.

    Every request is served by the cache of a rank, whose events are published as always. Routes:

    - `/v1/completions`, `/v1/chat/completions`, also streamed: `prompt` is text, token ids, or a
      list of either. `usage.prompt_tokens_details.cached_tokens` is what was hit.
      `cache_salt`, `model` (an adapter's name), the header `X-data-parallel-rank`,
      `prompt_logprobs` and `echo` with `logprobs` (which have the cache left unread) work as in
      the engines. The ranks serve in turn.
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
    ) -> None:
        ranks = [engine] if isinstance(engine, FakeEngine) else list(engine)
        if not ranks or len({rank.rank.dp_rank for rank in ranks}) < len(ranks):
            raise ConfigurationError(f"engine: one for each DP rank, not {len(ranks)} of some rank")
        self._service = EngineService(
            ranks,
            kind=kind or ranks[0].dialect.engine,
            model=model,
            options=options or HttpOptions(),
        )
        try:
            self._server = Server(host, port, Routes(self._service).answer)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"cannot listen at {host}:{port}: {error}") from error
        self._closed = False

    @property
    def url(self) -> str:
        """The beginning of every URL that it answers, with host and port."""
        host, port = self._server.address[:2]
        return f"http://{host!s}:{port}"

    @property
    def requests(self) -> int:
        """How many prompts were served."""
        return sum(counts["requests"] for counts in self._service.counters.values())

    @property
    def counters(self) -> Mapping[str, int]:
        """Of streams: those `open` and `cancelled` by clients, and tokens `generated`."""
        return dict(self._server.counters)

    @property
    def faults(self) -> HttpFaults:
        """What goes wrong with requests from now on; it can be set at any time."""
        return self._server.faults

    @faults.setter
    def faults(self, faults: HttpFaults) -> None:
        self._server.faults = faults

    def metrics(self) -> str:
        """Return what `/metrics` has."""
        return metrics_text(self._service)

    def close(self) -> None:
        """Stop answering: open connections are cut. Idempotent."""
        if not self._closed:
            self._closed = True
            self._server.close()

    def __enter__(self) -> HttpEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
