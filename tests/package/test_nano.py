"""`examples/nano.py`, the mission in 300 lines, answers as kvindex does."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import EventBatch, Index, Rank
from kvindex.testing import FakeEngine, PagedCache, Workload
from kvindex.wire import encode_batch
from tests.captures import NAMES, live_payloads, truth
from tests.examples import examples
from tests.live import until

pytestmark = pytest.mark.property

PATH = Path(__file__).parents[2] / "examples" / "nano.py"
A = Rank("a")
# What it does not follow, and says so.
DROPPED = {
    "sglang-0.4.10": "labels that do not depend on the prefix",
    "sglang-0.5.5": "labels that do not depend on the prefix",
    "sglang-0.5.12-eagle": "more than their own token ids",
    "vllm-0.33.0-lookahead": "more than their own token ids",
    "vllm-0.33.0-hybrid": "several kinds of attention",
}


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("nano", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nano = loaded()


class Both:
    """The same events in nano and in kvindex."""

    def __init__(self) -> None:
        self.nano, self.index = nano.Nano(), Index()
        self.rank = self.nano.add("a")
        self.index.add(A)

    def apply(self, payload: bytes) -> None:
        self.rank.apply(nano.decode(payload)[1])
        self.index.apply(A, payload)

    def agree(self, tokens: Sequence[int], **keys: Any) -> int:
        held: int = self.nano.match(tokens, **keys)["a"]
        assert held == self.index.match(tokens, **keys)[A].tokens
        return held


def test_it_has_300_lines_and_two_imports_beside_pythons_own() -> None:
    text = PATH.read_text()
    assert len(text.splitlines()) <= 300
    assert set(re.findall(r"^import (\w+)", text, re.MULTILINE)) == {
        "json",
        "msgspec",
        "sys",
        "zmq",
    }


@pytest.mark.parametrize("name", NAMES)
def test_it_answers_each_recording_as_kvindex_does_or_says_why_not(name: str) -> None:
    both = Both()
    for payload in live_payloads(name):
        both.apply(payload)
    if name in DROPPED:
        assert DROPPED[name] in both.rank.fault
        assert both.nano.match([*range(99)]) == {"a": 0}
        return
    held = 0
    for probe in truth(name)["probes"]:
        lora = probe.get("lora") or probe.get("extra_key")
        held += both.agree(probe["tokens"][:-1], lora=lora, salt=probe.get("salt"))
    assert (held > 0) == (name != "sglang-0.5.6")


@examples(15)
@given(seed=st.integers(0, 2**32), cpu_blocks=st.sampled_from([0, 20]), clears=st.booleans())
def test_it_answers_random_histories_as_kvindex_does(
    seed: int, cpu_blocks: int, clears: bool
) -> None:
    both, cache = Both(), PagedCache(num_blocks=60, cpu_blocks=cpu_blocks)
    random_ = random.Random(seed)
    workload = Workload(60, seed=seed, max_tokens=300, resend=0.3, loras=("x",), salts=("s",))
    for request in workload:
        lora, salt = request.lora, request.salt
        both.agree(request.token_ids, lora=lora, salt=salt)
        cache.serve(request.token_ids, lora=lora, salt=salt)
        if clears and random_.random() < 0.05:
            cache.clear()
        both.apply(encode_batch(EventBatch(ts=0.0, events=cache.take_events())))
        both.agree(request.token_ids, lora=lora, salt=salt)


class Publisher:
    """An engine that restarts, and remembers its last 20 batches."""

    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        self.cache = PagedCache(num_blocks=60)
        self.batches: list[bytes] = []

    def publish(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        self.now += 1.0
        self.cache.serve(tokens)
        events = self.cache.take_events()
        self.batches.append(encode_batch(EventBatch(ts=self.now, events=events)))
        return len(self.batches) - 1, self.batches[-1]

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        if self.random.random() < 0.2:
            return  # no answer
        for number in range(max(first, len(self.batches) - 20), len(self.batches)):
            yield number, self.batches[number]


@examples(25)
@given(seed=st.integers(0, 2**32))
def test_lost_and_repeated_batches_and_restarts_leave_what_the_engine_holds_or_less(
    seed: int,
) -> None:
    random_ = random.Random(seed)
    publisher, instance = Publisher(random_), nano.Nano()
    stream = nano.Stream(instance.add("a"), publisher.replay)
    stream.join()
    whole = 0
    for request in Workload(80, seed=seed, max_tokens=300):
        if random_.random() < 0.05:
            publisher.restart()
        number, payload = publisher.publish(request.token_ids)
        if number and random_.random() < 0.2:
            continue  # lost on the way
        for _ in range(random_.choice([1, 1, 1, 2])):
            stream.accept(number, payload)
        index = Index()
        for batch in publisher.batches:
            index.apply(A, batch)
        held, true = (
            instance.match(request.token_ids)["a"],
            index.match(request.token_ids)[A].tokens,
        )
        assert held == true if stream.complete else held <= true
        whole += stream.complete
    assert whole > 0


def test_it_follows_a_publisher_through_a_gap_and_a_restart() -> None:
    tokens = [*range(160)]
    instance = nano.Nano()
    with FakeEngine("vllm-0", num_blocks=1_000_000) as engine:
        engine.serve(tokens[:80])
        rank = instance.add("vllm-0")
        subscription = nano.Subscription(rank, engine.endpoint, engine.replay_endpoint)
        with subscription.live:
            others = count(1000)

            def holds(expected: int) -> bool:
                engine.serve([next(others)] * 16)  # something that arrives
                subscription.receive()
                return bool(instance.match(tokens)["vllm-0"] == expected)

            until(lambda: holds(80))
            for number in range(2000, 12_000):  # far more than the next process sends unseen
                engine.serve([number] * 16)
            engine.serve(tokens)
            until(lambda: holds(160))
            engine.restart()
            engine.serve(tokens[:48])
            until(lambda: holds(48))
            assert subscription.stream.complete
