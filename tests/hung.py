"""Ends a test that hangs, with every thread's stack, so that the other tests go on without it.

pytest's own `faulthandler_timeout` no longer watches a test that has failed, whose teardown may
hang, and leaves what it has forked: that holds the pipe by which xdist sees a worker's end.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal

import pytest

limit = 600.0  # seconds for a set-up, a call or a teardown: several PATIENCEs of tests.live


class Watch:
    """A plugin of pytest: what takes too long ends this process, which xdist replaces."""

    def __init__(self) -> None:
        self._stderr = os.dup(2)  # while a test runs, its output is captured at 2
        if "PYTEST_XDIST_WORKER" in os.environ:
            os.register_at_fork(after_in_child=lambda: signal.alarm(math.ceil(limit)))

    def _begin(self, item: pytest.Item) -> None:
        if not item.get_closest_marker("engine"):  # `.ci/whole` ends those, as a whole
            faulthandler.dump_traceback_later(limit, exit=True, file=self._stderr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._begin(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._begin(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._begin(item)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
