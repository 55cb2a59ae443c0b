"""What a server saves, and what it fetches from another one."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import cast

import pytest

from kvindex import Client, ConfigurationError
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.state import Saver, fetch_snapshot, read_registrations, registrations_path
from tests.canned import CannedServer, Reply

pytestmark = pytest.mark.unit

ONE = Registration(instance_id=7, partition=Partition("m", "night"), endpoint="tcp://h:1")
TWO = Registration(instance_id="a", partition=Partition("m"), endpoint="tcp://h:2", dp_rank=3)
CONFIGURED = Registration(
    instance_id="c", partition=Partition("m"), endpoint="tcp://h:3", source="file x"
)


class Saved:
    """Stands for a client: writes a word, or fails."""

    def __init__(self) -> None:
        self.fails = False

    def save(self, path: Path) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        path.write_text("state")


@pytest.fixture
def client() -> Saved:
    return Saved()


@pytest.fixture
def saver(client: Saved, tmp_path: Path) -> Iterator[Saver]:
    """Saves in `new/state`, whose folder is there unless a test removes it."""
    (tmp_path / "new").mkdir()
    saver = Saver(cast(Client, client), tmp_path / "new" / "state", every=3600.0)
    yield saver
    saver.close()


def test_what_came_over_http_is_saved_and_read_again(saver: Saver, tmp_path: Path) -> None:
    state = tmp_path / "new" / "state"
    saver.note(Catalog([ONE, CONFIGURED, TWO]))
    assert saver.save()
    assert read_registrations(state) == [ONE, TWO]
    assert registrations_path(state).stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in state.parent.iterdir()) == [
        *("state", "state.registered.json")
    ]


@pytest.mark.parametrize(
    "data",
    [b'[{"instance_id": 1}]', b'[{"x": "\xff"}]', b"[" * 10**5 + b"]" * 10**5, b"{}", b"", b"[1]"],
)
def test_without_a_file_nobody_is_registered_and_a_broken_one_is_an_error(
    tmp_path: Path, data: bytes
) -> None:
    state = tmp_path / "state"
    assert read_registrations(state) == []
    registrations_path(state).write_bytes(data)
    with pytest.raises(ConfigurationError, match=r"holds no registrations .* delete it"):
        read_registrations(state)


def test_a_disk_that_is_full_is_counted_and_told_and_passes(client: Saved, saver: Saver) -> None:
    client.fails = True
    assert not saver.save()
    assert saver.statistics()["failed"] == 1
    assert "No space" in saver.statistics()["error"]
    client.fails = False
    assert saver.save()
    assert (saver.statistics()["error"], saver.statistics()["saved"]) == (None, 1)


def test_registrations_that_could_not_be_written_are_written_later(
    saver: Saver, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    folder.rmdir()
    saver.note(Catalog([ONE]))
    assert not saver.save()
    folder.mkdir()
    assert saver.save()
    assert read_registrations(folder / "state") == [ONE]


# Another server's snapshot ------------------------------------------------------------------------


def cut_off(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("content-length", "500")
    request.end_headers()
    request.wfile.write(b"cut off")
    request.close_connection = True


def test_a_snapshot_is_fetched_with_the_token_and_without_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    path = tmp_path / "warm"
    with CannedServer({"/snapshot": (200, b"whole")}) as server:
        fetch_snapshot(f"{server.url}/", path, token="secret")
        assert server.asked == [("/snapshot", "Bearer secret")]
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (cut_off, "cut off after 7 of 500 bytes"),
        ((302, b""), "status 302"),
        ((401, b'{"error": "wants a token ..."'), "status 401"),
        ((503, {"error": "busy"}), r"status 503 \(busy\)"),
    ],
)
def test_a_snapshot_that_is_not_whole_leaves_no_file(
    tmp_path: Path, reply: Reply, says: str
) -> None:
    with CannedServer({"/snapshot": reply}) as server, pytest.raises(OSError, match=says):
        fetch_snapshot(server.url, tmp_path / "warm")
    assert not list(tmp_path.iterdir())


def test_only_a_server_is_asked_for_a_snapshot(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="http://HOST:PORT"):
        fetch_snapshot("file:///etc/passwd", tmp_path / "warm")
