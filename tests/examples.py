"""How many examples a dear property test takes: few for every change, many at night."""

from __future__ import annotations

import os

from hypothesis import settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def examples(usually: int, nightly: int = 10_000) -> settings:
    """So many that a planted fault is found within seconds; the nights find what is rarer."""
    return settings(max_examples=nightly if NIGHTLY else usually)
