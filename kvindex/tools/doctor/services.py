"""What a running `kvindex serve` or `kvindex gateway` states of its engines, and its counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kvindex.service.overview import Routed
from kvindex.tools.doctor.case import Case
from kvindex.tools.doctor.engine import EngineHttp
from kvindex.wire.errors import UNREADABLE, DiscoveryError
from kvindex.wire.web import Web

_MAX_RANKS: Final = 64  # that are reported one by one
_MOST_SHOWN: Final = 400  # characters of a service's own words
_KNOWN: Final = frozenset({"ids", "local", "render", "tokenize"})  # where tokens are from
# Why there are none, though another engine, or setting, would give them.
_AVOIDABLE: Final = frozenset({"no_source", "refused", "slow", "reasoning_effort"})
# What engines answer to a chat that none can render: clients must not decide what the doctor finds.
_CLIENTS_OWN: Final = frozenset({"status_400", "status_413", "status_422", "template"})
_DENIED: Final = ("operators", "token", "token_missing")  # codes of a gateway's refusals
_FEW: Final = 0.01  # of the prompts: so many may be by chance


class _Rank(msgspec.Struct):
    worker: str
    dp_rank: int
    state: str
    reason: str
    routed: Routed | None = None

    def __str__(self) -> str:
        return f"{self.worker}/{self.dp_rank}"


class _Fleet(msgspec.Struct):
    ranks: list[_Rank]
    missing: dict[str, str]


class _RankCounters(msgspec.Struct):
    suspicion: str = ""


class _RouterCounters(msgspec.Struct):
    bookings: dict[str, int] = {}
    ranks: dict[str, _RankCounters] = {}


class _Counters(msgspec.Struct):
    """The part of a gateway's statistics that is read here."""

    requests: list[tuple[str, int, str, int]] = []  # path, status, end, how many
    tokens: dict[str, int] = {}
    tokens_from: dict[str, int] = {}
    token_failures: dict[str, int] = {}
    shed: dict[str, int] = {}
    prefills: dict[str, int] = {}
    routers: dict[str, _RouterCounters] = {}

    @property
    def served(self) -> int:
        # Paths without a route are no requests: the doctor's own first questions are among them.
        return sum(number for path, *_, number in self.requests if path != "(other)")


def check_service(case: Case, web: Web) -> bool:
    """Note how the engines of a `kvindex serve` or `gateway` stand; return whether it is one."""
    limit = case.shared.limits.http
    service, standings, counters = "gateway", {}, None
    try:
        answer = web.get("/api/fleet", limit)
        if answer.status in (401, 403) and answer.json()["error"]["code"] in _DENIED:
            case.add("service-denied", service=service, url=case.target.url)
            return True
        fleet = msgspec.json.decode(answer.body, type=_Fleet)
        standings["missing"] = fleet.missing
        standings["behind"] = {
            str(rank): rank.reason or f"its state is {rank.state}"
            for rank in fleet.ranks
            if rank.state != "live"
        }
        ready = web.get("/ready", limit)
        if ready.body and "live" in (reported := ready.json()):  # a gateway's has no such word
            service, standings = "serve", {k: v for k, v in reported.items() if isinstance(v, dict)}
        else:
            counters = msgspec.json.decode(web.get("/admin/statistics", limit).body, type=_Counters)
    except (DiscoveryError, TypeError, KeyError, AttributeError, *UNREADABLE):
        return False
    if counters is not None and ready.status != 200:
        case.add("gateway-not-ready", status=ready.status)
    if not fleet.ranks and not any(standings.values()):
        case.add("service-without-workers", url=case.target.url, service=service)
    for standing, ranks in standings.items():
        for rank, why in list(ranks.items())[:_MAX_RANKS]:
            found = {"rank": rank, "reason": _short(why), "standing": standing}
            case.add("service-rank-not-live", service=service, **found)
    seen = f"live ranks: {len(fleet.ranks)}"
    if counters is not None:
        _check_left_out(case, fleet.ranks)
        _check_tokens(case, counters)
        _check_requests(case, counters)
        _check_pairs(case, fleet.ranks, counters.prefills.get("apart", 0))
        prompt, delivered = counters.tokens.get("prompt", 0), counters.tokens.get("delivered", 0)
        seen += f"; requests: {counters.served}"
        seen += f"; of their prompts' tokens cached: {delivered / prompt:.0%}" if prompt else ""
    case.add("service-examined", service=service)
    case.add("all-well", seen=seen)  # left out beside anything that is wrong
    return True


def _check_left_out(case: Case, ranks: Iterable[_Rank]) -> None:
    """Note the engines that get no requests, each once."""
    engines = {
        rank.worker: rank.routed
        for rank in ranks
        if rank.routed is not None and rank.routed.left_out
    }
    for worker, routed in list(engines.items())[:_MAX_RANKS]:
        kind = {"drained": "worker-drained", "ejected": "worker-ejected"}.get(routed.left_out)
        seconds = f"{routed.seconds or 0.0:.0f}"
        told = {"worker": worker, "reason": _short(routed.reason), "seconds": seconds}
        case.add(kind or "worker-away", **told)


def _check_tokens(case: Case, counters: _Counters) -> None:
    """Note prompts whose tokens were not known, and why."""
    # Without a reason: refused before anybody asked for tokens.
    sources = {why: n for why, n in counters.tokens_from.items() if why}
    prompts = sum(sources.values())
    unknown = Counter({why: n for why, n in sources.items() if why not in _KNOWN})
    avoidable = Counter({why: n for why, n in unknown.items() if why in _AVOIDABLE})
    engines_own = sum(n for why, n in counters.token_failures.items() if why not in _CLIENTS_OWN)
    avoidable["refused"] = min(avoidable["refused"], engines_own)
    failures = _counted(counters.token_failures)
    told = {"prompts": prompts, "failures": failures}
    if sum(avoidable.values()) > _FEW * prompts:
        reasons = _counted(avoidable)
        case.add("tokens-unknown", unknown=sum(avoidable.values()), reasons=reasons, **told)
        unknown -= avoidable
    elif failures:
        case.add("tokens-refused", failed=sum(counters.token_failures.values()), reasons=failures)
    if unknown:
        reasons = _counted(unknown)
        case.add("prompts-by-load", unknown=sum(unknown.values()), reasons=reasons, **told)


def _check_requests(case: Case, counters: _Counters) -> None:
    """Note requests that found no room, or whose end nobody reported, and hits that surprise."""
    if shed := sum(counters.shed.values()):
        reasons = _counted(counters.shed)
        case.add("requests-shed", shed=shed, requests=counters.served, reasons=reasons)
    bookings: Counter[str] = Counter()
    for router in counters.routers.values():
        bookings.update(router.bookings)
    if bookings["expired"]:
        ended = bookings["finished"] + bookings["cancelled"] + bookings["expired"]
        told = {name: bookings[name] for name in ("expired", "late", "open")}
        case.add("bookings-expired", ended=ended, **told)
    suspected = {
        rank: found.suspicion
        for router in counters.routers.values()
        for rank, found in router.ranks.items()
        if found.suspicion
    }
    for rank, suspicion in list(suspected.items())[:_MAX_RANKS]:
        case.add("hits-unexpected", rank=rank, suspicion=_short(suspicion))


def _check_pairs(case: Case, ranks: Iterable[_Rank], apart: int) -> None:
    """Note if engines that decode have fetched nothing of what others prefilled for them."""
    decoders = {x.routed.url for x in ranks if x.routed is not None and x.routed.role == "decode"}
    if not apart or not decoders:
        return
    # Of an engine only its own metrics say what it fetched. It is not given the gateway's token.
    limits = case.shared.limits
    answers = [
        EngineHttp(
            Web(url, context=case.shared.tls), timeout=limits.http, completion=limits.completion
        ).metrics()
        for url in sorted(decoders)[:_MAX_RANKS]
    ]
    fetched = sum(found.total("vllm:nixl_bytes_transferred_count") or 0 for found in answers)
    # One that has served nothing was started a moment ago.
    if not fetched and all(found.total("vllm:request_success") for found in answers):
        case.add("pair-never-transfers", apart=apart, decoders=", ".join(sorted(decoders)))


def _short(words: object) -> str:
    return str(words)[:_MOST_SHOWN]


def _counted(reasons: Mapping[str, int]) -> str:
    """Return reasons with their numbers, the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return _short(", ".join(f"{number} {reason}" for reason, number in ordered if number))
