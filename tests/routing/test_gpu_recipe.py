"""What `python -m benchmarks.gpu` sends and starts; a dry run is part of the benchmarks' smoke."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")  # of the extra `bench`

from benchmarks.gpu.engines import Engines
from benchmarks.gpu.sessions import KINDS, Texts, sessions

pytestmark = pytest.mark.unit


def messages(kind: str, label: str) -> list[list[list[dict[str, Any]]]]:
    played = sessions(KINDS[kind], Texts(1.5), seed=3, label=label, rate=9.0, seconds=20.0)
    assert all(0 <= request.at < 20 for requests in played for request in requests)
    assert 0.5 * 180 < sum(map(len, played)) < 1.5 * 180
    return [[json.loads(request.body)["messages"] for request in one] for one in played]


@pytest.mark.parametrize("kind", KINDS)
def test_all_routers_get_the_same_sessions_that_share_nothing_in_caches(kind: str) -> None:
    first, second = messages(kind, "1"), messages(kind, "2")
    for one, other in zip(first, second, strict=True):
        for prompt, twin in zip(one, other, strict=True):
            assert prompt[0]["content"][0] == "1"
            assert twin[0]["content"] == "2" + prompt[0]["content"][1:]
            assert twin[1:] == prompt[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_continues_the_one_before_and_heads_are_shared(kind: str) -> None:
    played = messages(kind, "1")
    for turns in played:
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
    heads = {turns[0][0]["content"] for turns in played}
    assert len(heads) <= KINDS[kind].heads
    assert len(heads) < len(played)


def test_an_engine_gets_a_cache_of_its_size_events_and_further_options() -> None:
    engines = Engines(count=4, model=Path("model"), vllm="env vllm", more="--seed 7", cache=1_600)
    command = engines.command(8_123)
    assert command[:4] == ["env", "vllm", "serve", "model"]
    assert command[-3:] == ["--enable-prompt-tokens-details", "--seed", "7"]
    options = dict(zip(command[4::2], command[5::2], strict=False))
    assert options["--num-gpu-blocks-override"] == "100"
    assert options["--port"] == "8123"
    events = json.loads(options["--kv-events-config"])
    assert events["enable_kv_cache_events"]
    assert events["endpoint"] != events["replay_endpoint"]
