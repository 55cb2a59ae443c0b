"""The options that name engines, shared by all commands that subscribe."""

from __future__ import annotations

import argparse
import sys

import msgspec

from kvindex import ConfigurationError, Worker
from kvindex.subscribe.discovery import EngineSource, Source, ask_engine
from kvindex.tools.cli.arguments import cache_of, option
from kvindex.tools.cli.output import printable

WORKER_FORM = "NAME=ENDPOINT[,replay=ENDPOINT][,dp=N][,topic=T][,bind]"

_WHERE = (
    "DP rank r is expected at port + r on both endpoints, where the engines put it; "
    "otherwise repeat endpoint= and replay= in --worker, once for each rank."
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the functions below read."""
    group = parser.add_argument_group("engines", _WHERE)
    option(group, "--worker NAME=ENDPOINT[,...]", f"one engine, as {WORKER_FORM}", repeat=True)
    option(group, "--endpoint ENDPOINT", "the only engine's PUB socket, e.g. tcp://host:5557")
    option(group, "--replay-endpoint ENDPOINT", "its replay (ROUTER) socket")
    option(group, "--dp-size N", "number of its DP ranks", int)
    option(group, "--topic TOPIC", "receive only topics that start with this")
    option(group, "--name NAME", "its name in what is printed (default: worker-0)")
    option(group, "--bind", "listen at --endpoint, for engines that connect")
    text = "HTTP server of an engine, which is asked where it publishes"
    option(group, "--engine URL", text, repeat=True)


def names_engines(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments name any engine."""
    return bool(arguments.worker or arguments.endpoint or arguments.engine)


def engines_of(arguments: argparse.Namespace) -> list[Worker | str | Source]:
    """Return the engines that the arguments name, for a client to follow: workers and a source.

    Raises:
        ConfigurationError: none is named, or as `workers_of`.
    """
    workers = workers_of(arguments)
    if arguments.engine:
        return [*workers, EngineSource(arguments.engine, cache=cache_of(arguments))]
    if not workers:
        raise ConfigurationError(
            "no engine named: give --engine http://HOST:PORT, --endpoint tcp://HOST:PORT or "
            f"--worker {WORKER_FORM}"
        )
    return [*workers]


def asked_workers(arguments: argparse.Namespace) -> tuple[list[Worker], dict[str, str]]:
    """Return the engines that the arguments name; those named by URL are asked now, once.

    Returns: the workers, and by name the model of each engine that was asked.

    Raises:
        ConfigurationError: as `engines_of`.
        DiscoveryError: an engine does not report where it publishes.
    """
    workers = [engine for engine in engines_of(arguments) if isinstance(engine, Worker)]
    models: dict[str, str] = {}
    for url in arguments.engine:
        report = ask_engine(url)
        workers.append(report.worker(cache=cache_of(arguments)))
        models[workers[-1].name] = report.model
        for note in report.notes:
            print(printable(f"{url}: {note}"), file=sys.stderr)
    return workers, models


def workers_of(arguments: argparse.Namespace) -> list[Worker]:
    """Return the engines that are named by where they publish, perhaps none.

    Raises:
        ConfigurationError: two have one name or one endpoint, or one cannot be reached as given.
    """
    cache = cache_of(arguments)
    workers = [
        msgspec.structs.replace(parse_worker(text), cache=cache) for text in arguments.worker
    ]
    if arguments.endpoint:
        workers.append(
            Worker(
                arguments.name or "worker-0",
                arguments.endpoint,
                replay=arguments.replay_endpoint,
                dp_size=arguments.dp_size,
                topic=arguments.topic or "",
                bind=arguments.bind,
                cache=cache,
            )
        )
    else:
        _refuse_strays(arguments)
    _refuse_twins(workers)
    return workers


def _refuse_twins(workers: list[Worker]) -> None:
    """Refuse two engines of one name or address; topics distinguish those behind one endpoint."""
    owners: dict[tuple[str, str], Worker] = {}
    named: dict[str, Worker] = {}
    for worker in workers:
        if named.setdefault(worker.name, worker) is not worker:
            raise ConfigurationError(f"two workers are called {worker.name!r}: rename one")
        for address in worker.publishers():
            other = owners.setdefault((address.endpoint, worker.topic), worker)
            if other is not worker:
                raise ConfigurationError(
                    f"the workers {other.name!r} and {worker.name!r} are both at "
                    f"{address.endpoint}: name each engine once"
                )


def _refuse_strays(arguments: argparse.Namespace) -> None:
    for name in ("replay_endpoint", "dp_size", "topic", "name", "bind"):
        if getattr(arguments, name):
            written = "--" + name.replace("_", "-")
            raise ConfigurationError(f"{written} belongs to --endpoint, which is missing")


def parse_worker(text: str) -> Worker:
    """Return the worker that one `--worker` names.

    Raises:
        ConfigurationError: the text has another form, or no rank could be reached so.

    Examples:
        >>> worker = parse_worker("vllm-0=tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5657,dp=2")
        >>> worker.name, [address.replay for address in worker.publishers()]
        ('vllm-0', ['tcp://10.0.0.5:5657', 'tcp://10.0.0.5:5658'])
    """
    name, equals, rest = text.partition("=")
    first, *parts = rest.split(",")
    if not equals or not name or not first:
        raise ConfigurationError(f"--worker {text!r}: expected {WORKER_FORM}")
    given: dict[str, list[str]] = {"endpoint": [first], "replay": [], "dp": [], "topic": []}
    bind = False
    for part in parts:
        key, equals, value = part.partition("=")
        if key == "bind" and not equals:
            bind = True
        elif key in given and value:
            given[key].append(value)
        else:
            raise ConfigurationError(
                f"--worker {text!r}: {part!r} is none of endpoint=, replay=, dp=, topic=, bind"
            )
    for key in ("dp", "topic"):
        if len(given[key]) > 1:
            raise ConfigurationError(f"--worker {text!r}: {key}= is given twice")
    try:
        return Worker(
            name,
            first if len(given["endpoint"]) == 1 else given["endpoint"],
            replay=given["replay"][0] if len(given["replay"]) == 1 else given["replay"] or None,
            dp_size=int(given["dp"][0]) if given["dp"] else None,
            topic=(given["topic"] or [""])[0],
            bind=bind,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"--worker {text!r}: {error}") from None
    except ValueError:
        raise ConfigurationError(f"--worker {text!r}: dp={given['dp'][0]} is no number") from None
