"""The workers that the TOML file names, and the file followed as it changes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvindex import CacheSettings, ConfigurationError, PublisherAddress
from kvindex.wire.errors import DiscoveryError

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

from kvindex.service.settings import ConfigFile
from kvindex.service.sources import BLOCK_SIZE, ConfigSource, Defaults, read_targets, source_of
from kvindex.subscribe.discovery import Target

pytestmark = pytest.mark.unit

DEFAULTS = Defaults(model="llama", block_size=16)


def test_an_entry_says_where_its_ranks_are_and_whom_they_serve() -> None:
    entry = {
        "name": "a",
        "endpoint": {"0": "tcp://h:1", "3": "tcp://h:4"},
        "replay": {"0": "tcp://h:5", "3": "tcp://h:6"},
        "model": "qwen",
        "routing_group": "night",
        "block_size": 32,
        "labels": {"role": "prefill"},
        "cache": {"eagle": True},
    }
    (target,) = read_targets({"workers": [entry]}, DEFAULTS)
    assert target.worker is not None
    assert target.worker.publishers()[1] == PublisherAddress(3, "tcp://h:4", "tcp://h:6")
    assert (target.model, target.routing_group) == ("qwen", "night")
    assert target.labels == {"role": "prefill", BLOCK_SIZE: "32"}
    assert target.worker.cache == CacheSettings(eagle=True)


def test_the_defaults_of_the_server_hold_where_an_entry_says_nothing() -> None:
    defaults = Defaults("llama", "night", 32, CacheSettings(eagle=True))
    tables = {
        "workers": [{"name": "a", "endpoint": "tcp://h:1"}],
        "engines": [{"url": "http://engine:8000/"}],
    }
    known, engine = read_targets(tables, defaults)
    assert known.worker is not None
    assert known.worker.cache == known.cache == engine.cache == CacheSettings(eagle=True)
    assert (known.model, known.routing_group, known.labels) == (
        *("llama", "night"),
        {BLOCK_SIZE: "32"},
    )
    assert (engine.name, engine.url) == ("engine:8000", "http://engine:8000")
    assert (engine.model, engine.routing_group, engine.labels) == ("", "night", {})


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"workers": [{"name": "a"}]}, "entry 1"),
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


def write(path: Path, *names: str) -> None:
    text = "".join(f'[[workers]]\nname = "{n}"\nendpoint = "tcp://h:1"\n' for n in names)
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kvindex.toml"
    write(path, "a")
    return path


def test_a_file_is_read_with_its_settings_and_a_mistake_is_an_error_that_names_it(
    path: Path,
) -> None:
    configs: list[ConfigFile] = []
    source = ConfigSource(str(path), DEFAULTS, configs.append)
    write(path, "a", "b")
    assert [target.name for target in source.read()] == ["a", "b"]
    assert len(configs) == 1
    path.write_text("[[workers]]\nnam = 3\n")
    with pytest.raises(DiscoveryError, match=re.escape(str(path)) + ".*entry 1") as caught:
        source.read()
    assert caught.value.reason == "content"
    path.unlink()
    with pytest.raises(DiscoveryError, match="No such file") as caught:
        source.read()
    assert caught.value.reason == "unreachable"
    assert len(configs) == 1


def test_settings_that_cannot_be_applied_count_as_a_mistake_of_the_file(path: Path) -> None:
    def refuse(_: ConfigFile) -> None:
        raise ConfigurationError("no such network")

    with pytest.raises(DiscoveryError, match="no such network"):
        ConfigSource(str(path), DEFAULTS, refuse).read()


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
