"""Hypothesis profiles, how many processes run the tests, and what their children inherit.

The profiles are "default" for every run, and "nightly" (HYPOTHESIS_PROFILE=nightly) for many.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import kvindex
from kvindex.wire.backend import hidden_native_build
from tests.hung import Watch

collect_ignore = ["typing"]  # for type checkers, which is why it is never imported
_LONG = [Path(__file__).parent / name for name in ("engines", "service", "docs/test_site.py")]

# LiteLLM fetches its prices from the internet when it is imported, unless it is told not to.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    max_examples=10_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run that would not test what it seems to; say what children inherit."""
    _check_backend()
    if os.environ.get("HYPOTHESIS_PROFILE") != "nightly":  # its many examples take hours
        config.pluginmanager.register(Watch())
    # Container images forbid compiled files beside the sources. Hundreds of children would each
    # compile kvindex anew, and so would each worker the tests.
    if sys.dont_write_bytecode and hasattr(config, "cache"):
        sys.pycache_prefix = str(config.cache.mkdir("compiled"))
        sys.dont_write_bytecode = False
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # As in pyproject.toml: programs that tests start fork beside threads on purpose, too.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:This process:DeprecationWarning")
    # A shell starts its background jobs with Ctrl-C ignored, and nohup starts its program with
    # SIGHUP ignored; children would ignore them as well. A handler is not handed down to programs
    # that are started, so they have the default, and this run goes on without its terminal.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what takes minutes, unless it is asked for by its path, as `.ci/run` does."""
    if collection_path not in _LONG:
        return None
    asked = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    named = any(path == collection_path or collection_path in path.parents for path in asked)
    return None if named else True


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Start no workers for single files: that would take longer than most files do."""
    paths = [Path(arg.split("::")[0]) for arg in config.args]
    return 0 if all(path.is_file() for path in paths) else None  # None: one for each core


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which backend was tested, even when quiet."""
    terminalreporter.write_line(f"kvindex backend: {kvindex.BACKEND}")


def _check_backend() -> None:
    """Refuse to test the sources in Python while they hide an installed native module."""
    chosen = os.environ.get("KVINDEX_BACKEND")
    if kvindex.BACKEND == "python" and not chosen and hidden_native_build() is not None:
        raise pytest.UsageError(
            "pytest imports kvindex from its sources, but the native module was installed beside"
            " a copy of them: install with `pip install -e '.[test]'`, or set"
            " KVINDEX_BACKEND=python to test the Python index"
        )
