"""Checked argument types, and the prompt's tokens from a file."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TypeAlias

from kvindex import CacheSettings, ConfigurationError, GroupSpec

__all__ = [
    "Commands",
    "add_cache_arguments",
    "add_prompt_arguments",
    "cache_of",
    "count",
    "group_of",
    "parse_tokens",
    "read_tokens",
    "seconds",
]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds its own parser."""

_TOKEN_LIMIT = 2**63


def seconds(text: str) -> float:
    """Return a duration in seconds, finite and above 0 (an argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def count(text: str) -> int:
    """Return a whole number of at least 1 (an argparse type)."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


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


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what an engine's events leave unsaid of its cache: see `cache_of`."""
    cache = parser.add_argument_group("caches", "What the engines' events do not tell.")
    cache.add_argument(
        "--group",
        action="append",
        default=[],
        type=group_of,
        metavar="IDX=KIND[:TOKENS]",
        help="kind of a KV cache group with its window or chunk size, e.g. 1=sliding_window:64; "
        "repeatable. vLLM tells kinds from 0.22 on, but never chunk sizes",
    )
    cache.add_argument(
        "--report-mode",
        choices=("incremental", "full"),
        default="incremental",
        help='"full" if requests set vLLM\'s kv_cache_report_mode to "full"',
    )
    cache.add_argument(
        "--eagle", action="store_true", help="vLLM speculates with EAGLE or MTP: hits lose a block"
    )
    cache.add_argument(
        "--hash-block-size",
        type=count,
        metavar="TOKENS",
        help="vLLM's prefix_match_unit, where it is less than every group's block size",
    )
    cache.add_argument(
        "--upper-bound",
        action="store_true",
        help="flag answers as upper bounds (SGLang's hybrid caches, requests with extra_key)",
    )
    cache.add_argument(
        "--resets-connector",
        action="store_true",
        help="vLLM resets its connector together with its prefix cache",
    )


def cache_of(arguments: argparse.Namespace) -> CacheSettings:
    """Return what `add_cache_arguments` read."""
    return CacheSettings(
        groups=dict(arguments.group),
        report_mode=arguments.report_mode,
        eagle=arguments.eagle,
        hash_block_size=arguments.hash_block_size,
        upper_bound=arguments.upper_bound,
        resets_connector=arguments.resets_connector,
    )


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what belongs to a prompt's identity besides its tokens: `lora`, `salt`."""
    lora = parser.add_mutually_exclusive_group()
    lora.add_argument("--lora", metavar="NAME", help="LoRA adapter of the request")
    lora.add_argument(
        "--lora-id",
        type=count,
        dest="lora",
        metavar="N",
        help="LoRA adapter by its number, for engines that send no names",
    )
    parser.add_argument("--salt", help="cache salt of the request")


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
        ConfigurationError: it holds something else; says which item.

    Examples:
        >>> parse_tokens("[1, 2, 3]") == parse_tokens("1 2, 3") == [1, 2, 3]
        True
    """
    items = _items(text)
    tokens = []
    for position, item in enumerate(items):
        try:
            token = _token(item)
        except ValueError:
            raise ConfigurationError(
                f"item {position} is {str(item)[:40]!r}, no token id; "
                "expected a JSON list of whole numbers, or numbers separated by spaces or commas"
            ) from None
        if not 0 <= token < _TOKEN_LIMIT:
            raise ConfigurationError(f"item {position} is {token}: token ids are 0 to 2**63 - 1")
        tokens.append(token)
    if not tokens:
        raise ConfigurationError("no tokens")
    return tokens


def _token(item: object) -> int:
    if isinstance(item, str):
        return int(item)
    if isinstance(item, int) and not isinstance(item, bool):
        return item
    raise ValueError(item)


def _items(text: str) -> list[object]:
    if not text.lstrip().startswith("["):
        return list(text.replace(",", " ").split())
    try:
        return list(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"this is no JSON list: {error}") from None
