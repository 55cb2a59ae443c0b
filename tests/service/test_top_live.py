"""`kvindex top` against a service and at a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs kvindex[server]")
pytest.importorskip("uvicorn")
pytest.importorskip("rich")

from rich.console import Console

from kvindex import ConfigurationError, Rank, State
from kvindex.cli.live_top import View, drawn
from kvindex.cli.service_fleet import ServiceError, ServiceFleet
from kvindex.server.overview import overview
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, caught_up
from tests.service.page_server import paged
from tests.unit.test_fleet_overview import Source, status_of

ROOT = Path(__file__).parents[2]


def test_a_service_is_shown_once_through_a_pipe() -> None:
    with FakeEngine("a") as one, paged(one) as (_, client, url):
        one.serve(list(range(64)))
        caught_up(client, one)
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
    with FakeEngine("a") as one, paged(one) as (_, client, url):
        caught_up(client, one)
        service = ServiceFleet(url)
        changed = threading.Event()
        service.watch(changed)
        assert changed.wait(PATIENCE)  # the first event: the states as they are
        changed.clear()
        one.close()
        assert changed.wait(PATIENCE)
        service.close()


def test_a_service_that_does_not_answer_is_told_in_words() -> None:
    with pytest.raises(ServiceError, match="is kvindex serve running there"):
        ServiceFleet("127.0.0.1:1").read()
    with pytest.raises(ConfigurationError, match="no URL of a service"):
        ServiceFleet("ftp://host")


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
    with FakeEngine("a") as one, paged(one) as (_, client, url):
        caught_up(client, one)
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
