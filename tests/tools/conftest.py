"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvindex.testing import FakeEngine
from kvindex.tools.cli import main
from tests.tools.commands import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""

    def run(*argv: object) -> Ran:
        code: object
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as ended:
            code = ended.code
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine("vllm-0") as engine:
        yield engine
