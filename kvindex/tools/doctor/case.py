"""One target while it is examined, its findings, and an examination's results as values."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import zmq

from kvindex import Client, PublisherAddress, Worker
from kvindex.subscribe.discovery import EngineReport
from kvindex.tools.doctor.causes import CAUSES, SECTIONS, Severity, words_for
from kvindex.tools.doctor.engine import EngineHttp, EngineMetrics
from kvindex.tools.doctor.listener import Listener
from kvindex.wire.errors import ConfigurationError

_SEVERITIES: Final = ("error", "warning", "info")
_ORDER: Final = {kind: place for place, kind in enumerate(CAUSES)}

# What follows from other findings, and is not worth a line beside them.
_TEST: Final = frozenset(
    {
        "silent-while-serving",
        "index-misses",
        "index-and-engine-miss",
        "caches-unpublished",
        "nothing-cached",
    }
)
_LEFT_OUT: Final = frozenset({"stream-incomplete", "blocks-left-out"})
_STREAM: Final = _LEFT_OUT | {"stream-not-live", "replay-running"}
_PORTS: Final = frozenset(kind for kind, section in SECTIONS.items() if section == "ports")
_EXPLAINS: Final[dict[str, frozenset[str]]] = {
    "events-off": _PORTS | _STREAM,
    "publisher-not-zmq": _PORTS | _STREAM,
    "ranks-differ": _STREAM,
    "endpoints-differ": _PORTS | _STREAM,
    "several-publishers": _STREAM | {"replay-of-another"},
    "replay-refused": _STREAM,
    "replay-silent": _STREAM,
    "replay-wrong-socket": _STREAM,
    "replay-of-another": _STREAM,
    "replay-missing": _LEFT_OUT,
    "replay-not-given": _LEFT_OUT,
    "replay-not-named": _LEFT_OUT,
    "stream-not-live": _TEST | {"blocks-left-out"},
    "replay-running": _TEST | {"blocks-left-out"},
    "stream-incomplete": frozenset({"blocks-left-out"}),
    "windows-only": frozenset({"index-misses", "index-and-engine-miss"}),
}


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


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, or a hint.

    Attributes:
        id: which kind of finding; `docs/doctor.md` lists them.
        severity: "error", "warning" or "info".
        subject: whose: an engine's name, one of its ranks, or a URL.
        what: the finding, as a sentence.
        evidence: what was seen, as plain values.
        remedy: what to do.
        docs: where more stands.
    """

    id: str
    severity: Severity
    subject: str
    what: str
    evidence: dict[str, Any]
    remedy: str
    docs: str


def finding_of(kind: str, subject: str, /, *, engine: str = "", **evidence: Any) -> Finding:
    """Return a finding of this kind, whose evidence also fills its sentences.

    Flags in the remedy are the engine's, "vllm" or "sglang"; both are named if it is not known.

    Examples:
        >>> finding_of("publisher-refused", "a/0", engine="vllm", endpoint="tcp://h:1").what
        'nothing listens at tcp://h:1'
    """
    cause = CAUSES[kind]
    filled = words_for(engine) | evidence
    return Finding(
        id=kind,
        severity=cause.severity,
        subject=subject,
        what=cause.what.format_map(filled),
        evidence=evidence,
        remedy=cause.remedy.format_map(filled),
        docs=f"docs/doctor.md#{SECTIONS[kind]}",
    )


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """One target that was examined.

    Attributes:
        name: what it is called in findings.
        url: its HTTP server, or "".
        engine: "vllm", "sglang" or "".
        version: as the engine reports it.
        ranks: by dp_rank, where it publishes.
        test: of the active test: `outcome`, and in tokens what was `sent`, reported as `stored`,
            `predicted` by the index and `cached` by the engine; None if there was none.
    """

    name: str
    url: str
    engine: str
    version: str
    ranks: dict[int, str]
    test: dict[str, Any] | None = None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What an examination found.

    Attributes:
        targets: what was examined.
        findings: what was found, worst first.
        notes: how far the prompt asked for is held, rank by rank.
        seconds: how long it took.
    """

    targets: tuple[Examined, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 if something is, 2 if a target could not be examined."""
        problems = [finding for finding in self.findings if finding.severity != "info"]
        if any(not CAUSES[finding.id].blind for finding in problems):
            return 1
        return 2 if problems else 0


class Shared(msgspec.Struct, kw_only=True):
    """What all cases of one examination share: its settings, as of `examine`, and its connections.

    `client` is None until all engines were asked, and if none can be reached.
    """

    limits: Limits
    passive: bool
    token: str
    tls: ssl.SSLContext | None
    model: str
    block_size: int | None
    seed: int  # of the test prompt: engines with one tokenizer get the same
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
        # Nothing that an engine sends is trusted to have the form that it should.
        models = self.report.answers.get("/v1/models") if self.report else None
        data = models.get("data") if isinstance(models, Mapping) else None
        listed = data if isinstance(data, list) else []
        first = next((model for model in listed if isinstance(model, Mapping)), {})
        stated = (first.get("max_model_len"), self.info.get("max_req_input_len"))
        return next((x for x in stated if isinstance(x, int) and x > 0), None)

    @property
    def block_size(self) -> int | None:
        """Tokens of a block, as the engine reports."""
        if self.report and self.report.block_size:
            return self.report.block_size
        # Before vLLM reported its sources, only the metrics had it.
        # Nine digits at most: an engine may send any text, and for thousands of them `int` raises.
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


# Which findings are shown, and in which order ---------------------------------------------------


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return one target's findings, worst first, without what follows from others.

    A rank's findings explain others of this rank or of the whole engine.
    """
    known = list(findings)
    # A cause that is itself explained still explains: the chain ends at the first.
    kept = [finding for finding in known if not any(_explains(cause, finding) for cause in known)]
    if any(finding.severity != "info" for finding in kept):
        kept = [finding for finding in kept if finding.id != "all-well"]
    return sorted(kept, key=rank_of)


def _explains(cause: Finding, finding: Finding) -> bool:
    if not (_covers(cause.subject, finding.subject) or _covers(finding.subject, cause.subject)):
        return False
    explained = _EXPLAINS.get(cause.id, frozenset())
    # Whatever is badly wrong with an engine, its test prompt fails for it.
    if cause.severity == "error" and cause.id not in _TEST | {"stream-not-live"}:
        explained = explained | _TEST | {"stream-not-live", "replay-running"}
    return finding.id in explained


def _covers(subject: str, other: str) -> bool:
    """Whether a subject is the other, or the engine whose rank the other is."""
    return subject == other or subject == other.rpartition("/")[0]


def rank_of(finding: Finding) -> tuple[int, int, str]:
    """Return by what findings are sorted: severity, then how near the cause."""
    return _SEVERITIES.index(finding.severity), _ORDER[finding.id], finding.subject
