"""A test that hangs is named and ended, and the others run: see tests.hung."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.children import ENVIRONMENT, Program

pytestmark = pytest.mark.unit

CONFTEST = """
from tests.hung import Watch

def pytest_configure(config):
    config.pluginmanager.register(Watch())
"""
TESTS = """
import os, signal, threading
import pytest
from tests import hung

@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(hung, "limit", 0.1)

def test_waits(at_once):
    threading.Event().wait()

def test_waits_for_a_child(at_once):
    pid = os.fork()
    if pid == 0:
        signal.pause()
    os.waitpid(pid, 0)

@pytest.fixture
def stuck():
    yield
    threading.Event().wait()

def test_fails_and_waits(stuck, monkeypatch):
    monkeypatch.setattr(hung, "limit", 0.1)
    raise AssertionError("failed")

@pytest.mark.parametrize("number", range(20))
def test_others(number):
    pass
"""


def run_tests(folder: Path) -> tuple[str, str]:
    command = ["-m", "pytest", "-p", "xdist", "-n2", "--dist=worksteal", "-c", os.devnull]
    env = {**ENVIRONMENT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command += [f"--rootdir={folder}", "test_it.py"]
    with Program(*command, cwd=folder, env=env, stdin=subprocess.DEVNULL) as tests:
        return tests.finish()


def test_what_hangs_is_named_and_ended_and_the_others_run(tmp_path: Path) -> None:
    Path(tmp_path, "conftest.py").write_text(CONFTEST)
    Path(tmp_path, "test_it.py").write_text(TESTS)
    out, err = run_tests(tmp_path)
    for _ in range(4):
        if "cannot send (already closed?)" not in out:
            break
        out, err = run_tests(tmp_path)  # xdist ends when it sends to a worker that has just died
    for name in ("test_waits", "test_waits_for_a_child", "test_fails_and_waits"):
        assert f"crashed while running 'test_it.py::{name}'" in out, out
    assert "4 failed, 20 passed" in out  # one of them had failed before
    for where in ("in test_waits\n", "in test_waits_for_a_child\n", "in stuck\n"):
        assert where in err, err
