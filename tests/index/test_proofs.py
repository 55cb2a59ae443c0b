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

from kvindex import BACKEND, BlockRemoved, BlockStored, CacheSettings, EventBatch, Index
from kvindex.index import reference
from kvindex.index.api import BaseIndex
from kvindex.index.reference import proofs
from kvindex.wire import AllBlocksCleared
from tests.index.index_events import SIZE, A, apply, counts_of, index_of, matched, prompt, restored

pytestmark = pytest.mark.unit

WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2 * SIZE}


def chain(
    token_ids: Sequence[int],
    size: int = SIZE,
    salt: str | None = None,
    seed: str = "vllm-none-hash",
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


def proofs_of(index: BaseIndex) -> tuple[int, int]:
    return counts_of(index)["proofs"], counts_of(index)["proofs_missed"]


def lower_bound(index: BaseIndex, token_ids: Sequence[int]) -> bool:
    return index.match(list(token_ids))[A].lower_bound


@pytest.mark.parametrize("raw", [False, True])
def test_blocks_that_an_event_names_amid_others_are_placed(raw: bool) -> None:
    index = index_of(sparse(prompt(10), 6, 7, 9, raw=raw))
    assert [matched(index, prompt(n)) for n in (6, 8, 9, 10)] == [0, 8, 8, 8]
    assert not lower_bound(index, prompt(10))
    assert proofs_of(index) == (1, 0)
    assert counts_of(index)["stored"] == 3
    assert {block.depth for block in index.tree(A).walk()} == {6, 7, 9}


def test_a_state_counts_at_its_own_block_only() -> None:
    index = index_of(sparse(prompt(10), 3, 9, kv_cache_spec_kind="mamba"))
    assert [matched(index, prompt(n)) for n in (3, 4, 9, 10)] == [0, 4, 4, 10]


@pytest.mark.parametrize("raw", [False, True])
def test_a_chain_goes_on_from_blocks_that_nobody_named(raw: bool) -> None:
    index = index_of(
        sparse(prompt(6), raw=raw),  # names none
        sparse(prompt(7), start=6, raw=raw),
        sparse(prompt(10), 8, 9, start=7, raw=raw),
        sparse(prompt(12), 10, 11, start=10, raw=raw),
    )
    assert (matched(index, prompt(12)), matched(index, prompt(10))) == (12, 10)
    assert matched(index, prompt(8)) == 0
    assert proofs_of(index) == (2, 0)
    assert not lower_bound(index, prompt(12))


def test_whole_events_and_sparse_ones_continue_each_other() -> None:
    index = index_of(
        sparse(prompt(2), 0, 1),
        sparse(prompt(5), start=2),
        sparse(prompt(7), 5, 6, start=5),
    )
    assert [matched(index, prompt(n)) for n in (2, 5, 7)] == [2, 2, 7]


def test_a_chain_goes_on_from_a_parent_that_was_evicted() -> None:
    digests: list[Any] = [label(digest) for digest in chain(prompt(12))]
    index = index_of(
        sparse(prompt(8), 6, 7),
        BlockRemoved(block_hashes=digests[6:8], group_idx=0),
        sparse(prompt(12), 10, 11, start=8),
    )
    assert (matched(index, prompt(12)), matched(index, prompt(8))) == (12, 0)


def test_copies_and_removals_of_proven_blocks_count() -> None:
    digests: list[Any] = [label(digest) for digest in chain(prompt(6))]
    removal = BlockRemoved(block_hashes=digests[4:6], group_idx=0)
    index = index_of(sparse(prompt(6), 4, 5), sparse(prompt(6), 4, 5), removal)
    assert (matched(index, prompt(6)), counts_of(index)["duplicates"]) == (6, 2)
    apply(index, A, removal)
    assert (matched(index, prompt(6)), len(index)) == (0, 0)


EDGES = [0, 255, 256, 65_535, 65_536, 2**31 - 1]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 300, 5000])
def test_each_length_of_a_tokens_pickle_is_hashed_as_python_does(size: int) -> None:
    token_ids = [(EDGES * (size // 2 + 1))[i % 6 + i // 6 % 2] for i in range(4 * size)]
    index = index_of(sparse(token_ids, 3, size=size, kv_cache_spec_kind="mamba"))
    assert (proofs_of(index), matched(index, token_ids)) == ((1, 0), 4)


@pytest.mark.parametrize("salt", ["", "s", "tenant-0", "ä" * 16, "x" * 31, "x" * 32, "x" * 255])
def test_salted_prompts_are_proven_where_the_first_block_is_named(salt: str) -> None:
    digests = chain(prompt(4), salt=salt)
    index = index_of(sparse(prompt(4), 0, 2, 3, digests=digests, extra_keys=[(salt,), None, None]))
    assert proofs_of(index) == (1, 0)
    if salt:
        assert (matched(index, prompt(4), salt=salt), matched(index, prompt(4))) == (4, 0)
        assert counts_of(index)["salted"] == 3
    apply(index, A, sparse(prompt(6), 4, 5, start=4, digests=chain(prompt(6), salt=salt)))
    assert proofs_of(index) == (2, 0)


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
    assert proofs_of(index) == (0, 0)
    assert counts_of(index)["unplaced"] == 2


def test_a_salt_that_no_named_block_shows_leaves_answers_lower_bounds() -> None:
    index = index_of(sparse(prompt(4), 2, 3, digests=chain(prompt(4), salt="tenant")))
    assert (proofs_of(index), matched(index, prompt(4))) == ((0, 1), 0)
    assert lower_bound(index, prompt(4))


def test_one_wrong_label_leaves_all_of_an_event_unproven() -> None:
    event = sparse(prompt(6), 3, 4, 5)
    hashes = [event.block_hashes[0], 1, event.block_hashes[2]]
    index = index_of(msgspec.structs.replace(event, block_hashes=hashes))
    assert (proofs_of(index), counts_of(index)["unplaced"], len(index)) == ((0, 1), 3, 0)
    out_of_order = sparse(prompt(6), 5, 4)
    assert proofs_of(index_of(out_of_order)) == (0, 1)


def test_an_engine_with_other_hashes_is_given_up_after_a_few_events() -> None:
    def other(number: int) -> BlockStored:
        token_ids = [number, *prompt(6)[1:]]
        return sparse(token_ids, 4, 5, digests=chain(token_ids, seed="42"))

    index = index_of(*map(other, range(20)))
    assert proofs_of(index) == (0, 8)
    assert counts_of(index)["unplaced"] == 40
    assert lower_bound(index, prompt(6))
    apply(index, A, sparse(prompt(6), 4, 5))
    assert (proofs_of(index), matched(index, prompt(6))) == ((0, 8), 0)


def test_misses_after_a_proof_do_not_end_the_proofs() -> None:
    index = index_of(sparse(prompt(6), 4, 5))
    for number in range(20):
        apply(index, A, sparse([number, *prompt(6)[1:]], 4, 5))
    token_ids = [7777, *prompt(6)[1:]]
    for _ in range(10):
        apply(index, A, sparse(token_ids, 4, 5, digests=chain(token_ids, seed="42")))
    apply(index, A, sparse([8888, *prompt(6)[1:]], 4, 5))
    assert proofs_of(index) == (22, 10)


def test_blocks_that_waited_are_placed_by_a_later_proof() -> None:
    digests = chain(prompt(6))
    unknown = sparse(prompt(6), 4, 5, start=2)  # its parent was never stored
    index = index_of(unknown)
    assert (counts_of(index)["unplaced"], proofs_of(index)) == (2, (0, 0))
    assert lower_bound(index, prompt(6))
    apply(index, A, sparse(prompt(6), 4, 5))
    assert matched(index, prompt(6)) == 6
    assert not lower_bound(index, prompt(6))
    removal = BlockRemoved(block_hashes=[label(digest) for digest in digests[4:]], group_idx=0)
    apply(index, A, removal)
    assert matched(index, prompt(6)) == 6, "both copies count"


def test_larger_blocks_of_another_group_are_labelled_by_the_unit_at_their_end() -> None:
    small = sparse(prompt(8), 6, 7)
    units = [label(digest) for digest in chain(prompt(8))]
    large = BlockStored(
        block_hashes=[units[7]],
        parent_block_hash=None,
        token_ids=prompt(8),
        block_size=2 * SIZE,
        group_idx=1,
        kv_cache_spec_kind="mamba",
    )
    index = Index()
    index.apply(A, EventBatch(0.0, [small, large]))
    index.check()
    assert (proofs_of(index), matched(index, prompt(8)) > 0) == ((2, 0), True)
    assert index.match(prompt(8))[A].tokens == 8 * SIZE


def test_groups_of_full_attention_need_no_proof() -> None:
    index = index_of(
        sparse(
            prompt(4),
            0,
            1,
            2,
            3,
            kv_cache_spec_kind="full_attention",
            kv_cache_spec_sliding_window=None,
        )
    )
    apply(index, A, sparse(prompt(4), 2, 3, group_idx=1))
    assert (proofs_of(index), matched(index, prompt(4))) == ((0, 0), 4)


def test_announcements_in_report_mode_full_are_not_taken_for_copies() -> None:
    index = Index()
    index.configure(A, CacheSettings(report_mode="full"))
    apply(index, A, sparse(prompt(4), 2, 3))
    assert (proofs_of(index), counts_of(index)["unplaced"]) == ((0, 0), 2)


def test_a_clear_forgets_the_chains() -> None:
    index = index_of(
        sparse(prompt(4), 2, 3),
        AllBlocksCleared(),
        sparse(prompt(6), 4, 5, start=4),
    )
    assert (proofs_of(index), matched(index, prompt(6))) == ((1, 0), 0)
    assert lower_bound(index, prompt(6))
    apply(index, A, sparse(prompt(6), 4, 5))
    assert matched(index, prompt(6)) == 6


@pytest.mark.skipif(BACKEND != "native", reason="the Python index has no snapshots")
def test_a_restored_rank_proves_again_from_the_root_on() -> None:
    again = restored(index_of(sparse(prompt(4), 2, 3)))
    assert (matched(again, prompt(4)), lower_bound(again, prompt(4))) == (4, False)
    apply(again, A, sparse(prompt(7), start=4), sparse(prompt(9), 7, 8, start=7))
    assert (matched(again, prompt(9)), lower_bound(again, prompt(9))) == (4, True)
    apply(again, A, sparse(prompt(9), 7, 8))
    assert (matched(again, prompt(9)), lower_bound(again, prompt(9))) == (9, False)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_proven_blocks_beyond_a_limit_are_left_out(limit: int) -> None:
    index = index_of(sparse(prompt(12), 3, 4, 8, 11), max_blocks_per_rank=limit)
    assert len(index) == limit
    assert counts_of(index)["ignored"] == ({"max_blocks_per_rank": 4 - limit} if limit < 4 else {})


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
    last = label(chain(prompt(61))[60])
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
    found = {(b.block_hash, b.depth): b.copies for b in index.tree(A).walk()}
    assert found == {(label(d), depths[d]): count for d, count in held.items()}
    assert counts_of(index)["proofs_missed"] == 0
    assert not index.match(prompt(2))[A].lower_bound
