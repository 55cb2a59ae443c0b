"""Settings of the packages that are tested here: nothing leaves this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.routing.adapters.loop import run

ROOT = Path(__file__).parents[3]

# No tests; they need packages that may be missing.
collect_ignore = [
    *("litellm_fleet.py", "openai_server.py"),
    *("ray_apps.py", "ray_llm_apps.py", "verl_servers.py"),
]

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

if importlib.util.find_spec("ray") is not None:
    # Ray without Serve is enough for verl.
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")  # its own
        importlib.import_module("ray.serve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let other packages warn of themselves, which is no error of ours."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            action = "default" if item.path.name.startswith("test_ray") else "ignore"
            item.add_marker(pytest.mark.filterwarnings(action))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run asynchronous tests."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def start() -> Iterator[Any]:
    """Return how to start LiteLLM's router before servers; see `litellm_fleet.start`."""
    from tests.routing.adapters import litellm_fleet

    stack = contextlib.AsyncExitStack()
    yield partial(litellm_fleet.start, stack)
    run(stack.aclose())


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Start Ray on this machine alone: no dashboard, no HTTP proxy, nothing sent anywhere."""
    import ray
    from ray import serve

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={
            "env_vars": {"PYTHONPATH": str(ROOT)},
            "worker_process_setup_hook": "kvindex.routing.adapters.ray_llm.install",
        },
    )
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()
