"""Match the same kind of prompt against an index that grows."""

from __future__ import annotations

from typing import Any

from benchmarks.sides.adapter import Adapter
from benchmarks.sides.matching import check, timed, typed
from benchmarks.sides.records import CHECKPOINT, EVENT, RecordSpec, records
from benchmarks.stats import median, percentile
from benchmarks.workload import Prompt


class Growing:
    """The cost of a match at each size of the index."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def measure(
        self,
        side: str,
        source: dict[str, Any],
        ranks: int,
        checkpoints: list[int],
        prompts: int,
        repeats: int,
        forms: list[str],
        sticky: float = 0.8,
    ) -> list[dict[str, Any]]:
        """Return entries, unique blocks, and p50 and p99 in nanoseconds, at each size and form."""
        spec = RecordSpec(side, source, ranks, sticky, tuple(checkpoints), prompts)
        self._adapter.reset()
        apply = self._adapter.applier()
        curve: list[dict[str, Any]] = []
        facts: dict[str, Any] = {}
        queries: list[Prompt] = []
        for record in records(spec):
            if record.kind == EVENT:
                if queries:
                    curve.append({**facts, **self._point(queries, repeats, forms)})
                    queries = []
                apply(self._adapter.rank(record.rank), record.data)
            elif record.kind == CHECKPOINT:
                facts = record.facts()
            else:
                queries.append(record.prompt())
        curve.append({**facts, **self._point(queries, repeats, forms)})
        return curve

    def _point(self, prompts: list[Prompt], repeats: int, forms: list[str]) -> dict[str, float]:
        check(self._adapter, prompts)
        figures: dict[str, float] = {"prompts": len(prompts)}
        for form in forms:
            tokens = [typed(prompt, form) for prompt in prompts]
            samples = timed(self._adapter.matcher(), tokens, repeats)
            figures[f"{form}, p50"] = median(samples)
            figures[f"{form}, p99"] = percentile(samples, 99)
        return figures
