"""`kvindex serve` beside Dynamo's indexer: prompts of 8,192 tokens over HTTP."""

from __future__ import annotations

import importlib.util
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

from benchmarks.bench import Bench
from benchmarks.feed import FeedSpec, sentinel_tokens
from benchmarks.http_asking import ask_in_turn, ask_together, request
from benchmarks.indexer import MODEL, Footprint, Indexer, dynamo_indexer, kvindex_server
from benchmarks.measures.ingest import TIMEOUT, feed
from benchmarks.process import Lines
from benchmarks.results import OURS, Bar, Result
from benchmarks.stats import median, percentile

EVENT_BLOCKS = 8
RATE = 32_000.0  # blocks per second that come in
FILL_RATE = 200_000.0  # likewise before: a flood would leave its queues in the memory measured
PAUSE = 0.001  # seconds between requests while events come in
CONNECTIONS = (8, 64)
DYNAMO = ("Dynamo, 1 thread", "Dynamo, 4 threads")
JSON_BARS = {64: Bar(times=1.5), 512: Bar(times=2.0)}
RAW_BARS = {64: Bar(times=3.0)}
_NEEDED = ("httptools", "prometheus_client")
_JSON, _RAW = "JSON", "raw tokens"


class _Party(NamedTuple):
    """A service, who feeds it, and what it is asked."""

    service: Indexer
    feeder: Lines
    requests: Mapping[str, list[bytes]]  # by form


def run(bench: Bench) -> list[Result]:
    """Return the figures for each number of ranks; none if the extra `server` is missing."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        print("\n`http` is left out: it needs `pip install -e '.[server]'`")
        return []
    return [result for ranks in bench.scale.http_entries for result in _at(bench, ranks)]


def _at(bench: Bench, ranks: int) -> list[Result]:
    with ExitStack() as stack:
        parties = {
            label: stack.enter_context(_party(bench, start, ranks, takes_raw=label not in DYNAMO))
            for label, start in _starters(bench).items()
        }
        taken = {label: party.service.footprint() for label, party in parties.items()}
        alone: dict[tuple[str, str], list[list[int]]] = {}
        together: dict[int, dict[str, list[float]]] = {number: {} for number in CONNECTIONS}
        busy: dict[tuple[str, str], list[list[int]]] = {}
        scale = bench.scale
        for _ in range(scale.rounds):
            for label, (service, _, requests) in parties.items():
                for form, messages in requests.items():
                    samples = ask_in_turn(service.address, messages, count=scale.http_requests)
                    alone.setdefault((form, label), []).append(samples)
        for _ in range(scale.rounds):
            for number in CONNECTIONS:
                for label, (service, _, requests) in parties.items():
                    rate = ask_together(
                        service.address, requests[_JSON], number, scale.http_seconds
                    )
                    together[number].setdefault(label, []).append(rate)
        for _ in range(scale.rounds):
            for label, (service, feeder, requests) in parties.items():
                feeder.say("go on, at the rate")
                samples = ask_in_turn(
                    service.address, requests[_JSON], seconds=scale.busy_seconds, pause=PAUSE
                )
                feeder.hear()  # all of this part is sent
                busy.setdefault((_JSON, label), []).append(samples)
    return [
        *_latencies(ranks, alone),
        *_throughputs(ranks, together),
        *_under_events(ranks, busy),
        *_footprints(ranks, taken),
    ]


def _starters(bench: Bench) -> dict[str, Callable[[], Indexer]]:
    starters: dict[str, Callable[[], Indexer]] = {
        OURS: kvindex_server,
    }
    if bench.peers:
        python = bench.python("dynamo")
        starters[DYNAMO[0]] = lambda: dynamo_indexer(python, threads=1)
        starters[DYNAMO[1]] = lambda: dynamo_indexer(python, threads=4)
    return starters


@contextmanager
def _party(
    bench: Bench, start: Callable[[], Indexer], ranks: int, *, takes_raw: bool
) -> Iterator[_Party]:
    """A service that holds the workload, and whose answers were checked."""
    spec = FeedSpec(
        source=bench.source(),
        ranks=ranks,
        blocks=bench.scale.http_entries[ranks],
        event_blocks=EVENT_BLOCKS,
        batch_events=1,
        paced_blocks=int(bench.scale.busy_seconds * RATE) * bench.scale.rounds,
        paced_parts=bench.scale.rounds,
        rate=RATE,
        fill_rate=FILL_RATE,
    )
    with feed(spec) as (feeder, said), closing(start()) as service:
        service.register(said["endpoints"])
        feeder.hear()  # joined
        feeder.say("go")
        prompts = feeder.hear()["prompts"]
        service.wait(sentinel_tokens(), ranks, TIMEOUT)
        for tokens, depths in prompts:
            if service.depths(tokens) != dict(depths):
                raise AssertionError(f"a wrong answer for a prompt of {len(tokens)} tokens")
        yield _Party(service, feeder, _requests(prompts, raw=takes_raw))


def _requests(prompts: list[Any], *, raw: bool) -> dict[str, list[bytes]]:
    token_lists = [tokens for tokens, _ in prompts]
    calls = {
        _JSON: [
            request(
                "/query",
                "application/json",
                json.dumps(
                    {"token_ids": tokens, "model_name": MODEL}, separators=(",", ":")
                ).encode(),
            )
            for tokens in token_lists
        ]
    }
    if raw:
        calls[_RAW] = [
            request(
                f"/query?model_name={MODEL}",
                "application/octet-stream",
                array("I", tokens).tobytes(),
            )
            for tokens in token_lists
        ]
    return calls


def _latencies(ranks: int, alone: dict[tuple[str, str], list[list[int]]]) -> list[Result]:
    note = (
        f"{ranks} ranks of one instance, prompts of 8,192 tokens in turn, one kept connection, the "
        "client and all services on the same cores. Each answer was checked first. Raw tokens are "
        "little-endian uint32, which only kvindex takes: beside them stand the peers' JSON figures."
    )
    results = []
    for form, bars in ((_JSON, JSON_BARS), (_RAW, RAW_BARS)):
        for percent in (50, 10, 99):
            values = {
                label: _microseconds(samples, percent)
                for (name, label), samples in alone.items()
                if name == form or (label in DYNAMO and name == _JSON)
            }
            bar = bars.get(ranks) if percent == 50 else None
            results.append(_result(ranks, f"{form}, p{percent}", "µs", values, note, bar=bar))
    return results


def _throughputs(ranks: int, together: dict[int, dict[str, list[float]]]) -> list[Result]:
    note = "Throughput: each connection has one JSON request at a time; one client process."
    return [
        _result(
            ranks,
            f"{number} connections",
            "answers/s",
            {label: median(rates) for label, rates in by_label.items()},
            note,
            lower=False,
        )
        for number, by_label in together.items()
    ]


def _under_events(ranks: int, busy: dict[tuple[str, str], list[list[int]]]) -> list[Result]:
    note = (
        f"While events come in: {RATE:,.0f} blocks/s in events of up to {EVENT_BLOCKS} blocks, "
        f"{1 / PAUSE:,.0f} requests a second at most."
    )
    return [
        _result(
            ranks,
            f"JSON while events come in, p{percent}",
            "µs",
            {label: _microseconds(samples, percent) for (_, label), samples in busy.items()},
            note,
        )
        for percent in (50, 99)
    ]


def _footprints(ranks: int, taken: dict[str, Footprint]) -> list[Result]:
    note = "Threads and resident memory are those of all processes of a service together."
    threads = {label: float(one.threads) for label, one in taken.items()}
    memory = {label: one.mebibytes for label, one in taken.items()}
    return [
        _result(ranks, "threads", "", threads, note),
        _result(ranks, "resident memory", "MiB", memory, note),
    ]


def _microseconds(rounds: list[list[int]], percent: float) -> float:
    return median([percentile(samples, percent) for samples in rounds]) / 1_000


def _result(
    ranks: int,
    measure: str,
    unit: str,
    values: dict[str, float],
    note: str,
    *,
    lower: bool = True,
    bar: Bar | None = None,
) -> Result:
    return Result(
        group=f"HTTP, {ranks} ranks",
        measure=measure,
        unit=unit,
        values=values,
        lower=lower,
        against=DYNAMO,
        bar=bar,
        notes=[note],
    )
