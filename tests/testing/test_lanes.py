"""Workloads, clocks and lanes do what they say."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvindex.testing import FakeEngine, LaneFaults, ManualClock, Request, Workload
from kvindex.testing.faults import Lane
from kvindex.wire import AllBlocksCleared, EventBatch, decode_batch, encode_batch, parse_live

pytestmark = pytest.mark.unit


def test_a_workload_is_its_seed() -> None:
    requests = list(Workload(50, seed=1, loras=["a"], salts=["s"]))
    assert requests == list(Workload(50, seed=1, loras=["a"], salts=["s"]))
    assert requests != list(Workload(50, seed=2, loras=["a"], salts=["s"]))
    assert {request.lora for request in requests} == {None, "a"}
    assert {request.salt for request in requests} == {None, "s"}
    assert isinstance(requests[0], Request)
    engine = FakeEngine(publish=False)
    served = engine.run(requests)
    hit = sum(cost.hit_tokens for cost in served)
    assert hit > 0.3 * sum(cost.prompt_tokens for cost in served)
    assert max(engine.truth().values()) > 1


def test_a_manual_clock_moves_only_by_hand() -> None:
    clock = ManualClock(5.0)
    assert (clock(), clock.advance(0.5), clock.time) == (5.0, 5.5, 5.5)


def lane(**faults: float) -> tuple[Lane, Counter[str]]:
    counters: Counter[str] = Counter()
    made = Lane("live", LaneFaults(**faults), random=random.Random(1), counters=counters)
    return made, counters


def message(number: int) -> list[bytes]:
    return [b"topic", number.to_bytes(8, "big"), b"\x93payload"]


def test_a_lane_without_faults_changes_nothing() -> None:
    plain, counters = lane()
    assert [plain.push(message(i), 0.0) for i in range(5)] == [[message(i)] for i in range(5)]
    assert counters == {"live.forwarded": 5}


def test_a_lane_drops_and_duplicates() -> None:
    dropping, counters = lane(drop=0.5)
    passed = sum(len(dropping.push(message(i), 0.0)) for i in range(100))
    assert passed == counters["live.forwarded"] == 100 - counters["live.dropped"]
    assert 0 < passed < 100
    doubling, _ = lane(duplicate=1.0)
    assert doubling.push(message(1), 0.0) == [message(1), message(1)]
    counted, _ = lane()
    counted.drop_next(2)
    assert [len(counted.push(message(i), 0.0)) for i in range(3)] == [0, 0, 1]


def test_a_lane_reorders_without_losing() -> None:
    swapping, counters = lane(reorder=0.3)
    out = [m for i in range(200) for m in swapping.push(message(i), 0.0)] + swapping.flush()
    assert sorted(out) == [message(i) for i in range(200)]
    assert out != sorted(out)
    assert max(abs(out.index(message(i)) - i) for i in range(200)) <= 20
    assert counters["live.reordered"] > 30


def test_a_lane_delays_until_due_and_gives_up_what_is_lost() -> None:
    waiting, counters = lane(delay=1.0, max_delay=2.0)
    assert waiting.push(message(1), 10.0) == []
    assert waiting.deadline is not None
    assert 10.0 <= waiting.deadline <= 12.0
    assert waiting.due(9.9) == []
    assert waiting.due(12.0) == [message(1)]
    waiting.push(message(2), 12.0)
    waiting.lose()
    assert not waiting.flush()
    assert counters["live.dropped"] == 1


def test_a_lane_holds_a_bounded_number() -> None:
    counters: Counter[str] = Counter()
    small = Lane(
        "live", LaneFaults(delay=1.0), random=random.Random(1), counters=counters, max_held=3
    )
    passed = [m for i in range(10) for m in small.push(message(i), 0.0)]
    assert len(passed) == counters["live.overflowed"] == 7


def test_corrupted_messages_can_always_be_recognized() -> None:
    batch = encode_batch(EventBatch(1.0, [AllBlocksCleared()], 0))
    damaging, counters = lane(corrupt=1.0)
    for i in range(200):
        (frames,) = damaging.push([b"", i.to_bytes(8, "big"), batch], 0.0)
        with pytest.raises(ValueError, match=r"."):
            decode_batch(parse_live(frames).payload)
    assert counters["live.corrupted"] == 200
