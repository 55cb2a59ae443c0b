"""Settings of the packages that are tested here: nothing leaves this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# No tests; they need packages that may be missing.
collect_ignore = ["ray_apps.py", "ray_llm_apps.py", "openai_server.py", "verl_servers.py"]

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

if importlib.util.find_spec("ray") is not None:
    # Ray without Serve is enough for verl.
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")  # its own
        importlib.import_module("ray.serve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let Ray warn of itself, which is no error of ours."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name.startswith("test_ray"):
            item.add_marker(pytest.mark.filterwarnings("default"))


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
