"""The workers that the TOML file names, and the file followed as it changes."""

from __future__ import annotations

import os
import queue
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvindex import CacheSettings, ConfigurationError, GroupSpec, PublisherAddress
from kvindex.errors import DiscoveryError

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

from kvindex.discovery import Target
from kvindex.server.settings import ConfigFile
from kvindex.server.workers import BLOCK_SIZE, ConfigSource, Defaults, read_targets

DEFAULTS = Defaults(model="llama", block_size=16)
LIMIT = 20.0  # seconds that a test waits at most


def test_an_entry_says_where_its_ranks_are_and_whom_they_serve() -> None:
    (target,) = read_targets(
        {
            "workers": [
                {
                    "name": "a",
                    "endpoint": {"0": "tcp://h:1", "3": "tcp://h:4"},
                    "replay": {"0": "tcp://h:5", "3": "tcp://h:6"},
                    "model": "qwen",
                    "routing_group": "night",
                    "block_size": 32,
                    "labels": {"role": "prefill"},
                    "eagle": True,
                    "groups": {"1": {"kind": "sliding_window", "sliding_window": 64}},
                }
            ]
        },
        DEFAULTS,
    )
    assert target.worker is not None
    assert target.worker.publishers()[1] == PublisherAddress(3, "tcp://h:4", "tcp://h:6")
    assert (target.model, target.routing_group) == ("qwen", "night")
    assert target.labels == {"role": "prefill", BLOCK_SIZE: "32"}
    assert target.worker.cache == CacheSettings(
        eagle=True, groups={1: GroupSpec("sliding_window", 64)}
    )


def test_what_an_entry_does_not_say_is_the_default() -> None:
    known, asked = read_targets(
        {
            "workers": [{"name": "a", "endpoint": "tcp://h:1"}],
            "engines": [{"url": "http://engine:8000/"}],
        },
        DEFAULTS,
    )
    assert (known.model, known.routing_group) == ("llama", "default")
    assert known.labels == {BLOCK_SIZE: "16"}
    assert (asked.name, asked.url, asked.model) == ("engine:8000", "http://engine:8000/", "")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"workers": [{"name": "a"}]}, "workers[0] ('a'): Object missing required field"),
        (
            {"workers": [{"name": "a", "endpoint": "tcp://h:1"}, {"nam": 1}]},
            "workers[1]: Object contains unknown field `nam`",
        ),
        (
            {"workers": [{"name": "a", "endpoint": "tcp://h:1", "replya": "x"}]},
            "workers[0] ('a'): Object contains unknown field `replya`",
        ),
        ({"workers": [{"name": "a", "endpoint": "h:1"}]}, "worker 'a': endpoint 'h:1'"),
        ({"workers": {"name": "a"}}, "[[workers]]"),
        ({"workers": [{"name": "a", "endpoint": {"x": "tcp://h:1"}}]}, "'x' is no dp_rank"),
        ({"workers": [{"name": "a", "endpoint": "tcp://h:1", "block_size": 0}]}, "block_size"),
        ({"engines": [{"name": "a"}]}, "engines[0] ('a'): Object missing required field `url`"),
        (
            {"workers": [{"name": "a", "endpoint": "tcp://h:1"}] * 2},
            "two workers are called 'a'",
        ),
    ],
)
def test_an_entry_that_cannot_work_is_named(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        read_targets(tables, DEFAULTS)


# The file followed ------------------------------------------------------------------------------


class Watched:
    """A source that a thread watches, as a Discovery does."""

    def __init__(self, path: Path) -> None:
        self.told: queue.Queue[list[str] | str] = queue.Queue()
        self.configs: list[ConfigFile] = []
        self.source = ConfigSource(str(path), DEFAULTS, self.configs.append)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.source.is_closed:
            try:
                self.source.watch(self._tell)
            except DiscoveryError as error:
                self.told.put(str(error))

    def _tell(self, targets: Iterable[Target]) -> None:
        self.told.put([target.name for target in targets])

    def next(self) -> list[str] | str:
        """Return the names that are told next, or the error."""
        self.source.look()
        return self.told.get(timeout=LIMIT)

    def close(self) -> None:
        self.source.close()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


def write(path: Path, *names: str) -> None:
    entries = "".join(f'[[workers]]\nname = "{n}"\nendpoint = "tcp://h:1"\n' for n in names)
    new = path.with_suffix(".new")
    new.write_text(entries)
    os.replace(new, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kvindex.toml"
    write(path, "a")
    return path


@pytest.fixture
def watched(path: Path) -> Iterator[Watched]:
    watched = Watched(path)
    yield watched
    watched.close()


def test_a_changed_file_is_told_anew(path: Path, watched: Watched) -> None:
    assert watched.next() == ["a"]
    write(path, "a", "b")
    assert watched.next() == ["a", "b"]
    assert len(watched.configs) == 2


def test_a_file_that_is_broken_or_gone_is_an_error_once_and_then_read_again(
    path: Path, watched: Watched
) -> None:
    assert watched.next() == ["a"]
    path.write_text("[[workers]]\nnam = 3\n")
    assert "workers[0]" in watched.next()
    path.unlink()
    assert "No such file" in watched.next()
    write(path, "c")
    assert watched.next() == ["c"]
    assert watched.told.empty()


def test_who_watches_again_is_told_again(path: Path) -> None:
    source = ConfigSource(str(path), DEFAULTS)

    def told_once() -> list[str]:
        names: list[str] = []

        def tell(targets: Iterable[Target]) -> None:
            names.extend(target.name for target in targets)
            raise InterruptedError

        with pytest.raises(InterruptedError):
            source.watch(tell)
        return names

    assert told_once() == ["a"]
    source.look()
    write(path, "a", "b")
    assert told_once() == ["a", "b"]


def test_a_closed_source_returns(path: Path) -> None:
    source = ConfigSource(str(path), DEFAULTS)
    source.close()
    source.watch(lambda targets: None)
