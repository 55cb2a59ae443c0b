"""Adapters whose package is not installed are not imported, as pytest does to find doctests."""

from __future__ import annotations

from importlib.util import find_spec

NEEDS = {"ray_serve": "ray"}

collect_ignore = [
    f"kvindex/integrations/{adapter}.py"
    for adapter, package in NEEDS.items()
    if find_spec(package) is None
]
