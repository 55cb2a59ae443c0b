"""Calls from other threads: each of them gets an answer, whatever becomes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvindex.subscribe.subscriber_thread import Commands
from kvindex.wire.errors import BusyError, ClosedError
from tests.live import PATIENCE, until

pytestmark = pytest.mark.unit


class Owner:
    """A thread that carries out commands until one of them ends it, or it is told to end."""

    def __init__(self) -> None:
        self.commands = Commands(lambda: self._woken.set())
        self.failure: BaseException | None = None
        self._woken = threading.Event()
        self._stopping = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._woken.wait()
                self._woken.clear()
                self.commands.run()
        except BaseException as error:
            self.failure = error
        finally:
            self.commands.close()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.stop()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_ends_the_owner_reaches_the_caller_too(
    kind: type[BaseException], owner: Owner
) -> None:
    def end() -> None:
        raise kind("planted")

    with pytest.raises(kind, match="planted"):
        owner.commands.call(end, PATIENCE)
    owner.thread.join(PATIENCE)
    assert isinstance(owner.failure, kind)
    assert not owner.commands.running
    with pytest.raises(ClosedError):
        owner.commands.call(end, PATIENCE)


def test_a_call_that_does_not_end_is_given_up_after_its_time(owner: Owner) -> None:
    go = threading.Event()

    def give_up() -> BusyError:
        with pytest.raises(BusyError) as raised:
            owner.commands.call(lambda: go.wait(PATIENCE), 0.05)
        return raised.value

    assert "ends when that does" in str(until(give_up, lambda error: error.begun))
    with pytest.raises(BusyError, match="nothing was done") as raised:
        owner.commands.call(lambda: go.wait(PATIENCE), 0.05)
    assert not raised.value.begun
    go.set()
    assert owner.commands.call(lambda: 7, PATIENCE) == 7


def test_a_timeout_error_of_the_command_is_its_own(owner: Owner) -> None:
    def fail() -> None:
        raise TimeoutError("the command's")

    with pytest.raises(TimeoutError, match="the command's"):
        owner.commands.call(fail, PATIENCE)
