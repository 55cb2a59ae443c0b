"""Engines that the tests of this folder share, and the table at the end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvindex import connect
from tests.engines import make_model
from tests.engines.comparing import Fleet, Ledger
from tests.engines.vllm import Vllm

_LEDGER = Ledger()


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    return _LEDGER


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for row in _LEDGER.rows():
        terminalreporter.write_line(row)


@pytest.fixture(scope="session")
def venv() -> Path:
    """The environment that `.ci/engines` installed vLLM in."""
    path = os.environ.get("KVINDEX_VLLM")
    if not path:
        pytest.fail("KVINDEX_VLLM must name an environment with vLLM: run .ci/engines")
    return Path(path)


@pytest.fixture(scope="session")
def model_of(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a tiny model of a kind."""

    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        subprocess.run([venv / "bin" / "python", make_model.__file__, kind, folder], check=True)
        return folder

    return make


@pytest.fixture(scope="session")
def pair(
    venv: Path, model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Vllm]]:
    """Two engines of one model, each with one rank."""
    model, logs = model_of("llama"), tmp_path_factory.mktemp("logs")
    yield from _running(Vllm(venv, model, logs / f"{name}.log") for name in ("first", "second"))


@pytest.fixture(scope="module")
def apart(
    venv: Path, model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Vllm]]:
    """Three engines of one model: P and D with NIXL between them, and one that does both."""
    if subprocess.run([venv / "bin" / "python", "-c", "import nixl._api"], check=False).returncode:
        pytest.skip("nixl cannot be imported: P and D cannot exchange blocks")
    model, logs = model_of("llama"), tmp_path_factory.mktemp("logs")
    roles = ("kv_producer", "kv_consumer", "")
    yield from _running(Vllm(venv, model, logs / f"log{role}", role=role) for role in roles)


@pytest.fixture
def fleet(pair: list[Vllm]) -> Iterator[Fleet]:
    with connect([engine.url for engine in pair]) as client:
        yield Fleet(client, pair)


def _running(engines: Iterator[Vllm]) -> Iterator[list[Vllm]]:
    """Start all engines at once, and end them."""
    started: list[Vllm] = []
    try:
        for engine in engines:
            started.append(engine)
            engine.start()
        for engine in started:
            engine.wait_until_ready()
        yield started
    finally:
        for engine in started:
            engine.close()


@pytest.fixture(params=["hybrid", "dp"])
def other(
    request: pytest.FixtureRequest, venv: Path, model_of: Callable[[str], Path], tmp_path: Path
) -> Iterator[Vllm]:
    """One engine with sliding windows, and one with two DP ranks."""
    kind, dp = ("gemma3", 1) if request.param == "hybrid" else ("llama", 2)
    for engines in _running(iter([Vllm(venv, model_of(kind), tmp_path / "log", dp=dp)])):
        yield engines[0]
