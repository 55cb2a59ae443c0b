"""`kvindex doctor`: why the hit rate is zero."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from string import Formatter
from typing import Any

from kvindex import ConfigurationError
from kvindex.tools.cli.arguments import (
    add_cacert_option,
    add_prompt_options,
    count,
    option,
    parse_tokens,
    read_tokens,
    seconds,
    trusting,
)
from kvindex.tools.cli.engines import WORKER_FORM, parse_worker
from kvindex.tools.cli.output import Colour, counted, in_options, painted, plain, printable
from kvindex.tools.doctor import CAUSES, Finding, Limits, Target, UserPrompt, examine

_COLOURS: dict[str, Colour] = {"error": "red", "warning": "yellow", "info": "green"}
_SHOWN_EVIDENCE = 300  # characters


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    text = (
        "an engine: http://HOST:PORT, tcp://HOST:PORT (where it publishes), or "
        f"{WORKER_FORM}; or a running kvindex serve or gateway: http://HOST:PORT"
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=text)
    option(parser, "--engine URL", "HTTP server of the one TARGET's engine")
    text = "a prompt to look for: text, or a file with text, token ids, or a request's body"
    option(parser, "--prompt TEXT|@FILE", text)
    text = "the token ids that your router asks with, or - for stdin"
    option(parser, "--tokens FILE", text)
    add_prompt_options(parser)
    option(parser, "--passive", "send engines no test prompt")
    option(parser, "--model MODEL", "model to ask for (default: the first)")
    option(parser, "--block-size N", "tokens of a block that your router assumes", count)
    text = "the engines' API key, or a gateway operator's (default: what KVINDEX_API_KEY holds)"
    option(parser, "--api-key-file FILE", text)
    add_cacert_option(parser)
    text = "listen for events for at most S seconds"
    option(parser, "--seconds S", text, seconds, Limits().listen)
    option(parser, "--json", "print one JSON object")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Report why the hit rate is zero.

    Look for reasons why hits are missing. An engine with a URL is asked what it is and where it
    publishes; then it is sent one test prompt twice (not with --passive), to see whether its
    events, the index and its own cache agree. All targets are examined at once. Exit 0: nothing is
    wrong; 1: something is; 2: a target could not be examined, or the arguments cannot work.
    """
    # Never from an argument, which any user of the machine can read.
    key = os.environ.get("KVINDEX_API_KEY", "")
    if arguments.api_key_file is not None:
        key = _read("--api-key-file", arguments.api_key_file).strip()
    report = examine(
        _targets(arguments),
        passive=arguments.passive,
        prompt=_prompt(arguments),
        token=key,
        tls=trusting(arguments.cacert),
        model=arguments.model or "",
        block_size=arguments.block_size,
        limits=Limits(listen=arguments.seconds),
    )
    if arguments.json:
        print(json.dumps({**plain(report), "exit_code": report.exit_code}))
        return report.exit_code
    for finding in report.findings:
        _print_finding(finding)
    for note in report.notes:
        print(printable(note))
    severities = [finding.severity for finding in report.findings]
    summary = ", ".join(
        counted(severities.count(severity), severity)
        for severity in ("error", "warning")
        if severity in severities
    )
    targets = counted(len(report.targets), "target")
    print(f"{targets} examined in {report.seconds:.1f} s: {summary or 'nothing is wrong'}")
    return report.exit_code


def _targets(arguments: argparse.Namespace) -> list[Target]:
    targets = []
    for text in arguments.targets:
        if text.startswith(("http://", "https://")):
            targets.append(Target(url=text))
            continue
        if text.startswith(("tcp://", "ipc://")):
            # Nobody named it: it is called by its address.
            first = text.partition(",")[0]
            text = f"{first.split('://', 1)[1]}={text}"
        if "=" not in text:
            raise ConfigurationError(
                f"target {text!r}: expected http://HOST:PORT, tcp://HOST:PORT, or {WORKER_FORM}"
            )
        targets.append(Target(worker=parse_worker(text)))
    if arguments.engine is None:
        if not targets:
            raise ConfigurationError("name an engine: http://HOST:PORT, or tcp://HOST:PORT")
        return targets
    if not targets:
        return [Target(url=arguments.engine)]
    if len(targets) > 1 or targets[0].url:
        raise ConfigurationError("--engine belongs to one TARGET that reports where it publishes")
    return [Target(url=arguments.engine, worker=targets[0].worker)]


def _prompt(arguments: argparse.Namespace) -> UserPrompt | None:
    if arguments.prompt is None and arguments.tokens is None:
        return None
    given: dict[str, Any] = {"lora": arguments.lora, "salt": arguments.salt}
    if arguments.tokens is not None:
        given["tokens"] = read_tokens(arguments.tokens)
    text = arguments.prompt or ""
    value = None
    if text.startswith("@"):
        text = _read("cannot read a prompt from", text[1:])
        # A request's body, or token ids; a number or a quoted word is a prompt as it stands.
        try:
            value = json.loads(text)
        except ValueError:
            pass
    if isinstance(value, dict):
        given["body"] = value
    elif isinstance(value, list):
        given["tokens"] = parse_tokens(text)
    else:
        given["text"] = text
    return UserPrompt(**given)


def _read(what: str, name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} {name}: {error}") from error


def _print_finding(finding: Finding) -> None:
    head = painted(finding.severity.upper(), _COLOURS[finding.severity])
    print(head, printable(f"{finding.subject}: {finding.what} [{finding.id}]"))
    if finding.id == "all-well":
        return
    fields = Formatter().parse(CAUSES[finding.id].what)
    shown = {name.partition("[")[0] for _, name, _, _ in fields if name}
    rest = {name: str(value) for name, value in finding.evidence.items() if name not in shown}
    seen = ", ".join(
        f"{name}={value}"
        for name, value in rest.items()
        if value and (len(value) < 9 or value not in finding.what)
    )
    if seen:
        print(printable(f"    seen: {seen[:_SHOWN_EVIDENCE]}"))
    print(printable(f"    do:   {in_options(finding.remedy)}"))
    print(f"    more: {finding.docs}")
