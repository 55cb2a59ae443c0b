"""The options that name what to subscribe to: engines, sources that find them, a pool on NATS."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvindex import ConfigurationError, Worker
from kvindex.subscribe.discovery import EngineSource, Source, ask_engine
from kvindex.tools.cli.arguments import cache_of, option
from kvindex.tools.cli.output import printable
from kvindex.wire.nats import NatsOptions, NatsPool, parse_pool

WORKER_FORM = "NAME=ENDPOINT[,replay=ENDPOINT][,dp=N][,topic=T][,bind]"
PASSWORD_VARIABLE = "KVINDEX_NATS_PASSWORD"
TOKEN_VARIABLE = "KVINDEX_NATS_TOKEN"

_FILES = {  # options of the command line that name files, with those of a connection
    "nats_nkey": "nkey_file",
    "nats_credentials": "credentials_file",
    "nats_tls_ca": "tls_ca_file",
    "nats_tls_cert": "tls_cert_file",
    "nats_tls_key": "tls_key_file",
}
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
    # A source goes on asking: the engine may start later, and move.
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
        for name in ("replay_endpoint", "dp_size", "topic", "name", "bind"):
            if getattr(arguments, name):
                written = _written(name)
                raise ConfigurationError(f"{written} belongs to --endpoint, which is missing")
    owners: dict[tuple[str, str], Worker] = {}
    by_name: dict[str, Worker] = {}
    for worker in workers:
        if by_name.setdefault(worker.name, worker) is not worker:
            raise ConfigurationError(f"two workers are called {worker.name!r}: rename one")
        for address in worker.publishers():
            # Behind one endpoint a relay may publish for several engines: topics distinguish them.
            other = owners.setdefault((address.endpoint, worker.topic), worker)
            if other is not worker:
                raise ConfigurationError(
                    f"the workers {other.name!r} and {worker.name!r} are both at "
                    f"{address.endpoint}: name each engine once"
                )
    return workers


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
    first, *others = rest.split(",")
    if not equals or not name or not first:
        raise ConfigurationError(f"--worker {text!r}: expected {WORKER_FORM}")
    parts: dict[str, list[str]] = {"endpoint": [first], "replay": [], "dp": [], "topic": []}
    bind = False
    for part in others:
        key, equals, value = part.partition("=")
        if key == "bind" and not equals:
            bind = True
        elif key in parts and value:
            parts[key].append(value)
        else:
            raise ConfigurationError(
                f"--worker {text!r}: {part!r} is none of endpoint=, replay=, dp=, topic=, bind"
            )
    for key in ("dp", "topic"):
        if len(parts[key]) > 1:
            raise ConfigurationError(f"--worker {text!r}: {key}= is given twice")
    try:
        return Worker(
            name,
            first if len(parts["endpoint"]) == 1 else parts["endpoint"],
            replay=parts["replay"][0] if len(parts["replay"]) == 1 else parts["replay"] or None,
            dp_size=int(parts["dp"][0]) if parts["dp"] else None,
            topic=(parts["topic"] or [""])[0],
            bind=bind,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"--worker {text!r}: {error}") from None
    except ValueError:
        raise ConfigurationError(f"--worker {text!r}: dp={parts['dp'][0]} is no number") from None


def add_discovery_options(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the options that `sources_of` reads, besides `--engine`."""
    group = parser.add_argument_group("discovery", text)
    option(group, "--dns URL", "each address of the URL's name is an engine", repeat=True)
    text = "a list of workers and engines, TOML or JSON, followed"
    option(group, "--workers-file FILE", text, repeat=True)
    presets = ("llm-d", "aibrix", "vllm-production-stack")
    option(group, "--k8s-preset", "pods with the labels and ports of this system", presets)
    option(group, "--k8s-selector LABELS", "pods with these labels: app=vllm")
    option(group, "--k8s-pool NAME", "pods of this InferencePool")
    option(group, "--k8s-namespace NAME", "of the pods (default: our own)")
    text = "the engines' API key, to ask them with"
    option(group, "--engine-token-file FILE", text)


def sources_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the sources that the command line names, as [[discovery]] tables have them."""
    sources: list[dict[str, Any]] = []
    named = {"urls": arguments.engine}
    named |= {role: getattr(arguments, role, []) for role in ("prefill", "decode")}  # of a gateway
    if urls := {name: value for name, value in named.items() if value}:
        sources.append({"kind": "engines", **urls})
    sources += [{"kind": "dns", "url": url} for url in arguments.dns]
    sources += [{"kind": "file", "path": path} for path in arguments.workers_file]
    names = ("preset", "selector", "pool", "namespace")
    pods = {
        name: value for name in names if (value := getattr(arguments, f"k8s_{name}")) is not None
    }
    # A namespace alone would mean every pod in it, engines or not.
    if pods.keys() - {"namespace"}:
        sources.append({"kind": "kubernetes", **pods})
    elif pods:
        raise ConfigurationError(
            "--k8s-namespace names the place, not the pods: give --k8s-preset, --k8s-selector or "
            "--k8s-pool"
        )
    return sources


def add_nats_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `nats_options_of` reads."""
    text = (
        f"Passwords and tokens come from files, or from {PASSWORD_VARIABLE} and {TOKEN_VARIABLE}. "
        "Never argv."
    )
    group = parser.add_argument_group("NATS", text)
    option(group, "--nats-user NAME", "user of the account")
    option(group, "--nats-password-file FILE", "the user's password")
    option(group, "--nats-token-file FILE", "a token, instead of user and password")
    option(group, "--nats-nkey FILE", "an nkey seed, instead of these")
    option(group, "--nats-credentials FILE", "a JWT and its nkey, instead of these")
    text = "certificates of the authorities that servers are checked against; encrypts"
    option(group, "--nats-tls-ca FILE", text)
    option(group, "--nats-tls-cert FILE", "this client's certificate, PEM; encrypts")
    option(group, "--nats-tls-key FILE", "its private key, PEM")


def nats_options_of(
    arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> NatsOptions:
    """Return how the command line secures connections to NATS.

    Raises:
        ConfigurationError: a file cannot be read or is empty, or a user has no password.
    """
    options = NatsOptions()
    for name, theirs in _FILES.items():
        if getattr(arguments, name) is not None:
            options[theirs] = getattr(arguments, name)  # type: ignore[literal-required]
    # A file that is named wins over what is merely set.
    token = _secret("--nats-token-file", arguments.nats_token_file, environ.get(TOKEN_VARIABLE))
    if token is not None:
        options["token"] = token
    password = _secret(
        "--nats-password-file", arguments.nats_password_file, environ.get(PASSWORD_VARIABLE)
    )
    if arguments.nats_user is not None:
        if password is None:
            raise ConfigurationError(
                "--nats-user has no password: give --nats-password-file FILE, or set "
                f"{PASSWORD_VARIABLE}"
            )
        options["user"], options["password"] = arguments.nats_user, password
    elif arguments.nats_password_file is not None:
        raise ConfigurationError("--nats-password-file belongs to --nats-user, which is missing")
    return options


def pool_of(arguments: argparse.Namespace, beside: Iterable[str] = ()) -> NatsPool | None:
    """Return the pool on NATS that --from names, or None.

    `beside` are names of options that belong to the relay, and cannot be given beside it.

    Raises:
        ConfigurationError: it is no pool, there is an option beside it that belongs to the
            relay, or one of NATS without it.
    """
    if arguments.from_url is None:
        for name in (*_FILES, "nats_user", "nats_password_file", "nats_token_file"):
            if getattr(arguments, name) is not None:
                raise ConfigurationError(f"{_written(name)} belongs to --from, which is missing")
        return None
    for name in beside:
        if getattr(arguments, name):
            raise ConfigurationError(
                f"--from follows a relay, which has the engines and the state: {_written(name)} "
                "cannot be given beside it"
            )
    return parse_pool(arguments.from_url, None, nats_options_of(arguments))


def _written(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _secret(option_name: str, path: str | None, of_environment: str | None) -> str | None:
    """Return the text of a file, else that of the environment, else None."""
    if path is None:
        return of_environment or None
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{option_name} {path} cannot be read: {error}") from None
    if not text:
        raise ConfigurationError(f"{option_name} {path} is empty")
    return text
