"""An engine's `/metrics`, read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["EngineMetrics"]

_SAMPLE: Final = re.compile(
    r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([-+]?(?:[\d.]+(?:[eE][-+]?\d+)?|NaN|Inf))"
)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MAX_SAMPLES: Final = 100_000


class EngineMetrics:
    r"""Samples of Prometheus' text format.

    Args:
        text: what `/metrics` answered; lines that are no samples are left out.

    Examples:
        >>> metrics = EngineMetrics('hits_total{engine="0"} 3.0\nhits_total{engine="1"} 4')
        >>> metrics.total("hits"), metrics.total("queries")
        (7.0, None)
    """

    def __init__(self, text: str = "") -> None:
        self._samples = list(_samples(text))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def total(self, *names: str) -> float | None:
        """Return the sum of a series over its labels, by the first of its names; None if absent.

        A counter's name may have the suffix `_total`, which is left out here.
        """
        for name in names:
            values = [v for n, _, v in self._samples if n in (name, f"{name}_total")]
            if values:
                return sum(values)
        return None

    def labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of a series' first sample."""
        return next((labels for n, labels, _ in self._samples if n == name), {})


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines()[:_MAX_SAMPLES]:
        sample = _SAMPLE.match(line)
        if sample is not None and math.isfinite(value := float(sample[3])):
            yield sample[1], dict(_LABEL.findall(sample[2] or "")), value
