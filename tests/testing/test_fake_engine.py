"""The fake engine publishes what engines do, in their words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvindex.testing import CacheOptions, FakeEngine, Group, ManualClock, Workload
from kvindex.wire import (
    DIALECTS,
    AllBlocksCleared,
    EventBatch,
    decode_batch,
    encode_batch,
    parse_live,
    read_recording,
)
from kvindex.wire.errors import ClosedError
from tests.testing.events import removals, stores

pytestmark = pytest.mark.unit

CAPTURES = Path(__file__).parents[1] / "data" / "captures"


def test_a_restart_is_empty_and_has_other_hashes() -> None:
    clock = ManualClock(50.0)
    engine = FakeEngine(publish=False, block_size=2, clock=clock)
    engine.serve([1, 1], flush=False)
    batch = engine.flush()
    assert batch is not None
    assert (batch.ts, batch.data_parallel_rank) == (50.0, 0)
    assert engine.flush() is None
    before = engine.truth()
    engine.restart()
    assert (engine.truth(), engine.published) == ({}, 0)
    engine.serve([1, 1])
    assert engine.truth().keys() != before.keys()
    engine.restart(new_hash_seed=False)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.serve([1])


def test_sglang_begins_with_a_clear_and_has_one_copy_of_each_page() -> None:
    engine = FakeEngine(publish=False, dialect="sglang-0.5.23", block_size=2, num_blocks=6)
    assert engine.events == (AllBlocksCleared(),)
    engine.serve([1, 1, 2, 2], salt="x")
    engine.serve([1, 1, 2, 2], salt="x")
    assert set(engine.truth().values()) == {1}
    engine.serve([3] * 10)
    assert [len(event.block_hashes) for event in removals(engine.events)] == [1]
    assert stores(engine.events)[0].extra_keys is None


def test_a_step_that_changes_nothing_publishes_nothing() -> None:
    engine = FakeEngine(publish=False, block_size=2)
    engine.serve([1, 1, 2])
    assert engine.events
    engine.serve([1, 1, 2])
    assert (engine.events, engine.published) == ((), 1)


@pytest.mark.parametrize(("name", "counts"), [("sglang-0.5.9", [1, 1]), ("sglang-0.5.18", [2])])
def test_sglang_events_name_one_page_until_they_are_coalesced(name: str, counts: list[int]) -> None:
    engine = FakeEngine(publish=False, dialect=name, block_size=2, num_blocks=2)
    engine.serve([1, 1, 2, 2])
    assert [len(event.block_hashes) for event in stores(engine.events)] == counts
    engine.serve([3, 3, 4, 4])
    assert [len(event.block_hashes) for event in removals(engine.events)] == counts


RECORDED = {
    "vllm-0.9.2": "vllm-0.9.1",
    "vllm-0.10.2": "vllm-0.10.2",
    "vllm-0.12.0-bytes": "vllm-0.10.2",
    "vllm-0.14.0": "vllm-0.14.0",
    "vllm-0.20.0": "vllm-0.20.0",
    "vllm-0.24.0": "vllm-0.24.0",
    "vllm-0.33.0": "vllm-0.33.0",
    "vllm-0.33.0-hybrid": "vllm-0.33.0",
    "vllm-0.33.0-lookahead": "vllm-0.33.0",
    "sglang-0.5.5": "sglang-0.4.8",
    "sglang-0.5.18": "sglang-0.5.18",
    "sglang-0.5.12-eagle": "sglang-0.5.9-eagle",
    "sglang-0.5.23": "sglang-0.5.23",
}


@pytest.mark.parametrize("name", RECORDED)
def test_events_have_the_recorded_engines_shapes(name: str) -> None:
    recorded: Counter[object] = Counter()
    for message in read_recording(CAPTURES / f"{name}.frames"):
        if message.kind == "live":
            count_shapes(recorded, parse_live(message.frames).payload)
    fake: Counter[object] = Counter()
    for payload in fake_payloads(name):
        count_shapes(fake, payload)
    strange = set(fake) - set(recorded)
    assert not strange
    assert {"BlockStored", "BlockRemoved"} <= {shape[0] for shape in fake}  # type: ignore[index]


def fake_payloads(name: str) -> list[bytes]:
    """What the fake engine of that dialect sends for a workload like the recorded one."""
    options = None
    if name.endswith("hybrid"):
        options = CacheOptions(groups=(Group(), Group.window(64)))
    elif name.endswith("lookahead"):
        options = CacheOptions(lookahead=1)
    engine = FakeEngine(
        publish=False,
        dialect=RECORDED[name],
        num_blocks=80,
        hash_form="bytes" if name.endswith("bytes") else None,
        options=options,
    )
    # The recorded workloads with adapters are those of plain vLLM since it names them, 0.14.
    named = "lora_name" in DIALECTS[RECORDED[name]].stored and not name.startswith("sglang")
    loras = ("adapter-0",) if named and options is None else ()
    payloads = [encode_batch(EventBatch(1.0, list(engine.events), 0), engine.dialect)]
    for request in Workload(60, seed=2, loras=loras):
        engine.run([request])
        payloads.append(encode_batch(EventBatch(1.0, list(engine.events), 0), engine.dialect))
    return payloads


def count_shapes(shapes: Counter[object], payload: bytes) -> None:
    """Count each event's tag, fields in wire order, and the fields' types."""
    for event in msgspec.msgpack.decode(payload)[1]:
        if isinstance(event, dict):
            fields = [(key, kind(value)) for key, value in event.items() if key != "session_id"]
            shapes[event["type"], tuple(fields)] += 1
        else:
            shapes[event[0], tuple(kind(value) for value in event[1:])] += 1


def kind(value: object) -> object:
    """A value's type; lists with the types inside, since `[None]` and `["a"]` differ."""
    if isinstance(value, list):
        return ("list", *sorted({str(kind(item)) for item in value}))
    return type(value).__name__


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_played(name: str) -> None:
    engine = FakeEngine(publish=False, dialect=name, num_blocks=60)
    for request in Workload(20, loras=["a"], salts=["s"]):
        engine.run([request])
        decoded = decode_batch(encode_batch(EventBatch(1.0, list(engine.events), 0), name_of(name)))
        assert len(decoded.events) == len(engine.events)


def name_of(name: str) -> Any:
    return DIALECTS[name]
