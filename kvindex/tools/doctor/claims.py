"""An engine's claims over HTTP: what is wrong with them, and with the user's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvindex import PublisherAddress
from kvindex.subscribe.discovery import DiscoveryError, ask_engine
from kvindex.tools.doctor.case import Case
from kvindex.tools.doctor.engine import EngineHttp
from kvindex.tools.doctor.report import finding_of
from kvindex.wire.web import Web

_DENIED: Final = re.compile("answers 40[13]")
_LARGE_BLOCK: Final = 256  # tokens
_MAX_RANKS: Final = 64  # of a service that are reported one by one

_PAGES = "pages are hashed by their own tokens only: the same page at two places is one"
_PLACES = "events leave out where pages belong: answers are 0 or too low"
_SPLIT = "a split prefix is announced as removed and never stored again: answers are too low"
_SHA256 = "with sha256 hashes no batch can be encoded, and every one is lost"
_HYBRID = "KV events switch off the hybrid cache manager: hybrid models cache less"

# Engine, first version with it, first version without it, what it is.
_BUGS: Final = (
    ("sglang", "0.4.8", "0.5.1", _PAGES),
    ("sglang", "0.5.1", "0.5.6", _PLACES),
    ("sglang", "0.5.6", "0.5.7", _SPLIT),
    ("vllm", "0.9.0", "0.10.2", _SHA256),
    ("vllm", "0.10.2", "0.20.0", _HYBRID),
)


def ask_and_check(case: Case) -> None:
    """Ask the engine at the case's URL what it is and where it publishes; note what is wrong."""
    url, token, limits = case.target.url, case.shared.token, case.shared.limits
    web = Web(url, token=token or None, context=case.shared.tls)
    try:
        report = ask_engine(url, limits.http, token=token or None, context=case.shared.tls)
    except DiscoveryError as error:
        if error.reason in ("status", "content") and _check_service(case, web):
            return
        kind = {"denied": "engine-denied", "tls": "tls-failed"}.get(error.reason)
        case.add(kind or "engine-unreachable", url=url, error=str(error))
        return
    if not report.kind and _check_service(case, web):
        return  # a gateway, which answers as an engine does
    case.report = report
    refusal = next((why for why in report.failures.values() if _DENIED.match(why)), "")
    if refusal:  # vLLM guards only what is under /v1
        case.add("engine-denied", url=url, error=refusal)
    case.http = EngineHttp(web, timeout=limits.http, completion=limits.completion)
    case.metrics = case.http.metrics()
    _check_events(case)
    _check_cache(case)
    _check_model(case)
    _check_version(case)


def _check_service(case: Case, web: Web) -> bool:
    """Note how the engines of a `kvindex serve` or `gateway` stand; return whether it is one."""
    limit = case.shared.limits.http
    service, standings = "gateway", {}
    try:
        fleet = web.get("/api/fleet", limit).json()
        standings["missing"] = dict(fleet["missing"])
        standings["behind"] = {
            f"{rank['worker']}/{rank['dp_rank']}": rank["reason"] or f"its state is {rank['state']}"
            for rank in fleet["ranks"]
            if rank["state"] != "live"
        }
        ready = web.get("/ready", limit)
        if ready.body and "live" in (reported := ready.json()):  # a gateway's has no such word
            service, standings = "serve", {k: v for k, v in reported.items() if isinstance(v, dict)}
    except (DiscoveryError, ValueError, TypeError, KeyError, AttributeError):
        return False
    if not fleet["ranks"] and not any(standings.values()):
        case.add("service-without-workers", url=case.target.url, service=service)
    for standing, ranks in standings.items():
        for rank, why in list(ranks.items())[:_MAX_RANKS]:
            found = {"rank": rank, "reason": str(why)[:400], "standing": standing}
            case.add("service-rank-not-live", service=service, **found)
    case.add("service-examined", service=service)
    return True


def version_of(text: str) -> tuple[int, ...]:
    """Return a version's leading numbers.

    Examples:
        >>> version_of("0.10.1.1rc2"), version_of("dev")
        ((0, 10, 1, 1), ())
    """
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number[:9]) for number in numbers[0].split(".")) if numbers else ()


def _check_events(case: Case) -> None:
    report = case.report
    assert report is not None
    others = sorted({p for p in _publishers(report.answers) if p not in ("zmq", "null")})
    if others:
        case.add("publisher-not-zmq", publisher=", ".join(others))
    elif report.publishes is False:
        case.add("events-off", url=report.url)
    _compare_endpoints(case, case.addresses, report.ranks)
    if others or report.publishes is False:
        case.broken.update(address.dp_rank for address in case.addresses)  # nothing is to be there
    if case.worker is not None or others:
        return
    try:
        case.worker = report.worker()
    except DiscoveryError as error:
        if error.reason == "unsaid":
            case.add("sources-unknown", url=report.url, failures=report.failures)
        elif error.reason == "content":
            case.add("endpoint-unreachable", endpoint=report.url, error=str(error))
    else:
        case.name = case.worker.name


def _compare_endpoints(
    case: Case, given: Sequence[PublisherAddress], stated: Sequence[PublisherAddress]
) -> None:
    """Note where the user and the engine state different ports; hosts may be mapped."""
    if not given or not stated:
        return
    by_rank = {address.dp_rank: address for address in stated}
    if len(stated) == len(given) == 1:  # the only one, whatever its number
        pairs = [(given[0], stated[0])]
    else:
        pairs = [(a, by_rank[a.dp_rank]) for a in given if a.dp_rank in by_rank]
        ranks = [address.dp_rank for address in given]
        if ranks != list(by_rank):
            case.add("ranks-differ", stated=list(by_rank), given=ranks)
            case.broken.update(set(ranks) - set(by_rank))
    for address, stated_address in pairs:
        ports, stated_ports = _ports(address), _ports(stated_address)
        if address.replay is None and stated_address.replay is not None:
            case.add("replay-not-given", address.dp_rank, port=stated_ports["replay"])
            ports["replay"] = stated_ports["replay"]
        if ports != stated_ports:
            case.add("endpoints-differ", address.dp_rank, stated=stated_ports, given=ports)


def accept_mapped(case: Case) -> None:
    """Accept ports that differ as mapped ones, if the test prompt arrived through one of them."""
    differing = {f.subject for f in case.findings if f.id == "endpoints-differ"}
    foreign = any(finding.id == "replay-of-another" for finding in case.findings)
    if not differing or foreign or not case.test or case.test["outcome"] != "all-well":
        return
    listener = case.listener
    if listener is not None:
        tested = {f"{case.name}/{r}" for r in listener.received if listener.first(r).tested}
        if not tested & differing:
            return
    case.findings = [
        finding_of("endpoints-mapped", finding.subject, engine=case.engine, **finding.evidence)
        if finding.id == "endpoints-differ"
        else finding
        for finding in case.findings
    ]


def _ports(address: PublisherAddress) -> dict[str, int | str | None]:
    """The ports of a rank; other endpoints as they are."""
    ports: dict[str, int | str | None] = {}
    for name, endpoint in (("port", address.endpoint), ("replay", address.replay)):
        scheme, _, port = (endpoint or "").rpartition(":")
        ports[name] = int(port) if scheme.startswith("tcp:") and port.isdigit() else endpoint
    return ports


def _publishers(answers: Mapping[str, Any]) -> Iterator[str]:
    """The publishers that an engine's answers name."""
    sources = answers.get("/kv_event_sources")
    if isinstance(sources, Mapping):
        sources = sources.get("sources", list(sources.values()))
    info = answers.get("/server_info") or answers.get("/get_server_info")
    described = [info.get("kv_events")] if isinstance(info, Mapping) else []
    for entry in [*(sources if isinstance(sources, list) else []), *described]:
        if isinstance(entry, Mapping) and isinstance(entry.get("publisher"), str):
            yield entry["publisher"]


def _check_cache(case: Case) -> None:
    config = case.metrics.labels("vllm:cache_config_info")
    if config.get("enable_prefix_caching") == "False" or case.info.get("disable_radix_cache"):
        case.add("prefix-caching-off", source="cache_config_info" if config else "server_info")
    size, longest = case.block_size, case.max_model_len
    if size is not None and longest is not None and 2 * size > longest:
        case.add("block-exceeds-prompts", block_size=size, max_model_len=longest)
    elif size is not None and size >= _LARGE_BLOCK:
        case.add("block-large", block_size=size)
    blocks = config.get("num_gpu_blocks", "")
    tokens = int(blocks) * size if blocks.isdigit() and len(blocks) < 12 and size else None
    if not config:
        stated = case.info.get("max_total_num_tokens")
        tokens = stated if isinstance(stated, int) else None
    if tokens and longest and tokens < 2 * longest:
        case.add("cache-small", cache_tokens=tokens, max_model_len=longest)


def _check_model(case: Case) -> None:
    info = case.info
    if info.get("disaggregation_mode") == "decode":
        case.add("decode-only", disaggregation_mode="decode")
    algorithm = info.get("speculative_algorithm")
    if isinstance(algorithm, str) and algorithm.upper() in ("EAGLE", "EAGLE3", "NEXTN"):
        case.add("speculates-bigrams", algorithm=algorithm)
    if len(case.addresses) > 1 and case.target.worker is None:
        case.add("dp-behind-one-port", ranks=len(case.addresses))


def _check_version(case: Case) -> None:
    version = case.report.version if case.report else ""
    for engine, first, fixed, bug in _BUGS:
        if case.engine == engine and version_of(first) <= version_of(version) < version_of(fixed):
            named = {"version": version, "bug": bug, "since": fixed, "engine_name": engine}
            case.add("version-known-bug", **named)
