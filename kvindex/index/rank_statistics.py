"""How statistics show a rank, whichever index counted: its LoRAs by name, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvindex.index.keys import Lora, lora_tag

_MAX_LORAS = 64  # distinct LoRAs of a rank that statistics name


def with_advice(statistics: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's statistics with advice on its `CacheSettings`."""
    advice = []
    stored = {idx: group for idx, group in statistics["groups"].items() if group["block_size"]}
    unknown = [idx for idx, group in stored.items() if not group["known"]]
    if unknown and len(stored) > 1:
        advice.append(
            f"the events do not report the kinds of groups {', '.join(unknown)}: answers are "
            "upper bounds until CacheSettings(groups={...}) names them"
        )
    for idx, group in stored.items():
        if group["kind"] == "chunked_local_attention" and group["attention_chunk_size"] is None:
            advice.append(
                f"the events do not report the size of group {idx}'s chunks: answers are too low "
                "until GroupSpec(attention_chunk_size=...) names it"
            )
    if statistics["reannounced"] and statistics["removed_unknown"]:
        advice.append(
            f'report_mode="full": {statistics["removed_unknown"]} removals named blocks that are '
            "not held, so some stores that were taken for announcements were copies"
        )
    return {**statistics, "advice": advice}


def shown_loras(counts: Mapping[Lora, int]) -> dict[str, int]:
    """Return the blocks of each LoRA by its name in statistics: those with most, and the rest."""
    shown = {_shown_lora(lora): counts[lora] for lora in largest_loras(counts)}
    rest = sum(counts.values()) - sum(shown.values())
    return {**shown, "(other)": rest} if rest else shown


def largest_loras(counts: Mapping[Lora, int]) -> list[Lora]:
    """Return the LoRAs with most blocks."""
    return sorted(counts, key=lambda lora: (-counts[lora], lora_tag(lora)))[:_MAX_LORAS]


def _shown_lora(lora: Lora) -> str:
    """Return a LoRA's name, or its id as "id 7", or "" for none."""
    return f"id {lora}" if isinstance(lora, int) else lora or ""
