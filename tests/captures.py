"""Recordings of real engines: their payloads, and what their caches held at the end."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvindex.wire import parse_live, read_recording

CAPTURES = Path(__file__).parent / "data" / "captures"
NAMES = sorted(path.stem for path in CAPTURES.glob("*.frames"))


@cache
def live_payloads(name: str) -> tuple[bytes, ...]:
    messages = read_recording(CAPTURES / f"{name}.frames")
    frames = [parse_live(message.frames) for message in messages if message.kind == "live"]
    assert [frame.seq for frame in frames] == list(range(len(frames)))
    return tuple(frame.payload for frame in frames)


@cache
def truth(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CAPTURES / f"{name}.json").read_text())
    return loaded
