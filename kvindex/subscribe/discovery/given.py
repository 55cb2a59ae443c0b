"""The engines that a caller gives: workers, URLs and sources, in any mixture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

from kvindex.subscribe import Worker
from kvindex.subscribe.discovery.engines import EngineSource
from kvindex.subscribe.discovery.targets import Source

__all__ = ["Engines", "split_engines"]

Engines: TypeAlias = Iterable[Worker | str | Source] | Worker | str | Source
"""Workers, URLs of engines to be asked (http://…), and sources that tell of engines."""


def split_engines(given: Engines) -> tuple[Iterable[Worker] | Worker, list[Source]]:
    """Return the workers that are given, and the sources of all others; URLs become one source.

    Any other value is left among the workers, for the subscriber to reject.

    Raises:
        ConfigurationError: a URL is invalid, or is given twice.

    Examples:
        >>> workers, sources = split_engines([Worker("a", "tcp://a:5557"), "http://b:8000"])
        >>> [source.name for source in sources]
        ['engine http://b:8000']
    """
    if isinstance(given, Source) or _is_url(given):
        listed: list[Any] = [given]
    elif isinstance(given, Worker | str | bytes | Mapping) or not isinstance(given, Iterable):
        return cast("Worker", given), []
    else:
        listed = list(given)
    urls = [one for one in listed if _is_url(one)]
    sources: list[Source] = [EngineSource(urls)] if urls else []
    sources += [one for one in listed if isinstance(one, Source)]
    return [one for one in listed if not isinstance(one, Source) and not _is_url(one)], sources


def _is_url(given: object) -> bool:
    return isinstance(given, str) and given.lower().startswith(("http://", "https://"))
