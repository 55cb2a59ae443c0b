"""A search for payloads that cost more than others of their length: time per byte, not crashes.

Each example is a story of a few payloads, built in two sizes. Hypothesis is told how much the time
grows from one size to the other and how long a byte takes, and looks for more of both. With
HYPOTHESIS_PROFILE=nightly it looks for long and at larger sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

import kvindex
from kvindex import DecodeError, Index, Rank
from kvindex.index import read_batch
from tests.examples import NIGHTLY, examples

pytestmark = [
    pytest.mark.property,
    pytest.mark.skipif(
        kvindex.BACKEND == "python",
        reason="a cut in a run of the Python tree costs the smaller half of it",
    ),
]

SMALL = 4_000 if NIGHTLY else 500  # blocks, or other things, of a payload
TIMES = 8  # as many in the large one
ROUNDS = 10  # other processes lengthen some measurements; what is slow is so in each
RANK = Rank("hostile")
Payload = bytes
Labels = Callable[[int], list[Any]]

labels = st.sampled_from(
    [
        lambda n: [7] * n,
        lambda n: list(range(1, n + 1)),
        lambda n: list(range(n, 0, -1)),
        lambda n: [1 + number // 2 for number in range(n)],
        lambda n: [1 + number % 50 for number in range(n)],
        lambda n: [1 + number * 7919 % n for number in range(n)],
        lambda n: [number.to_bytes(4, "big") for number in range(n)],
    ]
)
tokens = st.sampled_from(
    [
        lambda n: [5] * n,
        lambda n: [number & 127 for number in range(n)],
        lambda n: list(range(n)),
        lambda n: [str(number) for number in range(n)],
        lambda n: [[number, number + 1] for number in range(n)],
    ]
)
parents = st.sampled_from([None, None, 7, 1, 999_999_999])
media = st.sampled_from(["GPU", "GPU", "CPU", "DISK"])


def stored(hashes: list[Any], parent: Any, ids: list[Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": 1,
        **fields,
    }


@st.composite
def chains(draw: st.DrawFn) -> Callable[[int], list[Any]]:
    """One event of n blocks."""
    some, ids, parent, medium = draw(labels), draw(tokens), draw(parents), draw(media)
    extra = draw(st.sampled_from([None, None, lambda n: [["x", number] for number in range(n)]]))
    return lambda n: [
        stored(
            some(n), parent, ids(n), medium=medium, **({"extra_keys": extra(n)} if extra else {})
        )
    ]


@st.composite
def single_blocks(draw: st.DrawFn) -> Callable[[int], list[Any]]:
    """Events of n blocks, one each: side by side, or each after the one before it."""
    some, ids, parent, medium = draw(labels), draw(tokens), draw(parents), draw(media)
    spread = draw(st.sampled_from(["", "media", "loras", "chained"]))

    def build(n: int) -> list[Any]:
        before = [parent, *some(n)]
        events = []
        for number, (label, token) in enumerate(zip(some(n), ids(n), strict=True)):
            fields: dict[str, Any] = {"medium": medium}
            if spread == "media":
                fields["medium"] = f"m{number % 60}"
            if spread == "loras":
                fields["lora_name"] = f"l{number}"
            after = before[number] if spread == "chained" else parent
            events.append(stored([label], after, [token], **fields))
        return events

    return build


@st.composite
def removals(draw: st.DrawFn) -> Callable[[int], list[Any]]:
    some, medium, together = draw(labels), draw(media), draw(st.booleans())
    if together:
        return lambda n: [{"type": "BlockRemoved", "block_hashes": some(n), "medium": medium}]
    return lambda n: [
        {"type": "BlockRemoved", "block_hashes": [label], "medium": medium} for label in some(n)
    ]


@st.composite
def relocations(draw: st.DrawFn) -> Callable[[int], list[Any]]:
    some, medium = draw(labels), draw(media)
    return lambda n: [stored(some(n), None, [], medium=medium)]


def again_and_again(build: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    """The same few blocks, as often as others tell of many."""
    return lambda n: build(8) * (n // 8)


junk = st.sampled_from(
    [
        lambda n: [[]] * n,
        lambda n: [["later"]] * n,
        lambda n: [["AllBlocksCleared"]] * n,
        lambda n: [["AllBlocksCleared"]],
        lambda n: [["BlockRemoved", [], "GPU", None, [[]] * n]],
    ]
)
some_events = st.one_of(chains(), single_blocks(), removals(), relocations())
moves = st.one_of(some_events, some_events, some_events.map(again_and_again), junk)
stories = st.lists(moves, min_size=1, max_size=5)


def payloads(story: list[Callable[[int], list[Any]]], size: int) -> list[Payload]:
    return [msgspec.msgpack.encode([1.0, build(size), None]) for build in story]


def seconds(sent: list[Payload], attempts: int) -> float:
    """CPU time of reading and applying these in turn, and of forgetting them: the least."""
    times = []
    for _ in range(attempts):
        index = Index(seed=1)
        index.add(RANK)
        started = time.thread_time()
        for payload in sent:
            try:
                batch = read_batch(payload)
            except DecodeError:
                continue
            index.apply(RANK, batch)
        index.remove(RANK)
        times.append(time.thread_time() - started)
    return min(times)


@cache
def usual_byte() -> float:
    """Seconds that a byte of an ordinary payload takes: blocks of one token, one after another."""
    size = SMALL * TIMES
    chain = stored(list(range(1, size + 1)), None, [number & 127 for number in range(size)])
    payload = msgspec.msgpack.encode([1.0, [chain], None])
    return seconds([payload], 5) / len(payload)


@examples(25, nightly=3_000)
@given(stories)
def test_no_payload_takes_much_longer_than_others_of_its_length(
    story: list[Callable[[int], list[Any]]],
) -> None:
    few, many = payloads(story, SMALL), payloads(story, SMALL * TIMES)
    length = sum(map(len, many))
    short, long = seconds(few, 1), seconds(many, 1)
    target(long / length / usual_byte(), label="time of a byte, in ordinary bytes")
    target(long / max(short, 1e-4), label="growth")
    for _ in range(ROUNDS):
        if not too_slow(short, long, length):
            return
        short, long = seconds(few, 3), seconds(many, 3)
    raise AssertionError(f"{long / max(short, 1e-9):.0f} × for {TIMES} ×")


def too_slow(short: float, long: float, length: int) -> bool:
    """Whether the time grows by far more than the size, or a byte takes very long."""
    grows = long > 4 * TIMES * short + 0.01  # what is quadratic takes TIMES² as long
    return grows or long > 200 * usual_byte() * length + 0.01
