"""What a pool's URL and options may be: what cannot work is refused, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvindex import ConfigurationError
from kvindex.wire.nats import NatsOptions, parse_pool
from tests.children import run_code

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("nats://n1/llama", ["nats://n1:4222"]),
        ("nats://n1:4333,n2,n3.example:1/llama", ["nats://n1:4333", "nats://n2:4222"]),
        ("tls://n1,n2/llama", ["tls://n1:4222", "tls://n2:4222"]),
        ("nats://10.0.0.7:4222/llama", ["nats://10.0.0.7:4222"]),
        ("nats://[::1]/llama", ["nats://[::1]:4222"]),
        ("nats://[fe80::1]:4333,n2/llama", ["nats://[fe80::1]:4333", "nats://n2:4222"]),
    ],
)
def test_a_url_names_servers_and_ports(url: str, servers: list[str]) -> None:
    pool = parse_pool(url, None, {})
    assert list(pool.servers[: len(servers)]) == servers
    assert pool.name == "llama"


def test_the_pool_is_named_by_the_url_or_beside_it() -> None:
    named = parse_pool("nats://n1/llama", None, {})
    assert parse_pool("nats://n1", "llama", {}) == named
    assert parse_pool("nats://n1/", "llama", {}) == named
    assert parse_pool("nats://n1/llama", "llama", {}) == named
    assert str(named) == "nats://n1:4222/llama"


def test_a_pool_has_names_of_its_own() -> None:
    pool = parse_pool("nats://n1", "Llama_3-8b", {})
    assert pool.stream == "KVINDEX_Llama_3-8b"
    assert pool.log_subjects == "kvindex.Llama_3-8b.log.*"
    assert pool.bucket == "KVINDEX_Llama_3-8b_snapshots"
    assert pool.load_subject == "kvindex.Llama_3-8b.load"


@pytest.mark.parametrize(
    "url",
    [
        *("", "n1", "n1:4222/llama", "nats:n1", "nats://", "nats:///llama"),
        *("http://n1/llama", "ws://n1/llama", "wss://n1/llama", "NATS://n1/llama"),
    ],
)
def test_what_is_no_url_of_nats_is_refused_with_what_one_is(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected nats://HOST\[:PORT\]"):
        parse_pool(url, None, {})


@pytest.mark.parametrize(
    "host",
    [
        *("n1:x", "n1:70000", "n1:0", "n1:-1", ":4222", "n1,", ",n1", "n1,,n2", "n1, n2"),
        *("::1", "::1:4222", "[::1", "[n1]", "n1?x=1", "n1#x", "n 1", "n1\n", "n1:42 22", "ñ1"),
    ],
)
def test_what_is_no_host_and_port_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no HOST\[:PORT\]"):
        parse_pool(f"nats://{host}/llama", None, {})


@pytest.mark.parametrize(
    "name", ["a.b", "a b", "a*", ">", "a/b", "a\n", "é", "x" * 65, "x" * 300, "a?b=c", "$JS"]
)
def test_a_name_that_nats_does_not_allow_is_refused(name: str) -> None:
    for url, pool in ((f"nats://n1/{name}", None), ("nats://n1", name)):
        with pytest.raises(ConfigurationError, match="use 1 to 64 letters") as refused:
            parse_pool(url, pool, {})
        assert len(str(refused.value)) < 250


def test_a_missing_pool_and_two_pools_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no pool is named: write nats://n1/POOL"):
        parse_pool("nats://n1/", None, {})
    with pytest.raises(ConfigurationError, match=r"names the pool 'a', pool= names 'b'"):
        parse_pool("nats://n1/a", "b", {})


@pytest.mark.parametrize(
    "url",
    [
        *("nats://ann:secret@n1/llama", "nats://secret@n1/llama", "tls://n2,ann:secret@n1/llama"),
        *("nats://ann:a/secret@n1/llama", "nats://ann:a,secret@n1/llama"),
        *("http://ann:secret@n1/llama", "nats://n1/secret@n1"),
    ],
)
def test_a_password_in_a_url_is_refused_and_never_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="pass user= and password=") as refused:
        parse_pool(url, None, {})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"user": "ann"}, "user and password belong together"),
        ({"password": "x"}, "user and password belong together"),
        ({"user": "ann", "password": "x", "token": "y"}, "user and token exclude each other"),
        ({"token": "y", "nkey_file": __file__}, "token and nkey_file exclude each other"),
        (
            {"nkey_file": __file__, "credentials_file": __file__},
            "nkey_file and credentials_file exclude each other",
        ),
        ({"tls_cert_file": __file__}, "tls_cert_file and tls_key_file belong together"),
        ({"tls_key_file": __file__}, "tls_cert_file and tls_key_file belong together"),
        ({"username": "ann"}, "'username' is no option"),
        ({"token": ""}, "token must be text, not ''"),
        ({"token": b"y"}, "token must be text"),
        ({"token": None}, "token must be text"),
    ],
)
def test_options_that_contradict_or_make_no_sense_are_refused(options: Any, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        parse_pool("nats://n1", "llama", options)


@pytest.mark.parametrize("name", [n for n in NatsOptions.__annotations__ if n.endswith("_file")])
def test_a_file_that_is_missing_is_named_at_once(name: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    options: Any = {"tls_cert_file": __file__, "tls_key_file": __file__} if "tls" in name else {}
    with pytest.raises(ConfigurationError, match=f"{name}: {missing} cannot be read: No such"):
        parse_pool("nats://n1", "llama", options | {name: missing})
    with pytest.raises(ConfigurationError, match=f"{name}: {tmp_path} cannot be read: Is a"):
        parse_pool("nats://n1", "llama", options | {name: str(tmp_path)})


def test_a_secret_is_not_shown() -> None:
    pool = parse_pool("nats://n1", "llama", {"user": "ann", "password": "secret"})
    assert "secret" not in f"{pool!r} {pool}"


def test_encryption_is_on_as_soon_as_it_is_named() -> None:
    assert not parse_pool("nats://n1", "llama", {"token": "x"}).is_encrypted
    assert parse_pool("tls://n1", "llama", {}).is_encrypted
    assert parse_pool("nats://n1", "llama", {"tls_ca_file": __file__}).is_encrypted


def test_without_nats_py_the_modules_import_and_a_connection_says_what_to_install() -> None:
    program = """
import asyncio, sys
sys.modules["nats"] = None
import kvindex.replicas.nats
from kvindex.wire.nats import open_connection, parse_pool
try:
    asyncio.run(open_connection(parse_pool("nats://n1", "llama", {}), "test"))
except kvindex.ConfigurationError as error:
    print(error)
"""
    _, out, errors = run_code(program)
    assert "pip install -e '.[nats]'" in out, errors
