"""The settings of `kvindex serve`: options, and a TOML file that may change while it runs."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Final

import msgspec

from kvindex.service.http import Limits, Listening, is_loopback
from kvindex.service.http.guards import LOOPBACK, parse_networks
from kvindex.wire.errors import ConfigurationError

DIALECTS: Final = ("auto", "dynamo", "rfc")
"""Whose API queries are read in: that of each query itself ("auto"), or only one of them."""

_MAX_FILE_BYTES = 16 << 20
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_MINE = ("serve", "limits")  # the tables that are read here, each at most once

Table = dict[str, Any]


class ServeSettings(Listening, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one server serves; what it serves (workers, sources) comes beside it.

    Attributes:
        host: the address or name to listen at.
        port: of it; 0 lets the operating system choose.
        model: of workers whose entry names none.
        routing_group: their group, of workers whose entry names none.
        block_size: tokens of their blocks, likewise; events state it anyway.
        register_networks: networks where workers may be that register over HTTP, as 10.0.0.0/8,
            loopback, private or any; by default loopback if the server is there, else none.
        state: file that the state is saved in, and continued from.
        save_every: seconds between two savings.
        warm_from: URL of another server, whose snapshot this one begins with.
        shutdown_within: seconds for open requests to end in.
        dialect: "auto" recognises the dialect of each query; or the only one: "dynamo" or "rfc".
        tokenizer: URL of an engine whose /tokenize turns the text of /api/explain into tokens.
        compat_metrics: add series with the names of Dynamo's indexer to /metrics.

    Whom it admits, and its limits, are those of `Listening`.

    Raises:
        ConfigurationError: a value cannot work, with what would.
    """

    port: int = 8090
    model: str = "default"
    routing_group: str = "default"
    block_size: int | None = None
    register_networks: tuple[str, ...] | None = None
    state: str | None = None
    save_every: float = 60.0
    warm_from: str | None = None
    shutdown_within: float = 10.0
    dialect: str = "auto"
    tokenizer: str | None = None
    compat_metrics: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("save_every", "shutdown_within"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0 s, not {getattr(self, name)!r}")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigurationError(f"block_size must be at least 1, not {self.block_size}")
        if self.dialect not in DIALECTS:
            raise ConfigurationError(
                f"dialect must be one of {', '.join(DIALECTS)}, not {self.dialect!r}"
            )
        self.networks()

    def networks(self) -> tuple[Any, ...]:
        """Return the networks where workers may be that register over HTTP."""
        networks = self.register_networks
        if networks is None:
            # Whoever reaches the server could have it dial what only its machine can reach.
            networks = LOOPBACK if is_loopback(self.host) else ()
        return parse_networks(networks)


class ConfigFile(msgspec.Struct, frozen=True):
    """The contents of a TOML file."""

    serve: Table = {}  # the keys of `ServeSettings` that it gives, with checked names and types
    tables: Table = {}  # its other top-level tables, as they are


def read_config(path: str | os.PathLike[str], allowed: tuple[str, ...] = ()) -> ConfigFile:
    """Read a TOML file: the tables [serve] and [limits], and others whose names are allowed.

    Raises:
        ConfigurationError: it is no TOML, or has a key that means nothing; says which line.
        OSError: it cannot be read.
    """
    # Only here: the help of `kvindex serve` has these settings, and no extra packages.
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # the extra `server` brings it
        import tomli as tomllib

    with open(path, "rb") as file:
        # One byte more shows that there are too many.
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigurationError(f"{path} exceeds {_MAX_FILE_BYTES} bytes")
    # Editors and shells empty a file before they write it: that is no list without workers.
    if not data.strip():
        raise ConfigurationError(f"{path} is empty")
    try:
        text = data.decode("utf-8")
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError names line and column
        raise ConfigurationError(f"{path} is no TOML: {error}") from None
    known = (*_MINE, *allowed)
    for name in tables:
        if name not in known:
            raise ConfigurationError(
                f"{path}{_line(text, '', name)}: {name!r} is none of " + ", ".join(known)
            )
    serve = _checked(path, text, "serve", tables.pop("serve", {}), ServeSettings)
    if "limits" in serve:
        raise ConfigurationError(f"{path}: limits belong into a table of their own, [limits]")
    if "limits" in tables:
        limits = _checked(path, text, "limits", tables.pop("limits"), Limits)
        serve["limits"] = Limits(**limits)
    return ConfigFile(serve, tables)


def _checked(path: object, text: str, name: str, table: Any, kind: type[msgspec.Struct]) -> Table:
    """Return a table whose keys and values are those of a struct; leaves defaults out."""
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}{_line(text, '', name)}: [{name}] must be a table")
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    checked = {}
    for key, value in table.items():
        where = f"{path}{_line(text, name, key)}"
        if key not in fields:
            listed = ", ".join(sorted(fields))
            raise ConfigurationError(f"{where}: [{name}] knows no {key!r}: it has {listed}")
        try:
            checked[key] = msgspec.convert(value, fields[key])
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{where}: {key}: {error}") from None
    # Made once, so that a value which cannot work is reported with its table.
    try:
        kind(**checked)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}, [{name}]: {error}") from None
    return checked


def _line(text: str, table: str, key: str) -> str:
    """Return ", line N" of a key in a table, or of a table; "" if it is not found."""
    # tomllib tells the lines of its own errors only, so the text is searched.
    begins = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]")
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.fullmatch(line)
        if header is not None:
            current = header[1]
            if not table and current.split(".")[0] == key:
                return f", line {number}"
        elif current == table and begins.match(line):
            return f", line {number}"
    return ""
