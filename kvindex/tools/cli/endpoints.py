"""The options that name engines, shared by all commands that subscribe."""

from __future__ import annotations

import argparse

import msgspec

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.subscribe.discovery import EngineSource, Source, ask_engine
from kvindex.tools.cli.arguments import option

__all__ = [
    "WORKER_FORM",
    "add_engine_options",
    "asked_workers",
    "engines_of",
    "parse_worker",
    "workers_of",
]

WORKER_FORM = "NAME=ENDPOINT[,replay=ENDPOINT][,dp=N][,topic=T][,bind]"

_WHERE = (
    "DP rank r is expected at port + r on both endpoints, where the engines put it; "
    "otherwise repeat endpoint= and replay= in --worker, once for each rank."
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `engines_of`, `asked_workers` and `workers_of` read."""
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


def engines_of(
    arguments: argparse.Namespace, cache: CacheSettings | None = None
) -> list[Worker | str | Source]:
    """Return the engines that the arguments name, for a client to follow: workers and a source.

    Raises: as `workers_of`.
    """
    urls = arguments.engine
    workers = workers_of(arguments, cache, needed=not urls)
    return [*workers, EngineSource(urls, cache=cache)] if urls else [*workers]


def asked_workers(arguments: argparse.Namespace) -> list[Worker]:
    """Return the engines that the arguments name; those named by URL are asked now, once.

    Raises:
        ConfigurationError: as `workers_of`.
        DiscoveryError: an engine does not report where it publishes.
    """
    urls = arguments.engine
    targets = EngineSource(urls).targets if urls else ()  # refuses bad URLs
    workers = workers_of(arguments, needed=not urls)
    return workers + [ask_engine(target.url).worker() for target in targets]


def workers_of(
    arguments: argparse.Namespace, cache: CacheSettings | None = None, *, needed: bool = True
) -> list[Worker]:
    """Return the engines that the arguments name.

    Args:
        arguments: what the options of `add_engine_options` state.
        cache: what the events of each of them leave unsaid; nothing by default.
        needed: whether none is an error.

    Raises:
        ConfigurationError: none is named, two have one name, or one cannot be reached as given.
    """
    cache = cache or CacheSettings()
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
    if needed and not workers:
        raise ConfigurationError(
            "no engine named: give --engine http://HOST:PORT, --endpoint tcp://HOST:PORT or "
            f"--worker {WORKER_FORM}"
        )
    names = [worker.name for worker in workers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"two workers are called {twice[0]!r}: give each its own name")
    _refuse_shared(workers)
    return workers


def _refuse_shared(workers: list[Worker]) -> None:
    """Refuse an engine that is named twice; topics can distinguish engines behind one endpoint."""
    owners: dict[tuple[str, str], Worker] = {}
    for worker in workers:
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
