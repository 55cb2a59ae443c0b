"""Models with windows or Mamba only: vLLM's hash chain proves where sparse blocks belong."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from kvindex import BACKEND, BlockRemoved, BlockStored, Index
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.index.reference import keys as proofs
from tests.index.index_events import (
    CLEAR,
    SIZE,
    A,
    apply,
    counts_of,
    index_of,
    matched,
    prompt,
    restored,
)
from tests.index.index_stories import (
    Action,
    Scene,
    Story,
    answers,
    configured,
    counts,
    holds,
    stories,
    together,
    totals,
)

pytestmark = pytest.mark.unit

SEED = "vllm-none-hash"
WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2 * SIZE}


def chain(
    token_ids: Sequence[int],
    size: int = SIZE,
    salt: str | None = None,
    seed: str = SEED,
) -> list[bytes]:
    """The digests of a prompt's blocks, as vLLM 0.29 and later make them."""
    digests = []
    digest = sha256(pickle.dumps(seed, protocol=5)).digest()
    extra: Any = None if salt is None else (("cache_salt", salt),)
    for start in range(0, len(token_ids) - size + 1, size):
        block = (digest, tuple(token_ids[start : start + size]), extra)
        digest, extra = sha256(pickle.dumps(block, protocol=5)).digest(), None
        digests.append(digest)
    return digests


def label(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def sparse(
    token_ids: Sequence[int],
    *named: int,
    start: int = 0,
    size: int = SIZE,
    digests: Sequence[bytes] | None = None,
    raw: bool = False,
    **fields: Any,
) -> BlockStored:
    """Store a prompt's blocks from `start` on, of which these are named."""
    digests = chain(token_ids, size) if digests is None else digests
    names: list[Any] = list(digests) if raw else [label(digest) for digest in digests]
    return BlockStored(
        block_hashes=[names[block] for block in named],
        parent_block_hash=names[start - 1] if start else None,
        token_ids=list(token_ids[start * size :]),
        block_size=size,
        **{"group_idx": 0, **WINDOW, **fields},
    )


def labels(*blocks: int, of: int = 12) -> list[Any]:
    digests = chain(prompt(of))
    return [label(digests[block]) for block in blocks]


def gone(*blocks: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=labels(*blocks), group_idx=0)


def proven(proofs: int, missed: int = 0) -> Action:
    return counts(proofs=proofs, proofs_missed=missed)


def reaches(blocks: int, count: int) -> Action:
    """Check the blocks that are held of the prompt's first `count`."""
    return holds(blocks, prompt(count))


def other(number: int, blocks: int = 6, seed: str = "42") -> BlockStored:
    """Another prompt's last two blocks, by default under another engine's hashes."""
    token_ids = [number, *prompt(blocks)[1:]]
    return sparse(token_ids, 4, 5, digests=chain(token_ids, seed=seed))


LOW, WHOLE = answers(lower_bound=True), answers(lower_bound=False)
FULL: dict[str, Any] = {
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
}
MAMBA: dict[str, Any] = {"kv_cache_spec_kind": "mamba"}
LARGE: dict[str, Any] = {"token_ids": prompt(8), "block_size": 2 * SIZE}


def amid_others(raw: bool) -> Story:
    return Story(
        Scene(sparse(prompt(10), 6, 7, 9, raw=raw), proven(1), counts(stored=3)),
        Scene(reaches(0, 6), reaches(8, 8), reaches(8, 9), reaches(8, 10), WHOLE),
        depths(6, 7, 9),
    )


def from_unnamed(raw: bool) -> Story:
    return Story(
        Scene(sparse(prompt(6), raw=raw), sparse(prompt(7), start=6, raw=raw)),  # name none
        sparse(prompt(10), 8, 9, start=7, raw=raw),
        sparse(prompt(12), 10, 11, start=10, raw=raw),
        Scene(reaches(12, 12), reaches(10, 10), reaches(0, 8), proven(2), WHOLE),
    )


def depths(*blocks: int) -> Action:
    def check(index: BaseIndex) -> None:
        assert sorted(block.depth for block in index.tree(A).walk()) == list(blocks)

    return check


PROVEN = {
    "blocks that an event names amid others are placed": amid_others(raw=False),
    "blocks named by whole digests amid others are placed": amid_others(raw=True),
    "a state counts at its own block only": Story(
        sparse(prompt(10), 3, 9, **MAMBA),
        Scene(reaches(0, 3), reaches(4, 4), reaches(4, 9), reaches(10, 10)),
    ),
    "a chain goes on from blocks that nobody named": from_unnamed(raw=False),
    "a chain of whole digests goes on from blocks that nobody named": from_unnamed(raw=True),
    "whole events and sparse ones continue each other": Story(
        Scene(sparse(prompt(2), 0, 1), sparse(prompt(5), start=2)),
        Scene(sparse(prompt(7), 5, 6, start=5), reaches(2, 2), reaches(2, 5), reaches(7, 7)),
    ),
    "a chain goes on from a parent that was evicted": Story(
        Scene(sparse(prompt(8), 6, 7), gone(6, 7), sparse(prompt(12), 10, 11, start=8)),
        Scene(reaches(12, 12), reaches(0, 8)),
    ),
    "copies and removals of proven blocks count": Story(
        Scene(sparse(prompt(6), 4, 5), sparse(prompt(6), 4, 5), gone(4, 5)),
        Scene(reaches(6, 6), counts(duplicates=2), gone(4, 5), reaches(0, 6), totals(blocks=0)),
    ),
    "a salt that no named block shows leaves answers lower bounds": Story(
        sparse(prompt(4), 2, 3, digests=chain(prompt(4), salt="tenant")),
        Scene(proven(0, 1), reaches(0, 4), LOW),
    ),
    "one wrong label leaves all of an event unproven": Story(
        msgspec.structs.replace(
            sparse(prompt(6), 3, 4, 5), block_hashes=[*labels(3), 1, *labels(5)]
        ),
        Scene(proven(0, 1), counts(unplaced=3), totals(blocks=0)),
    ),
    "labels out of order leave all of an event unproven": Story(
        sparse(prompt(6), 5, 4), proven(0, 1)
    ),
    "an engine with other hashes is given up after a few events": Story(
        Scene(*map(other, range(20)), proven(0, 8), counts(unplaced=40), LOW),
        Scene(sparse(prompt(6), 4, 5), proven(0, 8), reaches(0, 6)),
    ),
    "misses after a proof do not end the proofs": Story(
        Scene(sparse(prompt(6), 4, 5), *(other(n, seed=SEED) for n in range(20))),
        Scene(*[other(7777)] * 10, other(8888, seed=SEED), proven(22, 10)),
    ),
    "blocks that waited are placed by a later proof": Story(
        sparse(prompt(6), 4, 5, start=2),  # its parent was never stored
        Scene(counts(unplaced=2), proven(0), LOW),
        Scene(sparse(prompt(6), 4, 5), reaches(6, 6), WHOLE),
        Scene(gone(4, 5), reaches(6, 6)),  # both copies count
    ),
    "larger blocks of another group are labelled by the unit at their end": Story(
        together(
            sparse(prompt(8), 6, 7),
            BlockStored(block_hashes=labels(7), group_idx=1, **MAMBA, **LARGE),
        ),
        Scene(proven(2), answers(prompt(8), tokens=8 * SIZE)),
    ),
    "groups of full attention need no proof": Story(
        Scene(sparse(prompt(4), 0, 1, 2, 3, **FULL), sparse(prompt(4), 2, 3, group_idx=1)),
        Scene(proven(0), reaches(4, 4)),
    ),
    "announcements in report mode full are not taken for copies": Story(
        Scene(configured(report_mode="full"), sparse(prompt(4), 2, 3)),
        Scene(proven(0), counts(unplaced=2)),
    ),
    "a clear forgets the chains": Story(
        Scene(sparse(prompt(4), 2, 3), CLEAR, sparse(prompt(6), 4, 5, start=4)),
        Scene(proven(1), reaches(0, 6), LOW, sparse(prompt(6), 4, 5), reaches(6, 6)),
    ),
}


@stories(PROVEN, restarts=False)  # chains are no part of a snapshot
def test_the_hash_chain_proves_where_blocks_belong(story: Story, way: str) -> None:
    story.run(way)


EDGES = [0, 255, 256, 65_535, 65_536, 2**31 - 1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 300, 5000])
def test_each_length_of_a_tokens_pickle_is_hashed_as_python_does(size: int) -> None:
    token_ids = [(EDGES * (size // 2 + 1))[i % 6 + i // 6 % 2] for i in range(4 * size)]
    index = index_of(sparse(token_ids, 3, size=size, **MAMBA))
    proven(1)(index)
    assert matched(index, token_ids) == 4


@pytest.mark.parametrize("salt", ["", "s", "tenant-0", "ä" * 16, "x" * 31, "x" * 32, "x" * 255])
def test_salted_prompts_are_proven_where_the_first_block_is_named(salt: str) -> None:
    digests = chain(prompt(4), salt=salt)
    index = index_of(sparse(prompt(4), 0, 2, 3, digests=digests, extra_keys=[(salt,), None, None]))
    proven(1)(index)
    if salt:
        assert (matched(index, prompt(4), salt=salt), matched(index, prompt(4))) == (4, 0)
        assert counts_of(index)["salted"] == 3
    apply(index, A, sparse(prompt(6), 4, 5, start=4, digests=chain(prompt(6), salt=salt)))
    proven(2)(index)


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_name": "sql"},
        {"lora_id": 3},
        {"extra_keys": [None, ("image", 3)]},
        {"extra_keys": [(("image", 3),), None]},
        {"extra_keys": [("x" * 256,), None]},
        {"extra_keys": [("one", "two"), None]},
        {"cache_salt": "tenant"},
        {"token_ids": [2**31, *prompt(4)[1:]]},
    ],
)
def test_what_the_hashes_of_is_not_known_is_not_tried(fields: dict[str, Any]) -> None:
    index = index_of(msgspec.structs.replace(sparse(prompt(4), 2, 3), **fields))
    counts(proofs=0, proofs_missed=0, unplaced=2)(index)


@pytest.mark.skipif(BACKEND != "native", reason="the Python index has no snapshots")
def test_a_restored_rank_proves_again_from_the_root_on() -> None:
    again = restored(index_of(sparse(prompt(4), 2, 3)))
    steps = Scene(
        Scene(reaches(4, 4), WHOLE),
        Scene(sparse(prompt(7), start=4), sparse(prompt(9), 7, 8, start=7), reaches(4, 9), LOW),
        Scene(sparse(prompt(9), 7, 8), reaches(9, 9), WHOLE),
    )
    steps.go_on(again)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_proven_blocks_beyond_a_limit_are_left_out(limit: int) -> None:
    index = index_of(sparse(prompt(12), 3, 4, 8, 11), max_blocks_per_rank=limit)
    assert len(index) == limit
    ignored = {"max_blocks_per_rank": 4 - limit} if limit < 4 else {}
    assert counts_of(index)["ignored"] == ignored


def test_only_so_many_steps_of_chains_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_MAX_STEPS", 10)
    kept = proofs.Proofs()
    for block in range(20):
        event = sparse(prompt(block + 1), start=block)
        steps = kept.chain(event, SIZE)
        assert steps is not None, "the newest step is there"
        kept.keep(steps, SIZE)
    assert kept.chain(sparse(prompt(12), start=11), SIZE) is not None
    assert kept.chain(sparse(prompt(11), start=10), SIZE) is None


def test_going_back_over_unnamed_steps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many stores of one block each, far from what is resident, must not cost much each."""
    monkeypatch.setattr(proofs, "_LOOKS", 100)
    index = reference.Index()
    apply(index, A, sparse(prompt(60)))
    (last,) = labels(60, of=61)
    for _ in range(50):
        apply(index, A, sparse(prompt(61), 60, start=60))
        apply(index, A, BlockRemoved(block_hashes=[last], group_idx=0))
    assert counts_of(index)["orphaned"] > 25, "stores beyond that are not placed"
    assert counts_of(index)["stored"] >= 1


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_are_placed_as_the_prompts_say(seed: int) -> None:
    choices = random.Random(seed)
    index = Index()
    held: Counter[bytes] = Counter()
    depths: dict[bytes, int] = {}
    known: set[tuple[int, ...]] = {()}
    for _ in range(60):
        before = choices.choice(sorted(known))
        blocks = [choices.randrange(3) for _ in range(choices.randrange(1, 6))]
        numbers = (*before, *blocks)
        token_ids = [number * 100 + i for number in numbers for i in range(SIZE)]
        digests = chain(token_ids)
        if held and choices.random() < 0.4:
            digest = choices.choice(sorted(held))
            held[digest] -= 1
            held += Counter()
            apply(index, A, BlockRemoved(block_hashes=[label(digest)], group_idx=0))
            continue
        named = [n for n in range(len(before), len(numbers)) if choices.random() < 0.4]
        apply(index, A, sparse(token_ids, *named, start=len(before)))
        held.update(digests[n] for n in named)
        depths.update({digest: depth for depth, digest in enumerate(digests)})
        known.update(numbers[:n] for n in range(len(before), len(numbers) + 1))
    placed = {(b.block_hash, b.depth): b.copies for b in index.tree(A).walk()}
    assert placed == {(label(d), depths[d]): count for d, count in held.items()}
    assert counts_of(index)["proofs_missed"] == 0
    assert not index.match(prompt(2))[A].lower_bound
