"""The rules that a ring can follow here, for tests that are run over each of them."""

from __future__ import annotations

import pytest

from kvindex import BACKEND
from kvindex.shm.layout import Rule

RULES = [Rule.LOCK] + [Rule.ATOMICS] * (BACKEND == "native")
"""Python's, and the native one where it was built."""

_BY_PYTHONS = ", Python's rule"


def by_pythons_rule(*ways: str) -> list[str]:
    """Return ways to run a test by Python's rule too; none where there is only that rule."""
    return [way + _BY_PYTHONS for way in ways] if len(RULES) > 1 else []


def follow(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rings that this process makes from here on follow a rule."""
    monkeypatch.setattr("kvindex.shm.ring.OWN_RULE", rule)


def follow_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them follow Python's rule, if that is what the way says."""
    if way.endswith(_BY_PYTHONS):
        follow(Rule.LOCK, monkeypatch)
