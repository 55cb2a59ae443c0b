"""Kinds of tests, hypothesis profiles, how many processes run, and what children inherit.

The profiles are "default" for every run, and "nightly" (HYPOTHESIS_PROFILE=nightly) for many.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, settings

import kvindex
from kvindex.wire.backend import hidden_native_build
from tests.hung import Watch
from tests.publish.publish_peers import Context

_TESTS = Path(__file__).parent
collect_ignore = ["typing"]  # for type checkers, which is why it is never imported
if not find_spec("torch"):  # the extra "torch"
    collect_ignore.append("shm/test_torch_groups.py")
if not find_spec("kvindex.wire._native"):  # nothing to compare with
    collect_ignore += [
        "index/test_backends_agree.py",
        "routing/test_choosing_agrees.py",
        *("gateway", "service/http", "service/queries"),
    ]
if kvindex.BACKEND == "python":  # which has no snapshots
    collect_ignore += [
        "replicas",
        *("client/test_warm_restart.py", "client/test_saved_state.py"),
        "client/test_saved_state_histories.py",
    ]
# What takes long, most of it waiting for other processes. .ci/run or .ci/whole names each.
_LONG = [
    _TESTS / name
    for name in (
        *("engines", "gateway", "service/http", "tools/cli/test_top_live.py"),
        *("docs/test_site.py", "docs/test_commands.py", "package/test_examples.py"),
        *("replicas/nats", "tools/cli/test_relay.py", "tools/cli/test_fanout.py"),
        *(f"routing/test_shared_load{part}.py" for part in ("", "_histories", "_nats")),
        "wire/test_nats_reconnecting.py",
        *("client/test_forked_clients.py", "subscribe/test_isolation.py"),
        "replicas/test_faults.py",
        *(f"shm/test_{part}.py" for part in ("remote_deaths", "queue_kills", "queue_groups")),
    )
]
KINDS = {"unit", "property", "conformance", "e2e", "faults", "adapter", "service", "engine"}

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
    """Leave out what takes minutes, unless it or a room that it is in is asked for by its path."""
    if collection_path not in _LONG:
        return None
    named_paths = [
        Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.args
    ]
    named = any(
        collection_path in (path, *path.parents) or path in _rooms_of(collection_path)
        for path in named_paths
    )
    return None if named else True


def _rooms_of(path: Path) -> list[Path]:
    return [parent for parent in path.parents if _TESTS in parent.parents]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that does not say of what kind it is: `-m faults` shall miss none."""
    kinds = KINDS & {mark.name for mark in item.iter_markers()}
    if _TESTS in item.path.parents and len(kinds) != 1:
        known = ", ".join(sorted(KINDS))
        pytest.fail(f"its file needs `pytestmark = pytest.mark.KIND`: {known}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    asyncio.run(function(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def context() -> Iterator[Context]:
    """A ZeroMQ context of the test's own, ended with all that is in it."""
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


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
