"""What a server saves, and what it fetches from another one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from kvindex import Client, ConfigurationError
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.state import Saver, fetch_snapshot, read_registrations, registrations_path

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


@contextmanager
def saver(client: Saved, path: Path) -> Iterator[Saver]:
    it = Saver(cast(Client, client), path, every=3600.0)
    yield it
    it.close()


def test_what_came_over_http_is_saved_and_read_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with saver(Saved(), state) as it:
        it.note(Catalog([ONE, CONFIGURED, TWO]))
        assert it.save()
    assert read_registrations(state) == [ONE, TWO]
    assert registrations_path(state).stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "state.registered.json"]


def test_without_a_file_nobody_is_registered_and_a_broken_one_is_an_error(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert read_registrations(state) == []
    registrations_path(state).write_text('[{"instance_id": 1}]')
    with pytest.raises(ConfigurationError, match="delete it or move it away"):
        read_registrations(state)


def test_a_disk_that_is_full_is_counted_and_told_and_passes(tmp_path: Path) -> None:
    client = Saved()
    with saver(client, tmp_path / "state") as it:
        client.fails = True
        assert not it.save()
        assert it.statistics()["failed"] == 1
        assert "No space" in it.statistics()["error"]
        client.fails = False
        assert it.save()
        assert it.statistics()["error"] is None
        assert it.statistics()["saved"] == 1


def test_registrations_that_could_not_be_written_are_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    with saver(Saved(), folder / "state") as it:
        it.note(Catalog([ONE]))
        assert not it.save()
        folder.mkdir()
        assert it.save()
        assert read_registrations(folder / "state") == [ONE]


# Another server's snapshot ------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Answers with what its server has."""

    def do_GET(self) -> None:
        server = cast("Any", self.server)
        server.asked.append((self.path, self.headers.get("authorization")))
        status, length, body = server.answer
        self.send_response(status)
        self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def other_server(status: int, length: int, body: bytes) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        it = cast("Any", server)
        it.answer, it.asked = (status, length, body), []
        it.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield it
        server.shutdown()
        thread.join()


def test_a_snapshot_is_fetched_with_the_token(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    with other_server(200, 5, b"whole") as server:
        fetch_snapshot(f"{server.url}/", path, token="secret")
        assert server.asked == [("/snapshot", "Bearer secret")]
    assert path.read_bytes() == b"whole"


@pytest.mark.parametrize(
    ("status", "length", "body", "says"),
    [
        (200, 500, b"cut off", "cut off after 7 of 500 bytes"),
        (302, 0, b"", "status 302"),
        (401, 29, b'{"error": "wants a token ..."', "status 401"),
        (503, 17, b'{"error": "busy"}', r"status 503 \(busy\)"),
    ],
)
def test_a_snapshot_that_is_not_whole_leaves_no_file(
    tmp_path: Path, status: int, length: int, body: bytes, says: str
) -> None:
    with other_server(status, length, body) as server:
        with pytest.raises(OSError, match=says):
            fetch_snapshot(server.url, tmp_path / "warm")
    assert not list(tmp_path.iterdir())


def test_only_a_server_is_asked_for_a_snapshot(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="http://HOST:PORT"):
        fetch_snapshot("file:///etc/passwd", tmp_path / "warm")


def test_a_snapshot_is_fetched_without_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with other_server(200, 5, b"whole") as server:
        fetch_snapshot(server.url, tmp_path / "warm", token="secret")
        assert server.asked == [("/snapshot", "Bearer secret")]
