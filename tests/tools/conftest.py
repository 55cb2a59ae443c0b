"""Fixtures of the tests of commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvindex.testing import FakeEngine
from kvindex.tools.cli import main
from tests.tools.commands import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, which must exit with this code."""

    def run(*argv: object, code: int = 0) -> Ran:
        try:
            ended: object = main([str(argument) for argument in argv])
        except SystemExit as error:
            ended = error.code
        ran = Ran(*capsys.readouterr())
        assert ended == code, ran
        return ran

    return run


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine("vllm-0") as engine:
        yield engine
