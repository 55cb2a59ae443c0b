"""Medians and percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(samples: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least this many percent of them do not exceed."""
    ordered = sorted(samples)
    place = -(-len(ordered) * percent // 100)
    return float(ordered[max(0, int(place) - 1)])
