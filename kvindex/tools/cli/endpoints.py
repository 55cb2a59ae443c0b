"""The arguments that say which engines to listen to, shared by the commands that do."""

from __future__ import annotations

import argparse

import msgspec

from kvindex import CacheSettings, ConfigurationError, Worker
from kvindex.subscribe.discovery import EngineSource, Source, ask_engine

__all__ = [
    "WORKER_FORM",
    "add_engine_arguments",
    "add_worker_arguments",
    "asked_workers",
    "engines_of",
    "parse_worker",
    "workers_of",
]

WORKER_FORM = "NAME=ENDPOINT[,replay=ENDPOINT][,dp=N][,topic=T][,bind]"

_ENGINES_SAY = (
    "DP rank r is expected at port + r on both endpoints, where the engines put it; "
    "otherwise repeat endpoint= and replay= in --worker, once for each rank."
)


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `workers_of` reads."""
    group = parser.add_argument_group("engines", _ENGINES_SAY)
    group.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="NAME=ENDPOINT[,...]",
        help=f"one engine, as {WORKER_FORM}; repeatable",
    )
    group.add_argument("--endpoint", help="the only engine's PUB socket, e.g. tcp://host:5557")
    group.add_argument("--replay-endpoint", metavar="ENDPOINT", help="its replay (ROUTER) socket")
    group.add_argument("--dp-size", type=int, metavar="N", help="number of its DP ranks")
    group.add_argument("--topic", help="receive only topics that start with this")
    group.add_argument("--name", help="its name in what is printed (default: worker-0)")
    group.add_argument(
        "--bind", action="store_true", help="listen at --endpoint, for engines that connect"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `engines_of` and `asked_workers` read."""
    add_worker_arguments(parser)
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="HTTP server of an engine, which is asked where it publishes; repeatable",
    )


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
        DiscoveryError: an engine does not say where it publishes.
    """
    sources = [EngineSource(arguments.engine)] if arguments.engine else []  # refuses bad URLs
    workers = workers_of(arguments, needed=not sources)
    for source in sources:
        workers += [ask_engine(target.url).worker() for target in source.targets]
    return workers


def workers_of(
    arguments: argparse.Namespace, cache: CacheSettings | None = None, *, needed: bool = True
) -> list[Worker]:
    """Return the engines that the arguments name.

    Args:
        arguments: what `add_worker_arguments` read.
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
    """Refuse an engine that is named twice; topics can tell engines behind one endpoint apart."""
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
    for option in ("replay_endpoint", "dp_size", "topic", "name", "bind"):
        if getattr(arguments, option):
            written = "--" + option.replace("_", "-")
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
    first, *options = rest.split(",")
    if not equals or not name or not first:
        raise ConfigurationError(f"--worker {text!r}: expected {WORKER_FORM}")
    given: dict[str, list[str]] = {"endpoint": [first], "replay": [], "dp": [], "topic": []}
    bind = False
    for option in options:
        key, equals, value = option.partition("=")
        if key == "bind" and not equals:
            bind = True
        elif key in given and value:
            given[key].append(value)
        else:
            raise ConfigurationError(
                f"--worker {text!r}: {option!r} is none of endpoint=, replay=, dp=, topic=, bind"
            )
    for key in ("dp", "topic"):
        if len(given[key]) > 1:
            raise ConfigurationError(f"--worker {text!r}: {key}= is given twice")
    try:
        return Worker(
            name,
            _one_or_each(given["endpoint"]) or "",
            replay=_one_or_each(given["replay"]),
            dp_size=_number(given["dp"]),
            topic=(given["topic"] or [""])[0],
            bind=bind,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"--worker {text!r}: {error}") from None


def _one_or_each(endpoints: list[str]) -> str | list[str] | None:
    """Rank 0's endpoint, from which others follow, or one for each rank."""
    if not endpoints:
        return None
    return endpoints[0] if len(endpoints) == 1 else endpoints


def _number(values: list[str]) -> int | None:
    if not values:
        return None
    try:
        return int(values[0])
    except ValueError:
        raise ConfigurationError(f"dp={values[0]} is no number") from None
