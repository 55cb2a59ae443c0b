"""`kvindex match`: which rank of running engines holds a prompt."""

from __future__ import annotations

import argparse
import sys

from kvindex import Match, NotLiveError, connect
from kvindex.tools.cli.arguments import (
    add_cache_options,
    add_prompt_options,
    option,
    read_tokens,
    seconds,
)
from kvindex.tools.cli.engines import add_engine_options, engines_of
from kvindex.tools.cli.output import counted, in_options, json_line, table

_NOTHING_MATCHED = 1
_NOT_LIVE = 3


def add_match_options(parser: argparse.ArgumentParser) -> None:
    text = "token ids: a JSON list, or numbers separated by spaces or commas; - for stdin"
    parser.add_argument("tokens", metavar="FILE", help=text)
    add_prompt_options(parser)
    option(parser, "--wait S", "seconds to wait for every rank to be live", seconds, 5.0)
    option(parser, "--require-live", "fail (exit 3) if a rank is not live by then")
    option(parser, "--explain", "show where each rank's match ends, and why")
    option(parser, "--json", "print one JSON object")
    add_engine_options(parser)
    add_cache_options(parser)


def run_match(arguments: argparse.Namespace) -> int:
    """Ask running engines which rank holds a prompt.

    Connect, catch up by replay, and print how many leading tokens of a prompt each rank holds. Exit
    0: some rank holds a block of it; 1: none does; 3: --require-live was given and a rank is not
    live. An engine always recomputes the last token: leave it out to predict its hit.
    """
    engines = engines_of(arguments)
    token_ids = read_tokens(arguments.tokens)
    late: dict[str, str] = {}
    with connect(engines) as client:
        try:
            client.wait_live(arguments.wait)
        except NotLiveError as error:
            print(f"kvindex match: {in_options(str(error))}", file=sys.stderr)
            if arguments.require_live:
                return _NOT_LIVE
            # Ranks that are late are left out of the best, and shown as such.
            late = {str(rank): reason for rank, reason in error.reasons.items()} | error.engines
        options = {"lora": arguments.lora, "salt": arguments.salt}
        # One answer, so that table and explanation never differ.
        why = client.explain(token_ids, **options) if arguments.explain else None
        match = client.match(token_ids, **options) if why is None else why.match
    if arguments.json:
        best = match.best and match.best.rank
        answer = {"tokens": len(token_ids), "best": best, "ranks": match.to_dict()}
        reasons = {} if why is None else {"explanation": why.to_dict()}
        print(json_line({**answer, **reasons, "not_live": late}))
    else:
        print(match_table(match, len(token_ids)))
        if why is not None:
            print(f"\n{why}")
    return 0 if match.best else _NOTHING_MATCHED


def match_table(match: Match, prompt_tokens: int) -> str:
    """Return a table of what each rank holds, longest first, and below it what to make of it."""
    rows = [
        (
            held.rank,
            held.tokens,
            held.blocks,
            ", ".join(f"{n} {medium}" for medium, n in sorted(held.by_medium.items())) or "-",
            held.state,
            held.complete,
        )
        for held in match
    ]
    header = ("rank", "tokens", "blocks", "on", "state", "complete")
    best = match.best
    if best is None:
        any_tokens = any(held.tokens for held in match)
        live = "live " if any_tokens else ""
        verdict = f"no {live}rank holds a block of {counted(prompt_tokens, 'token')}"
    else:
        verdict = f"best: {best.rank} holds {best.tokens} of {counted(prompt_tokens, 'token')}"
    most = [str(held.rank) for held in match if held.tokens and held.upper_bound]
    if most:
        verdict += f"\nupper bounds, the engine's own hit may be shorter: {', '.join(most)}"
    least = [str(held.rank) for held in match if held.lower_bound]
    if least:
        verdict += f"\nlower bounds, the engine's own hit may be longer: {', '.join(least)}"
    return f"{table(header, rows)}\n{verdict}"
