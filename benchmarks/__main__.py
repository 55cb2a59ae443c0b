"""`python -m benchmarks`: everything, or the measures that are named."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import environment, venvs
from benchmarks.bench import Bench
from benchmarks.measures import (
    apply,
    bookings,
    cycles,
    fanout,
    forks,
    gateway,
    gpu,
    growth,
    hostile,
    http,
    ingest,
    latency,
    load,
    match,
    memory,
    native,
    nats,
    paced,
    pairs,
    queue,
    routing,
    select,
    shared_load,
)
from benchmarks.process import allow_descriptors
from benchmarks.results import Report, Result, bars_table, details, read, write
from benchmarks.scale import FULL, QUICK, SMOKE

MEASURES: dict[str, Callable[[Bench], list[Result]]] = {
    "match": match.run,
    "select": select.run,
    "bookings": bookings.run,
    "native": native.run,
    "apply": apply.run,
    "ingest": ingest.run,
    "latency": latency.run,
    "paced": paced.run,
    "threads": latency.run_threads,
    "memory": memory.run,
    "growth": growth.run,
    "cycles": cycles.run,
    "load": load.run,
    "queue": queue.run,
    "fanout": fanout.run,
    "nats": nats.run,
    "shared_load": shared_load.run,
    "hostile": hostile.run,
    "http": http.run,
    "gateway": gateway.run,
    "forks": forks.run,
    "gpu": gpu.run,
    "routing": routing.run,
    "pairs": pairs.run,
}


def main() -> None:
    """Run what was asked for and print it."""
    options = _options()
    allow_descriptors()
    if options.show:
        report = read(options.show)
        print(environment.header(report.environment), "", details(report.results), "", sep="\n")
        print(bars_table(report.results))
        return
    scale = SMOKE if options.smoke else QUICK if options.quick else FULL
    bench = Bench(
        scale=scale,
        peers=options.peers,
        folder=options.venv,
        traces=tuple(options.trace),
        images=options.images,
        native_bench=options.native_bench,
        seed=options.seed,
    )
    facts = environment.facts(shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    print(environment.header(facts), flush=True)
    if options.into:
        options.into.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for name in options.measures or MEASURES:
        print(f"… {name}", file=sys.stderr, flush=True)
        measured = MEASURES[name](bench)
        results += measured
        print("\n" + details(measured), flush=True)
        if options.into:
            write(options.into / f"{name}.json", Report(facts, measured))
    print("\n" + bars_table(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "measures",
        nargs="*",
        metavar="MEASURE",
        help=f"by default all: {', '.join(MEASURES)}",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small sizes: about a minute")
    size.add_argument("--smoke", action="store_true", help="a few seconds: shows that they run")
    parser.add_argument("--peers", action="store_true", help="run the peers too, side by side")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        action="append",
        default=[],
        help="requests from a trace; `routing` takes several",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the workload (1)")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="write MEASURE.json there for each measure, as benchmarks/results has them",
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="print such a file as tables")
    parser.add_argument(
        "--images", type=Path, metavar="FOLDER", help="draw the charts of `routing` there"
    )
    parser.add_argument(
        "--venv",
        type=Path,
        metavar="FOLDER",
        default=venvs.default_folder(),
        help="where the peers' environments are kept (%(default)s)",
    )
    parser.add_argument(
        "--native-bench", type=Path, metavar="PATH", help="the native core's own benchmark, built"
    )
    options = parser.parse_args()
    unknown = set(options.measures) - MEASURES.keys()
    if unknown:
        parser.error(f"no such measure: {', '.join(sorted(unknown))}")
    options.trace = [file.resolve() for file in options.trace]
    for file in options.trace:
        if not os.access(file, os.R_OK):
            parser.error(f"cannot read {file}")
    return options


if __name__ == "__main__":
    main()
