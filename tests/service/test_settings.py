"""The options and the TOML file of `kvindex serve`, and the workers that it names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

from kvindex import CacheSettings, ConfigurationError
from kvindex.service.http.guards import Limits
from kvindex.service.settings import ConfigFile, ServeSettings, read_config
from kvindex.service.sources import BLOCK_SIZE, ConfigSource, Defaults, read_targets, source_of
from kvindex.wire.errors import DiscoveryError

pytestmark = pytest.mark.unit

TOKEN = "0123456789abcdef"


def config(folder: Path, text: str) -> Path:
    path = folder / "kvindex.toml"
    path.write_text(text)
    return path


def test_a_file_gives_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        """
        [serve]
        port = 9000
        allowed_hosts = ["kvindex.example"]
        [limits]
        body_bytes = 1024
        [[workers]]
        name = "a"
        """,
    )
    read = read_config(path, ("workers",))
    assert read.serve == {
        "port": 9000,
        "allowed_hosts": ("kvindex.example",),
        "limits": Limits(body_bytes=1024),
    }
    assert read.tables == {"workers": [{"name": "a"}]}
    assert ServeSettings(**read.serve).port == 9000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[serve]\nport = 1\nprot = 2\n", "line 3: [serve] knows no 'prot'"),
        ("[serve]\nport = 'x'\n", "line 2: port: Expected `int`"),
        ("[serve]\nport = 70000\n", "[serve]: port must be 0 to 65535"),
        ("# c\n[limits]\n\nbody = 3\n", "line 4: [limits] knows no 'body'"),
        ("[limits]\ntokens = 0\n", "[limits]: limits: tokens must be above 0"),
        ("[serv]\nport = 1\n", "line 1: 'serv' is none of serve, limits, workers"),
        ("port = 1\n", "line 1: 'port' is none of serve"),
        ("serve = 3\n", "line 1: [serve] must be a table"),
        ("[serve]\nport = = 1\n", "is no TOML"),
        ("[serve]\nregister_networks = ['10.0.0.1/8']\n", "'10.0.0.1/8' is no network"),
        ("[serve.limits]\ntokens = 1\n", "a table of their own"),
        *((empty, "is empty") for empty in ("", " \n")),
        pytest.param("x=" + "[" * 100_000, "is no TOML", id="nested without end"),
    ],
)
def test_what_means_nothing_is_an_error_that_says_where(
    tmp_path: Path, text: str, says: str
) -> None:
    path = config(tmp_path, text)
    with pytest.raises(ConfigurationError, match=re.escape(says)) as caught:
        read_config(path, ("workers",))
    assert str(path) in str(caught.value)


def test_beyond_loopback_a_token_is_wanted_unless_it_is_said_otherwise() -> None:
    assert ServeSettings().tokens({}) == ()
    assert ServeSettings(host="::1").tokens({}) == ()
    with pytest.raises(ConfigurationError, match="--insecure"):
        ServeSettings(host="0.0.0.0").tokens({})
    assert ServeSettings(host="0.0.0.0", insecure=True).tokens({}) == ()
    assert ServeSettings(host="0.0.0.0").tokens({"KVINDEX_TOKEN": TOKEN}) == (TOKEN,)


def test_a_token_file_may_hold_several_and_must_be_readable(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n\n  {TOKEN[::-1]} \n")
    assert ServeSettings(token_file=str(path)).tokens({}) == (TOKEN, TOKEN[::-1])
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="holds no token"):
        ServeSettings(token_file=str(path)).tokens({})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ServeSettings(token_file=str(tmp_path / "none")).tokens({})


def test_registrations_reach_loopback_only_where_the_server_is_on_loopback() -> None:
    assert [str(each) for each in ServeSettings().networks()] == ["127.0.0.0/8", "::1/128"]
    assert ServeSettings(host="0.0.0.0").networks() == ()
    given = ServeSettings(host="0.0.0.0", register_networks=("10.0.0.0/8",))
    assert [str(each) for each in given.networks()] == ["10.0.0.0/8"]
    assert ServeSettings(register_networks=()).networks() == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_every": 0.0},
        {"tls_cert": "x.pem"},
        {"dialect": "klingon"},
        {"block_size": 0},
    ],
)
def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        ServeSettings(**wrong)  # type: ignore[arg-type]


DEFAULTS = Defaults(model="llama", block_size=16)


# Entries of workers


def test_an_entry_may_have_a_block_size_beside_what_discovery_reads() -> None:
    entry = {
        "name": "a",
        "endpoint": "tcp://h:1",
        "routing_group": "night",
        "block_size": 32,
        "labels": {"role": "prefill"},
        "cache": {"eagle": True},
    }
    (target,) = read_targets({"workers": [entry]}, DEFAULTS)
    assert target.worker is not None
    assert (target.model, target.routing_group) == ("llama", "night")
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
        ({"workers": [{"name": "a"}]}, "entry 1"),  # the others: tests/subscribe/discovery
        *(
            (
                {"workers": [{"name": "a", "endpoint": "tcp://h:1", "block_size": size}]},
                "block_size",
            )
            for size in (0, "x")
        ),
    ],
)
def test_an_entry_that_cannot_work_is_named(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        read_targets(tables, DEFAULTS)


# Sources


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


# The file followed


WORKER = '[[workers]]\nname = "a"\nendpoint = "tcp://h:1"\n'


def test_a_file_is_read_with_its_settings_and_a_mistake_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    configs: list[ConfigFile] = []
    path = config(tmp_path, WORKER)
    source = ConfigSource(str(path), DEFAULTS, configs.append)
    assert [target.name for target in source.read()] == ["a"]
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


def test_settings_that_cannot_be_applied_count_as_a_mistake_of_the_file(tmp_path: Path) -> None:
    def refuse(_: ConfigFile) -> None:
        raise ConfigurationError("no such network")

    with pytest.raises(DiscoveryError, match="no such network"):
        ConfigSource(str(config(tmp_path, WORKER)), DEFAULTS, refuse).read()
