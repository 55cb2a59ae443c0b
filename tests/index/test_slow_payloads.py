"""A search for payloads that cost more than others of their length: time per byte, not crashes.

Each example is a story of a few payloads, built in two sizes. Some are given; of the others,
Hypothesis learns how much the time grows from one size to the other and how long a byte takes, and
looks for more of both. With HYPOTHESIS_PROFILE=nightly it looks for long and at larger sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import currently_in_test_context, given, target
from hypothesis import strategies as st

import kvindex
from kvindex import DecodeError, Index, Rank
from kvindex.index import read_batch
from tests.examples import NIGHTLY, examples

pytestmark = pytest.mark.property

SMALL = 4_000 if NIGHTLY else 500  # blocks, or other things, of a payload
TIMES = 8  # as many in the large one
ROUNDS = 10  # other processes lengthen some measurements; what is slow is so in each
RANK = Rank("hostile")

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


Build = Callable[[int], list[Any]]  # makes events of so many blocks


def stored(hashes: list[Any], parent: Any, ids: list[Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": 1,
        **fields,
    }


def chain(labels: list[Any], parent: int | None = None, **fields: Any) -> dict[str, Any]:
    return stored(labels, parent, [number & 127 for number in range(len(labels))], **fields)


def removed(labels: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": labels, **fields}


@st.composite
def chains(draw: st.DrawFn) -> Build:
    """One event of n blocks."""
    names, ids, parent, medium = draw(labels), draw(tokens), draw(parents), draw(media)
    extra = draw(st.sampled_from([None, None, lambda n: [["x", number] for number in range(n)]]))
    return lambda n: [
        stored(
            names(n), parent, ids(n), medium=medium, **({"extra_keys": extra(n)} if extra else {})
        )
    ]


@st.composite
def single_blocks(draw: st.DrawFn) -> Build:
    """Events of n blocks, one each: side by side, or each after the one before it."""
    names, ids, parent, medium = draw(labels), draw(tokens), draw(parents), draw(media)
    spread = draw(st.sampled_from(["", "media", "loras", "chained"]))

    def build(n: int) -> list[Any]:
        before = [parent, *names(n)]
        events = []
        for number, (label, token) in enumerate(zip(names(n), ids(n), strict=True)):
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
def removals(draw: st.DrawFn) -> Build:
    names, medium, together = draw(labels), draw(media), draw(st.booleans())
    if together:
        return lambda n: [removed(names(n), medium=medium)]
    return lambda n: [removed([label], medium=medium) for label in names(n)]


@st.composite
def relocations(draw: st.DrawFn) -> Build:
    names, medium = draw(labels), draw(media)
    return lambda n: [stored(names(n), None, [], medium=medium)]


def again_and_again(build: Build) -> Build:
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


def payloads(story: list[Build], size: int) -> list[bytes]:
    return [msgspec.msgpack.encode([1.0, build(size), None]) for build in story]


def seconds(sent: list[bytes], attempts: int) -> float:
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
    payload = msgspec.msgpack.encode([1.0, [chain(list(range(1, SMALL * TIMES + 1)))], None])
    return seconds([payload], 5) / len(payload)


def assert_cost_grows_as_length(story: list[Build]) -> None:
    few, many = payloads(story, SMALL), payloads(story, SMALL * TIMES)
    length = sum(map(len, many))
    short, long = seconds(few, 1), seconds(many, 1)
    if currently_in_test_context():  # Hypothesis is searching
        target(long / length / usual_byte(), label="time of a byte, in ordinary bytes")
        target(long / max(short, 1e-4), label="growth")
    for _ in range(ROUNDS):
        grows = long > 4 * TIMES * short + 0.01  # what is quadratic takes TIMES² as long
        if not grows and long < 200 * usual_byte() * length + 0.01:
            return
        short, long = seconds(few, 3), seconds(many, 3)
    raise AssertionError(f"{long / max(short, 1e-9):.0f} × for {TIMES} ×")


@pytest.mark.skipif(
    kvindex.BACKEND == "python",
    reason="a cut in a run of the Python tree costs the smaller half of it",
)
@examples(25, nightly=3_000)
@given(stories)
def test_no_payload_takes_much_longer_than_others_of_its_length(story: list[Build]) -> None:
    assert_cost_grows_as_length(story)


AT_CPU = chain([7], medium="CPU")
PATTERNS: dict[str, Build] = {
    "stored again after a parent": lambda n: [chain([5]), chain([7] * n, 5), chain([7] * n, 5)],
    "removed elsewhere": lambda n: [
        chain([7] * n), chain([9], medium="CPU"), removed([7] * n, medium="CPU"),
    ],
    "few elsewhere, removed again and again": lambda n: [
        chain([7] * n), *[AT_CPU, removed([7], medium="CPU")] * (n // 8),
    ],
    "on two media, removed on each": lambda n: [
        chain([7] * n), chain([7] * n, medium="CPU"), removed([7]), removed([7], medium="CPU"),
    ],
    "labels of their own, removed first": lambda n: [
        chain([7] * n), chain(list(range(10, 10 + n))), removed(list(range(9 + n, 9, -1))),
    ],
    "many labels of one block": lambda n: [
        *[chain([number + 1]) for number in range(n)], ["AllBlocksCleared"],
    ],
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_cost_of_a_label_grows_as_its_blocks_do(pattern: str) -> None:
    assert_cost_grows_as_length([PATTERNS[pattern]])
