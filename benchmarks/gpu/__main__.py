"""Real vLLM engines behind each router: `python -m benchmarks.gpu --model DIR`.

Starts vLLM engines that share one GPU (by NVIDIA's MPS) or have one each, plays chats, questions
about shared documents and short agents through each router, and prints one table.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks import environment, venvs
from benchmarks.fronts import VLLM_ROUTER, ours, vllm_router
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.playing import Plan, measure
from benchmarks.gpu.sessions import KINDS
from benchmarks.process import allow_descriptors
from benchmarks.results import OURS, Report, details, write


def main() -> None:
    """Start all, play all, print the table."""
    options = _options()
    allow_descriptors()
    facts = environment.facts(shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]))
    engines = Engines(
        count=options.engines,
        model=options.model,
        vllm=options.vllm,
        more=options.more,
        has_card_each=options.card_each,
        cache=options.cache,
        memory=options.memory,
    )
    plan = Plan(
        kinds=options.kinds or tuple(KINDS),
        seeds=range(1, options.seeds + 1),
        warm=options.warm,
        seconds=options.seconds,
        rate=options.rate,
    )
    with ExitStack() as stack:
        urls = stack.enter_context(engines.started())
        gateway = ours(urls, "--explain-headers", "--tokenizer", str(options.model))
        fronts = {OURS: stack.enter_context(gateway)}
        if options.peers:
            python = venvs.python_of("router", options.venv)
            fronts[VLLM_ROUTER] = stack.enter_context(vllm_router(python, urls))
        results = measure(plan, urls, fronts)
    print(environment.header(facts), "", details(results), sep="\n")
    if options.into:
        options.into.mkdir(parents=True, exist_ok=True)
        write(options.into / "gpu.json", Report(facts, results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    kinds = ", ".join(KINDS)
    add("kinds", nargs="*", metavar="KIND", help=f"of {kinds}; by default all")
    add("--model", type=Path, required=True, metavar="DIR", help="config, tokenizer, template")
    add("--engines", type=int, default=4, metavar="N", help="(%(default)s)")
    add("--card-each", action="store_true", help="a GPU for each engine; else they share one")
    add("--cache", type=int, default=60_000, metavar="TOKENS", help="of each (%(default)s)")
    add("--memory", default="9G", metavar="BYTES", help="for it (%(default)s)")
    add(
        "--rate",
        type=float,
        metavar="R",
        help="requests a second; by default 65 %% of round-robin's",
    )
    add("--seeds", type=int, default=2, metavar="N", help="runs of each (%(default)s)")
    add("--warm", type=float, default=8.0, metavar="S", help="not counted (%(default)s)")
    add("--seconds", type=float, default=32.0, metavar="S", help="counted (%(default)s)")
    add("--peers", action="store_true", help="vllm-router, too, in an environment of its own")
    add("--vllm", default="vllm", metavar="COMMAND", help="(%(default)s)")
    add("--more", default="", metavar="OPTIONS", help="further options of `vllm serve`")
    add("--into", type=Path, metavar="FOLDER", help="write gpu.json there")
    add("--venv", type=Path, default=venvs.default_folder(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.kinds) - KINDS.keys():
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
