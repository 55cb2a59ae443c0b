"""The options that secure a connection to NATS, shared by all commands that have one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvindex import ConfigurationError
from kvindex.tools.cli.arguments import option
from kvindex.wire.nats import NatsOptions, NatsPool, parse_pool

PASSWORD_VARIABLE = "KVINDEX_NATS_PASSWORD"
TOKEN_VARIABLE = "KVINDEX_NATS_TOKEN"

_FILES = {  # options of the command line that name files, with those of a connection
    "nats_nkey": "nkey_file",
    "nats_credentials": "credentials_file",
    "nats_tls_ca": "tls_ca_file",
    "nats_tls_cert": "tls_cert_file",
    "nats_tls_key": "tls_key_file",
}


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


def add_from_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that `followed_pool` reads, and those of the connection."""
    text = "follow the relay of a pool on NATS, nats://HOST[,HOST]/POOL, in place of engines"
    option(parser, "--from URL", text, dest="from_url")
    add_nats_options(parser)


def followed_pool(arguments: argparse.Namespace, refused: Iterable[str]) -> NatsPool | None:
    """Return the pool that --from names, or None.

    Args:
        arguments: of the command line.
        refused: names of options that belong to the relay.

    Raises:
        ConfigurationError: it is no pool, there is an option beside it that belongs to the
            relay, or one of NATS without it.
    """
    for name in refused if arguments.from_url is not None else ():
        if getattr(arguments, name):
            raise ConfigurationError(
                f"--from follows a relay, which has the engines and the state: {_written(name)} "
                "cannot be given beside it"
            )
    return pool_of(arguments)


def pool_of(arguments: argparse.Namespace) -> NatsPool | None:
    """Return the pool that --from names, or None.

    Raises:
        ConfigurationError: it is no pool, or there is an option of NATS without it.
    """
    if arguments.from_url is not None:
        return parse_pool(arguments.from_url, None, nats_options_of(arguments))
    for name in (*_FILES, "nats_user", "nats_password_file", "nats_token_file"):
        if getattr(arguments, name) is not None:
            raise ConfigurationError(f"{_written(name)} belongs to --from, which is missing")
    return None


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
