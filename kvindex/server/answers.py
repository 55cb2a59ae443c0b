"""A partition's answers as JSON. Replaced by kvindex.queries as soon as that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvindex import Match, Rank, RankRows, Trust

__all__ = ["AnswerForm"]


class AnswerForm:
    def __init__(
        self, instances: Sequence[tuple[int | str, Sequence[Rank]]], dialect: str = "dynamo"
    ) -> None:
        self._instances = instances
        self.rows = RankRows([rank for _, ranks in instances for rank in ranks])

    def write(self, match: Match, trusts: Mapping[Rank, Trust] | None) -> bytes:
        hits = match.hits(self.rows)
        scores: dict[str, dict[str, int]] = {}
        instances: dict[str, Any] = {}
        row = 0
        for instance_id, ranks in self._instances:
            own = slice(row, row + len(ranks))
            row += len(ranks)
            if not any(hits.tokens[own]):
                continue
            named = zip(ranks, hits.device[own], strict=True)
            dp = {str(rank.dp_rank): device for rank, device in named if device}
            if dp:
                scores[str(instance_id)] = dp
            instances[str(instance_id)] = {
                "longest_matched": max(hits.tokens[own]),
                "gpu": max(hits.device[own]),
                "cpu": max(hits.host[own]),
                "disk": max(hits.tokens[own]),
                "dp": dp,
            }
        return msgspec.json.encode({"scores": scores, "frequencies": [], "instances": instances})
