"""One target while it is examined: what is known so far, and its findings."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq

from kvindex import Client, PublisherAddress, Worker
from kvindex.subscribe.discovery import EngineReport
from kvindex.tools.doctor.engine import EngineHttp, EngineMetrics
from kvindex.tools.doctor.listener import Listener
from kvindex.tools.doctor.report import Finding, finding_of
from kvindex.wire.errors import ConfigurationError


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The engine to examine: by its URL, by its endpoints, or by both.

    Attributes:
        url: the engine's HTTP server, or "".
        worker: where it publishes; None to ask the engine.
    """

    url: str = ""
    worker: Worker | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that an examination waits at most.

    Attributes:
        http: for the answers of one engine to what it is and how it stands.
        handshake: for a connection and for each greeting at a port.
        live: until every stream is live, or a replay brings more.
        replay: until every stream is live, as long as replays bring more.
        listen: for events: without a test prompt for all of it, with one until its events arrive.
        completion: for the answer to one prompt.

    Raises:
        ConfigurationError: one is not above 0.
    """

    http: float = 5.0
    handshake: float = 2.0
    live: float = 5.0
    replay: float = 60.0
    listen: float = 3.0
    completion: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            seconds = getattr(self, name)
            if not 0 < seconds <= 3600:
                raise ConfigurationError(f"{name} must be above 0 and up to 3600 s, not {seconds}")


class Shared(msgspec.Struct, kw_only=True):
    """What all cases of one examination share: its settings, as of `examine`, and its connections.

    Attributes:
        limits, passive, token, tls, model, block_size: the settings.
        seed: of the test prompt; engines with one tokenizer get the same prompt.
        context: of all sockets.
        client: subscribed to every engine that can be reached; None before that, or if there is
            none.
    """

    limits: Limits
    passive: bool
    token: str
    tls: ssl.SSLContext | None
    model: str
    block_size: int | None
    seed: int
    context: zmq.Context[zmq.Socket[bytes]]
    client: Client | None = None


class Case:
    """A target under examination. Owned by one thread at a time."""

    def __init__(self, target: Target, shared: Shared) -> None:
        self.target = target
        self.shared = shared
        self.name = target.worker.name if target.worker else target.url.split("://", 1)[-1]
        self.http: EngineHttp | None = None
        self.report: EngineReport | None = None
        self.worker: Worker | None = target.worker
        self.metrics = EngineMetrics()
        self.listener: Listener | None = None
        self.findings: list[Finding] = []
        self.broken: set[int] = set()  # ranks whose port was found to be wrong
        self.test: dict[str, Any] | None = None

    @property
    def engine(self) -> str:
        """The engine's kind: "vllm", "sglang" or ""."""
        return self.report.kind if self.report else ""

    @property
    def info(self) -> Mapping[str, Any]:
        """SGLang's server info; empty for other engines."""
        answers = self.report.answers if self.report else {}
        info = answers.get("/server_info") or answers.get("/get_server_info")
        return info if self.engine == "sglang" and isinstance(info, Mapping) else {}

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest request, if the engine reports them."""
        models = self.report.answers.get("/v1/models") if self.report else None
        data = models.get("data") if isinstance(models, Mapping) else None
        first = data[0] if isinstance(data, list) and data else {}
        stated = (first.get("max_model_len"), self.info.get("max_req_input_len"))
        return next((x for x in stated if isinstance(x, int) and x > 0), None)

    @property
    def block_size(self) -> int | None:
        """Tokens of a block, as the engine reports."""
        if self.report and self.report.block_size:
            return self.report.block_size
        stated = self.metrics.labels("vllm:cache_config_info").get("block_size", "")
        return int(stated) if stated.isdigit() and 0 < len(stated) < 10 and int(stated) else None

    @property
    def model(self) -> str:
        """The model to ask for: the user's, or the first that the engine serves."""
        return self.shared.model or (self.report.model if self.report else "")

    @property
    def addresses(self) -> list[PublisherAddress]:
        """Where its ranks publish."""
        return self.worker.publishers() if self.worker else []

    def add(self, kind: str, dp_rank: int | None = None, /, **evidence: Any) -> None:
        """Note a finding, of the whole engine or of a rank."""
        subject = self.name if dp_rank is None else f"{self.name}/{dp_rank}"
        self.findings.append(finding_of(kind, subject, engine=self.engine, **evidence))
