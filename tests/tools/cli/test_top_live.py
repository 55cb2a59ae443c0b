"""`kvindex top` against a service and at a terminal."""

from __future__ import annotations

import io
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs kvindex[server]")
pytest.importorskip("rich")

from rich.console import Console

from kvindex import ConfigurationError, Rank, State
from kvindex.service.overview import overview
from kvindex.testing import FakeEngine
from kvindex.tools.cli.top import ServiceError, ServiceFleet
from kvindex.tools.cli.top_screen import View, drawn
from tests.live import PATIENCE, caught_up
from tests.service.http.page_server import paged
from tests.service.http.served import certificate_in, serving
from tests.service.test_fleet_overview import Source, status_of

pytestmark = pytest.mark.service

ROOT = Path(__file__).parents[3]


@contextmanager
def redirecting(to: socket.socket) -> Iterator[str]:
    """Run a server that sends everybody to another one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{to.getsockname()[1]}/")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_service_is_shown_once_through_a_pipe() -> None:
    with FakeEngine("a") as engine, paged(engine) as (_, client, url):
        engine.serve(list(range(64)))
        caught_up(client, engine)
        ended = subprocess.run(
            [sys.executable, "-m", "kvindex", "top", url],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE,
            check=True,
        )
    assert "1 rank of 1 worker: 1 live, 1 complete; 4 GPU blocks" in ended.stdout
    assert "llama" in ended.stdout


def test_news_of_a_service_are_heard_at_once() -> None:
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


def test_a_service_that_does_not_answer_is_told_in_words() -> None:
    with pytest.raises(ServiceError, match="is kvindex serve running there"):
        ServiceFleet("127.0.0.1:1").read()
    with pytest.raises(ConfigurationError, match="no URL of a server"):
        ServiceFleet("ftp://host")


def test_a_redirect_is_not_followed_and_its_token_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVINDEX_TOKEN", "t" * 32)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, redirecting(elsewhere) as url:
        with pytest.raises(ServiceError, match="it answers 302"):
            ServiceFleet(url).read()
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_a_certificate_of_an_own_authority_is_trusted_by_its_file_and_asked_for_else(
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


def test_ranks_beyond_the_screen_are_scrolled_to_and_found_by_name() -> None:
    fleet = overview(Source(*(status_of(Rank(f"w{n:03}", 0)) for n in range(100))))
    view = View("name")

    def text() -> str:
        console = Console(file=io.StringIO(), width=200, color_system=None)
        console.print(drawn(fleet, view, most=10))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    assert "ranks 1-10 of 100" in text()
    for key in ("page down", "down"):
        view.press(key)
    assert "ranks 12-21 of 100" in text()
    for _ in range(20):
        view.press("page down")
    assert "ranks 91-100 of 100" in text()
    for key in "/w04s":
        view.press(key)
    view.press("\x7f")
    assert "find: w04_" in text()
    view.press("\r")
    assert "w049/0" in text()
    assert "w050/0" not in text()
    view.press("\x1b")
    assert "of 100" in text()


def test_why_ranks_are_not_well_is_said_in_full_by_a_key_and_each_reason_once() -> None:
    why = "nothing listens at tcp://h:{}, which is a long reason " + "in many words " * 20
    fleet = overview(
        Source(
            *(
                status_of(Rank("gone", n), State.CONNECTING, reason=why.format(n), endpoint="x")
                for n in range(8)
            )
        ),
        missing={"http://never:8000": "it answers 404"},
    )
    view = View("state")
    view.press("w")
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(drawn(fleet, view, most=10))
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "gone/0 and 7 more ranks: nothing listens at" in text
    assert text.count("in many words") == 20
    assert "not found: http://never:8000: it answers 404" in text


def test_keys_sort_reverse_and_end() -> None:
    view = View("state")
    for key in "bx":
        view.press(key)
    assert (view.sort, view.reverse, view.ended) == ("blocks", False, False)
    view.press("r")
    assert view.reverse
    view.press("q")
    assert view.ended


def test_what_is_drawn_has_no_markup_of_the_network_and_says_what_is_wrong() -> None:
    evil = status_of(Rank("[red]a[/red]", 0), State.STALE, reason="[bold]why[/bold]")
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(drawn(overview(Source(evil)), View("state"), most=5, trouble="no answer [x]"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]a[/red]/0" in text
    assert "[bold]why[/bold]" in text
    assert "no answer [x]" in text


def test_at_a_terminal_it_is_drawn_until_q() -> None:
    master, terminal = pty.openpty()
    with FakeEngine("a") as engine, paged(engine) as (_, client, url):
        caught_up(client, engine)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvindex", "top", url],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "30"},
        )
        os.close(terminal)
        seen = b""
        while b"q quit" not in seen:
            seen += os.read(master, 4096)
        os.write(master, b"q")
        assert process.wait(PATIENCE) == 0
    os.close(master)
    assert b"1 rank of 1 worker" in seen
