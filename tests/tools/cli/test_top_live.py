"""`kvindex top` against a service and at a terminal."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs kvindex[server]")
pytest.importorskip("rich")

from kvindex import ConfigurationError
from kvindex.testing import FakeEngine
from kvindex.tools.cli.top import ServiceError, ServiceFleet
from tests.canned import CannedServer
from tests.children import ENVIRONMENT
from tests.live import PATIENCE, caught_up
from tests.service.http.scenes import certificate_in, paged, serving
from tests.tools.commands import output_of

pytestmark = pytest.mark.service


def test_a_service_is_shown_once_through_a_pipe() -> None:
    with FakeEngine("a") as engine, paged(engine) as (_, client, url):
        engine.serve(list(range(64)))
        caught_up(client, engine)
        text = output_of("top", url)
    assert "1 rank of 1 worker: 1 live, 1 complete; 4 GPU blocks" in text
    assert "llama" in text


def test_news_of_a_service_arrive_at_once() -> None:
    with FakeEngine("a") as engine, paged(engine) as (_, client, url):
        caught_up(client, engine)
        service = ServiceFleet(url)
        changed = threading.Event()
        service.watch(changed.set)
        assert changed.wait(PATIENCE)  # the first event: the states as they are
        changed.clear()
        engine.close()
        assert changed.wait(PATIENCE)
        service.close()


def test_a_service_that_does_not_answer_is_reported_in_words() -> None:
    with pytest.raises(ServiceError, match="is kvindex serve running there"):
        ServiceFleet("127.0.0.1:1").read()
    with pytest.raises(ConfigurationError, match="no URL of a server"):
        ServiceFleet("ftp://host")


@pytest.mark.parametrize("answer", [b"[]", b"{", b'{"\xff": 1}', b'{"x": ' + b"[" * 10_000])
def test_a_service_that_answers_something_else_is_reported_in_words(answer: bytes) -> None:
    with (
        CannedServer({"/api/fleet": (200, answer)}) as server,
        pytest.raises(ServiceError, match="something else than kvindex serve"),
    ):
        ServiceFleet(server.url).read()


def test_a_redirect_is_not_followed_nor_gets_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVINDEX_TOKEN", "t" * 32)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", f"http://127.0.0.1:{elsewhere.getsockname()[1]}/")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        with CannedServer({"/api/fleet": redirect}) as server:
            with pytest.raises(ServiceError, match="it answers 302"):
                ServiceFleet(server.url).read()
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_an_own_authority_is_trusted_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    cert, key = certificate_in(tmp_path)
    with serving("--tls-cert", cert, "--tls-key", key) as served:
        url = f"https://localhost:{served.port}"
        with pytest.raises(ServiceError, match=r"not trusted: .*--cacert") as error:
            ServiceFleet(url).read()
        assert "is kvindex serve running there" not in str(error.value)
        assert ServiceFleet(url, str(cert)).read().ranks == []
    with pytest.raises(ConfigurationError, match="--cacert"):
        ServiceFleet(url, str(tmp_path / "none.pem"))


def test_at_a_terminal_it_is_drawn_until_q() -> None:
    master, terminal = pty.openpty()
    with FakeEngine("a") as engine, paged(engine) as (_, client, url):
        caught_up(client, engine)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvindex", "top", url],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "160", "LINES": "30"},
        )
        os.close(terminal)
        seen = b""
        while b"q quit" not in seen:
            seen += os.read(master, 4096)
        os.write(master, b"q")
        assert process.wait(PATIENCE) == 0
    os.close(master)
    assert b"1 rank of 1 worker" in seen
