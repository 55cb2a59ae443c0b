"""The options and the TOML file of `kvindex serve`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvindex import ConfigurationError

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

from kvindex.service.http.guards import Limits
from kvindex.service.settings import ServeSettings, read_config

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
    assert ServeSettings().listening.tokens({}) == ()
    assert ServeSettings(host="::1").listening.tokens({}) == ()
    with pytest.raises(ConfigurationError, match="--insecure"):
        ServeSettings(host="0.0.0.0").listening.tokens({})
    assert ServeSettings(host="0.0.0.0", insecure=True).listening.tokens({}) == ()
    assert ServeSettings(host="0.0.0.0").listening.tokens({"KVINDEX_TOKEN": TOKEN}) == (TOKEN,)


def test_a_token_file_may_hold_several_and_must_be_readable(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n\n  {TOKEN[::-1]} \n")
    assert ServeSettings(token_file=str(path)).listening.tokens({}) == (TOKEN, TOKEN[::-1])
    path.write_text("\n")
    with pytest.raises(ConfigurationError, match="holds no token"):
        ServeSettings(token_file=str(path)).listening.tokens({})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ServeSettings(token_file=str(tmp_path / "none")).listening.tokens({})


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


@pytest.mark.parametrize("content", [b"", b" \n", b"x=" + b"[" * 100_000])
def test_a_file_that_is_empty_or_nested_without_end_is_an_error(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "kvindex.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"is empty|is no TOML"):
        read_config(path)
