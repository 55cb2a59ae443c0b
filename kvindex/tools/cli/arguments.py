"""Options: their types, those that settings have, and those that several commands share."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import re
import ssl
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec

from kvindex import BACKEND, CacheSettings, ConfigurationError, GroupSpec
from kvindex.wire.backend import why_not_native
from kvindex.wire.errors import how_to_install

Options: TypeAlias = "argparse._ActionsContainer"
"""A parser, or a group of its options."""

_TOKEN_LIMIT = 2**63
_Number = TypeVar("_Number", int, float)


def option(
    options: Options,
    form: str,
    text: str,
    kind: Callable[[str], Any] | tuple[str, ...] | None = None,
    default: Any = None,
    *,
    repeat: bool = False,
    dest: str | None = None,
) -> None:
    """Declare an option.

    Args:
        options: the parser, or a group of its options.
        form: as the help shows it: "--wait S" has a value, "--json" is a flag.
        text: its help; the default is added.
        kind: the type of its value, or all values that it may have; text by default.
        default: its value if it is not given.
        repeat: whether it may be given several times; the value is a list then.
        dest: the name of its value, if it is not that of the option.
    """
    # A form is what argparse has apart: the names, the metavar, and that there is a value at all.
    names = [word for word in form.split() if word.startswith("-")]
    value = form.split()[len(names) :]
    details: dict[str, Any] = {} if dest is None else {"dest": dest}
    if isinstance(kind, tuple):
        details["choices"] = kind
    elif value:
        details.update(metavar=value[0], type=kind or str)
    else:
        details["action"] = "store_true"
    if repeat:
        details.update(action="append", default=[])
        text += "; repeatable"
    elif default is not None:
        details["default"] = default
        shown = f"{default:g}" if isinstance(default, float) else default
        text += f" (default: {shown})"
    options.add_argument(*names, help=text, **details)


def settings_options(
    options: Options,
    settings: msgspec.Struct,
    *forms: str,
    choices: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> None:
    """Declare options for fields of settings, which state their types, defaults and meanings.

    A form is that of `option`; "--max-body BYTES=body_bytes" is of a field with another name. What
    is not given stays None, so that a file's setting or the default counts: see `settings_of`.
    """
    kinds = {field.name: field.type for field in msgspec.structs.fields(settings)}
    meanings = meanings_of(type(settings))
    for words in forms:
        form, _, name = words.partition("=")
        name = name or form.split()[0].removeprefix("--").replace("-", "_")
        kind, default = kinds[name], getattr(settings, name)
        if isinstance(kind, types.UnionType):
            kind = next(part for part in get_args(kind) if part is not types.NoneType)
        text = meanings.get(name, "").replace("%", "%%")
        # argparse must not get the default: a value that nobody gave would hide the file's.
        if isinstance(default, int) and "BYTES" in form:
            text += f" (default: {default >> 20} MiB)"
        elif isinstance(default, (int, float)) and kind is not bool:
            text += f" (default: {default:{'' if 'PORT' in form else ','}})".replace(".0)", ")")
        elif default:
            text += f" (default: {default})"
        # Numbers of settings are counts, but for ports, of which 0 means any; floats are seconds.
        parse = port if name.endswith("port") else {int: count, float: seconds}.get(kind, str)
        repeat = get_args(kind)[1:] == (...,)
        option(options, form, text, choices.get(name, parse), repeat=repeat, dest=name)


def settings_of(arguments: argparse.Namespace, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of settings that the command line has; lists as tuples."""
    values = {name: getattr(arguments, name, None) for name in kind.__struct_fields__}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None and value is not False and value != []
    }


def meanings_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return what the "Attributes" in a class's docstring say of each, without the full stop.

    Examples:
        >>> meanings_of(CacheSettings)["upper_bound"][:51]
        "whether the engine's events report only part of wha"
    """
    # python -OO leaves no docstrings: then the help has the options alone.
    _, _, attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    section = re.split(r"\n\n(?=\S)", attributes)[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found}


def seconds(text: str) -> float:
    """Return a duration in seconds, finite and above 0 (an argparse type)."""
    return _checked(text, float, lambda value: 0 < value < math.inf, "a number of seconds above 0")


def rate(text: str) -> float:
    """Return a finite number per second, from 0 (an argparse type)."""
    what = "a number of requests per second, from 0"
    return _checked(text, float, lambda value: 0 <= value < math.inf, what)


def count(text: str) -> int:
    """Return a whole number of at least 1 (an argparse type)."""
    return _checked(text, int, lambda value: value > 0, "a whole number above 0")


def size(text: str) -> int:
    """Return a number of bytes, as "1GB", "512MB" or plain (an argparse type).

    Examples:
        >>> size("2MB"), size("1.5GB"), size("4096")
        (2097152, 1610612736, 4096)
    """
    number = text.upper().removesuffix("B")
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(number[-1:], 1)
    bare = number if unit == 1 else number[:-1]
    what = "a number of bytes, such as 512MB or 1GB"
    return int(unit * _checked(bare, float, lambda value: 0 < value < math.inf, what))


def port(text: str) -> int:
    """Return the number of a TCP port; 0 has the system choose (an argparse type)."""
    return _checked(text, int, lambda value: 0 <= value < 1 << 16, "a port, 0 to 65535")


def _checked(
    text: str, kind: Callable[[str], _Number], fits: Callable[[_Number], bool], what: str
) -> _Number:
    try:
        if fits(value := kind(text)):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def group_of(text: str) -> tuple[int, GroupSpec]:
    """Return a group's index and kind from IDX=KIND[:TOKENS] (an argparse type)."""
    number, _, kind = text.partition("=")
    kind, colon, tokens = kind.partition(":")
    size = "attention_chunk_size" if kind == "chunked_local_attention" else "sliding_window"
    try:
        if not kind:
            raise ConfigurationError("no kind")
        return int(number), GroupSpec(kind, **({size: int(tokens)} if colon else {}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not IDX=KIND[:TOKENS], e.g. 1=sliding_window:64 ({error})"
        ) from error


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add what an engine's events do not report of its cache: see `cache_of`."""
    cache = parser.add_argument_group("caches", "What the engines' events do not report.")
    option(
        cache,
        "--group IDX=KIND[:TOKENS]",
        "kind of a KV cache group with its window or chunk size, e.g. 1=sliding_window:64. vLLM "
        "reports kinds from 0.22 on, but never chunk sizes",
        group_of,
        repeat=True,
    )
    text = 'full if requests set vLLM\'s kv_cache_report_mode to "full"'
    option(cache, "--report-mode", text, ("incremental", "full"))
    text = "last if the engine reports only the removal of a block's last copy (vllm#55092)"
    option(cache, "--removals", text, ("each", "last"))
    option(cache, "--eagle", "vLLM speculates with EAGLE or MTP: hits lose a block")
    text = "vLLM's prefix_match_unit, where it is less than every group's block size"
    option(cache, "--hash-block-size TOKENS", text, count)
    text = "tokens that vLLM offloads and loads together, where that is more than a block"
    option(cache, "--offload-chunk TOKENS", text, count)
    text = "flag answers as upper bounds (SGLang's hybrid caches, requests with extra_key)"
    option(cache, "--upper-bound", text)
    option(cache, "--resets-connector", "vLLM resets its connector together with its prefix cache")


def cache_of(arguments: argparse.Namespace) -> CacheSettings:
    """Return what the options of `add_cache_options` state; nothing if a command has none."""
    if "report_mode" not in arguments:
        return CacheSettings()
    return CacheSettings(
        groups=dict(arguments.group),
        removals=arguments.removals or "each",
        report_mode=arguments.report_mode or "incremental",
        eagle=arguments.eagle,
        hash_block_size=arguments.hash_block_size,
        offload_chunk=arguments.offload_chunk,
        upper_bound=arguments.upper_bound,
        resets_connector=arguments.resets_connector,
    )


def add_access_options(parser: argparse.ArgumentParser) -> Options:
    """Add whom a server admits, as fields of `kvindex.service.http.Listening`; return the group."""
    from kvindex.service.http import Listening

    text = "Beyond loopback, a token is required: a file, or KVINDEX_TOKEN. Never argv."
    access = parser.add_argument_group("access", text)
    settings_options(
        access,
        Listening(),
        *("--token-file FILE", "--insecure", "--tls-cert FILE", "--tls-key FILE"),
        *("--allowed-host NAME=allowed_hosts", "--allow-origin ORIGIN=allowed_origins"),
    )
    return access


def add_cacert_option(options: Options) -> None:
    """Declare --cacert, which `trusting` reads."""
    text = "authorities to trust for https, as PEM (default: the system's, or SSL_CERT_FILE)"
    option(options, "--cacert FILE", text)


def trusting(cacert: str | None) -> ssl.SSLContext:
    """Return TLS that trusts the authorities in a file, by default the system's.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=cacert)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--cacert {cacert}: {error}") from None


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add what belongs to a prompt's identity besides its tokens: `lora`, `salt`."""
    lora = parser.add_mutually_exclusive_group()
    option(lora, "--lora NAME", "LoRA adapter of the request")
    text = "LoRA adapter by its number, for engines that send no names"
    option(lora, "--lora-id N", text, count, dest="lora")
    option(parser, "--salt SALT", "cache salt of the request")


def read_tokens(name: str) -> list[int]:
    """Return the token ids in a file, or on stdin for "-".

    Raises:
        ConfigurationError: the file cannot be read, or holds something else.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read tokens from {name}: {error}") from error
    try:
        return parse_tokens(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{'stdin' if name == '-' else name}: {error}") from None


def parse_tokens(text: str) -> list[int]:
    """Return token ids written as a JSON list, or separated by white space or commas.

    Raises:
        ConfigurationError: it holds something else; names the item.

    Examples:
        >>> parse_tokens("[1, 2, 3]") == parse_tokens("1 2, 3") == [1, 2, 3]
        True
    """
    if text.lstrip().startswith("["):
        try:
            items = [str(item) for item in json.loads(text)]
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"this is no JSON list: {error}") from None
    else:
        items = text.replace(",", " ").split()
    tokens = []
    for position, item in enumerate(items):
        try:
            token = int(item)
        except ValueError:
            raise ConfigurationError(
                f"item {position} is {item[:40]!r}, no token id; "
                "expected a JSON list of whole numbers, or numbers separated by spaces or commas"
            ) from None
        if not 0 <= token < _TOKEN_LIMIT:
            raise ConfigurationError(f"item {position} is {token}: token ids are 0 to 2**63 - 1")
        tokens.append(token)
    if not tokens:
        raise ConfigurationError("no tokens")
    return tokens


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Import what a command needs in this block.

    Args:
        extra: of kvindex, which brings the packages.
        what: the command starts, for the message.

    Raises:
        ConfigurationError: the native module or a package is missing.
    """
    if BACKEND != "native":
        raise ConfigurationError(f"the {what} needs the native module: {why_not_native()}")
    try:
        yield
    except ModuleNotFoundError as error:
        # A module of kvindex that is missing is a defect, which no package mends.
        if (error.name or "").startswith("kvindex"):
            raise
        raise ConfigurationError(
            f"the package {error.name} is missing: {how_to_install(extra)}"
        ) from error
