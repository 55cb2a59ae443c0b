"""The command line: see what engines publish, keep it, and ask which rank holds a prompt.

A command is two functions: `add_NAME_options` declares its options, and `run_NAME`, whose docstring
is its help, runs it and returns its exit code. Commands of one subject share a module. Only that of
the command that was named is loaded.

Exit codes of every command: 0 it did what was asked; 1 it did not (each `--help` lists when);
2 the arguments cannot work; 130 interrupted by Ctrl-C (where that is not the normal end); 141 the
reader of the output went away.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from kvindex import ConfigurationError, KVIndexError, TokenError
from kvindex.tools.cli.output import in_options, version_text

__all__ = ["main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells count
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_COMMANDS = {
    "demo": "see it work: faults, live repair, and what a router gains",
    "fake-engine": "publish the events of an engine without a model or a GPU",
    "tail": "print every rank's events in order, as they arrive",
    "match": "ask running engines which rank holds a prompt",
    "record": "write the frames that publishers send to files",
    "replay": "apply recorded frames and print what is resident",
    "audit": "report what routing costs a fleet today, from its events alone",
    "fanout": "subscribe once, for many router processes",
    "relay": "subscribe once, and write to NATS for any number of hosts",
    "serve": "answer routers over HTTP, and show a page",
    "gateway": "serve OpenAI's API in front of engines, each request where its prompt is",
    "epp": "pick endpoints for Envoy and other gateways of Kubernetes",
    "status": "show how the ranks of a running fanout stand, or a pool on NATS",
    "top": "show how a fleet stands, and keep that up to date",
    "doctor": "report why the hit rate is zero: look at engines, their ports and their streams",
}
_MODULES = {  # of commands that share one
    "tail": "record",
    "relay": "fanout",
    "status": "fanout",
    "epp": "gateway",
}
# They show warnings unasked: nobody knows beforehand what will happen.
_LONG_RUNNING = {"tail", "record", "audit", "fanout", "relay", "serve", "gateway", "epp"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default the process's own arguments, and return its exit code."""
    # A shell may have closed an output (`>&-`): printing would fail.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv).parse_args(argv)
    level = logging.WARNING if arguments.command in _LONG_RUNNING else logging.ERROR
    with _logging_to_stderr(level, arguments.verbose + arguments.verbose_too):
        try:
            code: int = arguments.run(arguments)
            # Here, while a reader that has gone can still be noticed.
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes at exit, too: nothing must be left to fail then.
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, sys.stdout.fileno())
            os.close(nothing)
            return _BROKEN_PIPE
        except KeyboardInterrupt:
            print("kvindex: interrupted", file=sys.stderr)
            return _INTERRUPTED
        except (ConfigurationError, TokenError) as error:
            print(f"kvindex {arguments.command}: {in_options(str(error))}", file=sys.stderr)
            return 2
        except (KVIndexError, OSError) as error:
            print(f"kvindex {arguments.command}: {error}", file=sys.stderr)
            return 1
    return code


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvindex",
        description="Subscribe to LLM engines' KV-cache events and ask which rank holds a prompt.",
        epilog="Start with: kvindex demo. Each command has its own --help.",
    )
    parser.add_argument("--version", action="version", version=version_text())
    _add_verbose(parser, "verbose")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        # Only the module that is named is imported, and what it needs: the help shall be quick.
        if name in argv:
            word = name.replace("-", "_")
            module = import_module(f"kvindex.tools.cli.{_MODULES.get(name, word)}")
            run = getattr(module, f"run_{word}")
            command.description = (run.__doc__ or "").partition("\n\n")[2]
            getattr(module, f"add_{word}_options")(command)
            command.set_defaults(run=run)
        _add_verbose(command, "verbose_too")
    return parser


def _add_verbose(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        dest=name,
        help="log to stderr what the library does; twice for more",
    )


@contextmanager
def _logging_to_stderr(level: int, verbose: int) -> Iterator[None]:
    """Show the library's log from the command's level, or from the one asked for."""
    level = (level, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("kvindex")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        # Tests and scripts call `main` several times in one process.
        logger.removeHandler(handler)
        logger.setLevel(before)
