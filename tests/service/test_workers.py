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

from kvindex import CacheSettings, ConfigurationError, PublisherAddress
from kvindex.wire.errors import DiscoveryError

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

from kvindex.service.settings import ConfigFile
from kvindex.service.sources import source_of
from kvindex.service.workers import BLOCK_SIZE, ConfigSource, Defaults, read_targets
from kvindex.subscribe.discovery import Target
from tests.live import PATIENCE

pytestmark = pytest.mark.unit

DEFAULTS = Defaults(model="llama", block_size=16)


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
                    "cache": {"eagle": True},
                }
            ]
        },
        DEFAULTS,
    )
    assert target.worker is not None
    assert target.worker.publishers()[1] == PublisherAddress(3, "tcp://h:4", "tcp://h:6")
    assert (target.model, target.routing_group) == ("qwen", "night")
    assert target.labels == {"role": "prefill", BLOCK_SIZE: "32"}
    assert target.worker.cache == CacheSettings(eagle=True)


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
    assert (asked.name, asked.url, asked.model) == ("engine:8000", "http://engine:8000", "")


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"workers": [{"name": "a"}]}, "engine 1"),
        ({"workers": [{"name": "a", "endpoint": "tcp://h:1", "replya": "x"}]}, "`replya`"),
        ({"workers": {"name": "a"}}, "must be lists"),
        ({"workers": [{"name": "a", "endpoint": "tcp://h:1", "block_size": 0}]}, "block_size"),
        ({"workers": [{"name": "a", "endpoint": "tcp://h:1", "block_size": "x"}]}, "block_size"),
        ({"workers": [{"name": "a", "endpoint": "tcp://h:1"}] * 2}, "called 'a'"),
    ],
)
def test_an_entry_that_cannot_work_is_named(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        read_targets(tables, DEFAULTS)


def test_the_defaults_of_the_server_hold_where_an_entry_says_nothing() -> None:
    defaults = Defaults("llama", "night", 32, CacheSettings(eagle=True))
    worker, engine = read_targets(
        {
            "workers": [{"name": "a", "endpoint": "tcp://h:1"}],
            "engines": ["http://h:8000"],
        },
        defaults,
    )
    assert worker.worker is not None
    assert worker.worker.cache == worker.cache == engine.cache == CacheSettings(eagle=True)
    assert (worker.model, worker.routing_group, worker.labels) == (
        "llama",
        "night",
        {BLOCK_SIZE: "32"},
    )
    assert (engine.model, engine.routing_group, engine.labels) == ("", "night", {})


# Sources ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"kind": "engines", "urls": ["http://h:8000"]}, "engine http://h:8000"),
        ({"kind": "dns", "url": "tcp://vllm:5557", "replay_port": 5657}, "name vllm"),
        ({"kind": "file", "path": "w.json", "interval": 2}, "file w.json"),
        (
            {"kind": "kubernetes", "preset": "llm-d", "namespace": "n", "kube_url": "http://h:1"},
            "pods llm-d.ai/inference-serving=true in n",
        ),
    ],
)
def test_a_table_describes_a_source(entry: dict[str, Any], name: str) -> None:
    assert source_of(entry, DEFAULTS, "discovery 1").name == name


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"kind": "consul"}, "discovery 1: kind 'consul' is none of engines, dns"),
        ({}, "kind None"),
        ({"kind": "dns", "url": "http://h:1", "ulr": 1}, "discovery 1: dns knows no 'ulr'"),
        ({"kind": "dns", "url": 3}, "discovery 1: url: Expected `str`"),
        ({"kind": "dns"}, "discovery 1: "),
        ({"kind": "kubernetes", "preset": "x", "kube_url": "http://h:1"}, "no preset 'x'"),
    ],
)
def test_a_table_that_describes_none_is_named(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        source_of(entry, DEFAULTS, "discovery 1")


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
        return self.told.get(timeout=PATIENCE)

    def close(self) -> None:
        self.source.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def write(path: Path, *names: str) -> None:
    replace(path, "".join(f'[[workers]]\nname = "{n}"\nendpoint = "tcp://h:1"\n' for n in names))


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
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
    replace(path, "[[workers]]\nnam = 3\n")  # whole: the last look may not have been answered yet
    assert "engine 1" in watched.next()
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
