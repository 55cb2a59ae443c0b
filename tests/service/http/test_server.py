"""How a server begins: what it waits for, what it says first, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvindex import ConfigurationError, Worker
from kvindex.service.server import Server
from kvindex.service.settings import ServeSettings
from kvindex.service.sources import FixedSource, target_of
from kvindex.tools.cli.serve import print_beginning

pytestmark = pytest.mark.service


def test_workers_that_are_named_are_added_before_it_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvindex.service.server._FIRST_LOOK", 0.0)
    workers = [Worker(f"w{n}", f"inproc://nobody-publishes-at-{n}") for n in range(50)]
    source = FixedSource(target_of(worker) for worker in workers)
    with Server(ServeSettings(port=0), [source]) as running:
        assert running.missing == {}
        assert len(running.service.catalog.registrations) == 50


def test_it_says_where_it_listens_and_names_a_few_of_many_that_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    running = SimpleNamespace(
        settings=ServeSettings(host="0.0.0.0", insecure=True),
        service=SimpleNamespace(catalog=SimpleNamespace(registrations=())),
        missing={f"vllm-{n}": "refuses the connection" for n in range(64)},
        url="http://127.0.0.1:8090",
        port=8090,
    )
    print_beginning(running)
    said = capsys.readouterr().out
    assert said.count("not found yet: vllm-") == 5
    assert "and 59 more" in said
    assert "all addresses of this machine, port 8090" in said


def test_a_state_that_is_no_ordinary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match="no ordinary file"):
        Server(ServeSettings(port=0, state=str(path)))


def test_without_the_native_module_the_command_says_how_to_get_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvindex", "serve", "--port", "0"],
        env={**os.environ, "KVINDEX_BACKEND": "python"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "needs the native module" in done.stderr
    assert "Unset KVINDEX_BACKEND" in done.stderr
