"""What `Index`, `Match` and `TreeView` answer and refuse, apart from the events' meaning."""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import pytest

from kvindex import EventBatch, GroupSpec, Index, Rank, RankMatch, State
from kvindex.index import Trust, reference
from kvindex.index.api import BaseIndex
from kvindex.wire import CacheSettings, encode_batch
from kvindex.wire.errors import (
    ConfigurationError,
    DecodeError,
    InvariantError,
    TokenError,
    UnknownRankError,
)
from tests.index.index_events import (
    SIZE,
    A,
    B,
    apply,
    index_of,
    located,
    matched,
    prompt,
    removed,
    restored,
    stored,
    tokens,
    told,
)

pytestmark = pytest.mark.unit

C = Rank("c", 3)


def three_ranks() -> Index:
    """A holds 2 blocks, B holds 3 and C nothing of the prompt."""
    index = index_of(stored(0, 1))
    apply(index, B, stored(0, 1, 2))
    apply(index, C, stored(7, parent=None))
    return index


# Match


def test_best_holds_most_tokens() -> None:
    best = three_ranks().match(prompt(9)).best
    assert best is not None
    assert (best.rank, best.blocks, best.tokens, best.block_size) == (B, 3, 3 * SIZE, SIZE)


def test_best_is_none_when_nobody_holds_anything() -> None:
    index = three_ranks()
    assert index.match(tokens(30)).best is None
    assert index.match([]).best is None
    assert Index().match(prompt(2)).best is None


def test_equals_are_ordered_by_rank() -> None:
    index = Index()
    for rank in (C, B, Rank("c", 1), A):
        apply(index, rank, stored(0))
    match = index.match(prompt(1))
    assert [found.rank for found in match] == [A, B, Rank("c", 1), C]
    assert match.best is not None
    assert match.best.rank == A


def test_iteration_is_longest_first_and_includes_ranks_that_hold_nothing() -> None:
    match = three_ranks().match(prompt(9))
    assert [(found.rank, found.blocks) for found in match] == [(B, 3), (A, 2), (C, 0)]
    assert len(match) == 3


def test_a_rank_is_found_by_name_or_refused() -> None:
    match = three_ranks().match(prompt(9))
    assert match[("b", 0)].blocks == 3  # type: ignore[index]
    assert (match[C].blocks, match[C].tokens, match[C].by_medium) == (0, 0, {})
    assert C in match
    assert Rank("d") not in match
    with pytest.raises(KeyError, match=r"d/0 is not known; known: a/0, b/0, c/3"):
        match[Rank("d")]


def test_to_dict_is_ready_for_json() -> None:
    plain = json.loads(json.dumps(three_ranks().match(prompt(9)).to_dict()))
    assert list(plain) == ["b/0", "a/0", "c/3"]
    assert plain["b/0"]["worker"] == "b"
    assert plain["b/0"]["dp_rank"] == 0
    assert plain["b/0"]["blocks"] == 3
    assert plain["b/0"]["by_medium"] == {"GPU": 3}


def test_live_ranks_come_before_stale_ones_that_hold_more() -> None:
    trust = {A: Trust(State.LIVE, True, 0), B: Trust(State.STALE, False, 7)}
    match = three_ranks().match(prompt(9), trust=trust)
    assert match.best is not None
    assert match.best.rank == A
    assert (match[B].state, match[B].complete, match[B].lag) == ("stale", False, 7)
    assert match[C].state is None
    assert [found.rank for found in match] == [B, A, C], "iteration stays longest first"


def test_a_dead_rank_is_not_best_while_a_live_one_that_holds_nothing_could_be_chosen() -> None:
    states = {A: State.CONNECTING, B: State.CONNECTING, C: State.LIVE}
    match = three_ranks().match(prompt(9), trust=lambda rank: Trust(states[rank], True, 0))
    assert match.best is None
    assert match.top(3) == []
    assert match, "somebody holds something"
    assert next(iter(match)).rank == B, "whoever asks for it by iterating sees what the dead hold"


def test_a_stale_rank_is_best_when_no_rank_is_live() -> None:
    match = three_ranks().match(prompt(9), trust=lambda _: Trust(State.STALE, True, 0))
    assert match.best is not None
    assert (match.best.rank, match.best.state) == (B, "stale")
    assert match


def test_only_the_ranks_that_were_asked_for_keep_others_from_being_best() -> None:
    states = {A: State.CONNECTING, B: State.CONNECTING, C: State.LIVE}
    trust = {rank: Trust(state, True, 0) for rank, state in states.items()}
    best = three_ranks().match(prompt(9), ranks=[A, B], trust=trust).best
    assert best is not None
    assert best.rank == B


def test_a_match_is_true_when_somebody_holds_something() -> None:
    assert three_ranks().match(prompt(9))
    assert not three_ranks().match(tokens(30)), "it has ranks, and none of them holds a block"
    assert not Index().match(prompt(9))


def test_what_iteration_gives_is_contained_and_found_by_its_rank() -> None:
    match = three_ranks().match(prompt(9), trust=lambda _: Trust(State.LIVE, True, 0))
    for found in match:
        assert found in match
        assert found.rank in match
        assert match[found.rank] == found
    assert three_ranks().match(prompt(1))[B] not in match, "another answer of the same rank"


def test_a_match_contains_exactly_what_it_can_be_asked_for() -> None:
    index = three_ranks()
    index.add(Rank("a", 1))
    match = index.match(prompt(9))
    assert isinstance(match, Collection)
    item: Any
    for item in (A, ("b", 0), "a/0", "b", "c/3"):
        assert item in match
        assert match[item] in match
    for item in ("a", "d", Rank("b", 7), 0, None, [A], RankMatch(rank=Rank("d"))):
        assert item not in match, "worker a has two ranks"
        with pytest.raises(UnknownRankError):
            match[item]


def test_the_best_ranks_are_the_first_of_the_iteration_that_may_be_chosen() -> None:
    index = Index()
    held = {"a": 1, "b": 4, "c": 3, "d": 0, "e": 4, "f": 2}
    for worker, blocks in held.items():
        index.add(Rank(worker))
        if blocks:
            apply(index, Rank(worker), stored(*range(blocks)))
    for dead in ("", "b", "be", "bec", "abcef", "abcdef"):
        trust = {Rank(w): Trust(State.STALE if w in dead else State.LIVE, True, 0) for w in held}
        match = index.match(prompt(9), trust=trust)
        order = list(match)
        assert [found.rank.worker for found in order] == list("becfad"), "longest first, then rank"
        live = [found for found in order if found.state == "live"] or order
        candidates = [found for found in live if found.tokens]
        for n in range(8):
            assert match.top(n) == candidates[:n]
        assert match.top(1) == ([match.best] if match.best else [])
    with pytest.raises(ValueError, match="must be"):
        match.top(-1)


def test_a_rank_without_a_hit_has_its_block_size_too() -> None:
    index = three_ranks()
    index.add(Rank("d"))
    match = index.match(tokens(30))
    assert {str(found.rank): found.block_size for found in match} == {
        "a/0": SIZE, "b/0": SIZE, "c/3": SIZE, "d/0": 0,
    }  # fmt: skip
    assert match[C].block_size == SIZE
    assert index.match([], ranks=[C])[C].block_size == SIZE
    assert three_ranks().match(prompt(9), media="CPU")[A].block_size == SIZE


def test_the_block_size_is_the_one_of_the_group_that_is_counted() -> None:
    index = Index()
    groups = {0: GroupSpec("sliding_window", 8), 1: GroupSpec()}
    index.configure(A, CacheSettings(groups=groups))
    assert index.match(prompt(2))[A].block_size == 0
    apply(index, A, stored(0, 1))
    assert index.match(tokens(9))[A].block_size == SIZE
    apply(index, A, stored(0, block_size=2 * SIZE, token_ids=prompt(2), group_idx=1, base=500))
    assert index.match(tokens(9))[A].block_size == 2 * SIZE


def test_an_answer_does_not_change_when_the_index_does() -> None:
    index = three_ranks()
    match = index.match(prompt(9))
    index.remove(B)
    assert match[B].blocks == 3


def test_a_block_size_that_no_rank_has_is_told_once_all_are_known() -> None:
    index = three_ranks()
    with pytest.raises(ConfigurationError, match=rf"no rank has block_size=32.*sizes: {SIZE}$"):
        index.match(prompt(9), block_size=32)
    assert not index.match(tokens(30), block_size=SIZE), "a size that is known may hit nothing"
    assert not index.match(prompt(9), block_size=32, ranks=[])
    index.add(Rank("d"))  # as after a restart: nobody knows yet which size it has
    assert not index.match(prompt(9), block_size=32)
    with pytest.raises(ValueError, match="no rank has block_size=32"):
        index.match(prompt(9), block_size=32, ranks=[A, B])
    apply(index, Rank("d"), stored(0, token_ids=list(range(32)), block_size=32))
    assert index.match(range(32), block_size=32)[Rank("d")].blocks == 1
    assert not Index().match(prompt(9), block_size=32)


# Statistics


def test_blocks_are_counted_by_lora_and_by_whether_they_are_salted() -> None:
    index = index_of(
        stored(0, 1, 2),
        stored(0, 1, base=200, lora_name="sql"),
        stored(0, base=300, lora_id=7),
        stored(0, 1, base=400, cache_salt="s"),
        stored(2, 3, base=400),  # goes on after the salt, which is told of the first block only
        stored(0, 1, base=500, extra_keys=[("salt",), None]),
        stored(0, base=600, lora_name="sql", extra_keys=[("sql",)]),  # only the LoRA's own name
    )
    assert told(index)["loras"] == {"": 9, "sql": 3, "id 7": 1}
    assert told(index)["salted"] == 6
    apply(index, A, removed(2, base=400), removed(0, base=300), removed(0, base=600))
    assert told(index)["loras"] == {"": 8, "sql": 2}
    assert told(index)["salted"] == 5
    copy = restored(index)
    copy.check()
    assert (told(copy)["loras"], told(copy)["salted"]) == ({"": 8, "sql": 2}, 5)
    index.tree(A).clear()
    assert (told(index)["loras"], told(index)["salted"]) == ({}, 0)


def test_blocks_are_counted_on_each_medium() -> None:
    index = index_of(
        stored(0, 1, 2), stored(0, 1, medium="CPU"), stored(0, 1, base=200, lora_name="sql")
    )
    assert told(index)["media"] == {"CPU": 2, "GPU": 5}
    apply(index, A, removed(2), removed(0, 1, medium="CPU"))
    assert told(index)["media"] == {"GPU": 4}
    assert told(restored(index))["media"] == {"GPU": 4}
    index.tree(A).clear()
    assert told(index)["media"] == {}


def test_an_orphan_of_a_salted_prompt_is_counted_when_it_is_placed() -> None:
    index = index_of(stored(1), stored(2))
    assert (told(index)["loras"], told(index)["salted"]) == ({}, 0)
    apply(index, A, stored(0, cache_salt="s"))
    assert (told(index)["loras"], told(index)["salted"]) == ({"": 3}, 3)


def test_statistics_name_the_64_largest_loras_and_sum_up_the_others() -> None:
    index = Index()
    for n in range(70):
        blocks = range(2) if n < 60 else range(1)
        apply(index, A, stored(*blocks, base=1000 * n + 100, lora_name=f"lora-{n:02}"))
    loras = told(index)["loras"]
    assert list(loras) == [f"lora-{n:02}" for n in range(64)] + ["(other)"]
    assert (loras["lora-00"], loras["lora-63"], loras["(other)"]) == (2, 1, 6)
    assert json.dumps(loras)


# Filters


def test_ranks_narrow_the_answer() -> None:
    index = three_ranks()
    match = index.match(prompt(9), ranks=[A])
    assert [found.rank for found in match] == [A]
    assert len(index.match(prompt(9), ranks=[])) == 0
    with pytest.raises(UnknownRankError, match="d/0"):
        index.match(prompt(9), ranks=[Rank("d")])


@pytest.mark.parametrize("count", [1, 3, 12])
def test_few_names_and_many_stand_for_the_same_ranks(count: int) -> None:
    index = Index()
    ranks = [Rank(f"w{number}", number % 2) for number in range(count)]
    for rank in ranks:
        index.add(rank)
    match = index.match(prompt(1), ranks=[str(rank) for rank in ranks])
    assert {found.rank for found in match} == set(ranks)
    with pytest.raises(UnknownRankError, match="'x'"):
        index.match(prompt(1), ranks=[*map(str, ranks), "x"])


def test_block_size_narrows_to_ranks_of_that_size() -> None:
    index = index_of(stored(0, 1))
    apply(index, B, stored(0, token_ids=tokens(0, 1), block_size=2 * SIZE))
    match = index.match(prompt(2), block_size=2 * SIZE)
    assert (match[A].blocks, match[B].blocks) == (0, 1)
    both = index.match(prompt(2))
    assert both[A].tokens == both[B].tokens == 2 * SIZE


def test_media_are_folded_and_must_be_some() -> None:
    index = index_of(stored(0, 1), stored(0, medium="cpu"))
    assert matched(index, prompt(2), media="cpu") == matched(index, prompt(2), media={"CPU"}) == 1
    assert matched(index, prompt(2), media=["DISK"]) == 0
    with pytest.raises(ConfigurationError, match="media is empty"):
        index.match(prompt(2), media=[])


def test_extra_keys_tell_equal_tokens_apart() -> None:
    image = [None, [("digest", 3)]]
    index = index_of(stored(0, 1, extra_keys=[None, (("digest", 3),)]))
    assert matched(index, prompt(2), extra_keys=image) == 2
    assert matched(index, prompt(2)) == 1
    assert matched(index, prompt(2), extra_keys=[None, [("digest", 4)]]) == 1
    assert matched(index, prompt(2), extra_keys=[*image, None, ["beyond the prompt"]]) == 2


def test_the_order_of_extra_keys_within_a_block_does_not_matter() -> None:
    index = index_of(stored(0, lora_name="l", extra_keys=[("l", ("image", 0), "salt")]))
    query: dict[str, Any] = {"lora": "l", "salt": "salt", "extra_keys": [[("image", 0)]]}
    assert matched(index, prompt(1), **query) == 1


def test_extra_keys_need_a_block_size_where_there_are_several() -> None:
    index = index_of(stored(0, 1))
    apply(index, B, stored(0, token_ids=tokens(0, 1), block_size=2 * SIZE))
    with pytest.raises(ConfigurationError, match=r"block sizes \[4, 8\]"):
        index.match(prompt(2), extra_keys=[None])
    assert matched(index, prompt(2), extra_keys=[None], block_size=SIZE) == 2


def test_match_many_answers_each_prompt_with_the_same_options() -> None:
    index = three_ranks()
    matches = index.match_many([prompt(1), tokens(9), prompt(3)], ranks=[B])
    assert [match[B].blocks for match in matches] == [1, 0, 3]
    assert index.match_many([]) == []


def test_partial_blocks_never_count() -> None:
    assert matched(index_of(stored(0, 1)), prompt(2)[:-1]) == 1


def test_lookahead_tokens_belong_to_the_block() -> None:
    ahead: dict[str, Any] = {"lookahead_token_ids": [tokens(1)[:1]]}
    index = index_of(stored(0, **ahead))
    assert matched(index, prompt(1)) == 0, "the prompt has no next token"
    assert matched(index, prompt(1) + tokens(1)[:1]) == 1
    assert matched(index, [*prompt(1), 5]) == 0


# Ranks and trees


def test_ranks_are_known_from_their_first_event_or_by_name() -> None:
    index = Index()
    index.add(B)
    index.add(B)
    apply(index, A)
    index.apply(A, EventBatch(ts=0.0, events=[]))
    assert index.ranks == (A, B)
    assert index.match(prompt(1))[B].blocks == 0


@pytest.mark.parametrize("kind", [Index, reference.Index])
def test_the_known_ranks_are_one_tuple_until_they_change(kind: type[BaseIndex]) -> None:
    index = kind()
    index.add(B)
    before = index.ranks
    index.apply(B, EventBatch(ts=0.0, events=[stored(0, 1)]))
    index.add(B)
    index.remove(A)
    index.tree(B).clear()
    assert index.ranks is before
    seen = [before]
    changes: list[Callable[[], None]] = [
        lambda: index.add(A),
        lambda: index.rename({A: C}),
        lambda: index.remove(B),
    ]
    if kind.backend == "native":
        changes.append(lambda: index.restore(A, index.dump(C)))
    for change in changes:
        change()
        seen.append(index.ranks)
    assert seen == [(B,), (A, B), (B, C), (C,), (A, C)][: len(seen)]
    assert len(seen) >= 4


def test_a_removed_rank_is_unknown_and_leaves_nothing() -> None:
    index = three_ranks()
    view = index.tree(B)
    index.remove(B)
    index.remove(B)
    index.check()
    assert (index.ranks, len(index)) == ((A, C), 3)
    for use in (view.__len__, view.clear, view.walk, lambda: index.tree(B)):
        with pytest.raises(UnknownRankError, match="b/0 is not known"):
            use()


def test_a_view_counts_walks_and_clears_one_rank() -> None:
    index = index_of(stored(0, 1, lora_name="l"), stored(1, medium="CPU", lora_name="l"))
    apply(index, B, stored(0))
    view = index.tree(A)
    assert (len(view), len(index)) == (2, 3)
    blocks = {(b.block_hash, b.medium): (b.depth, b.copies, b.lora) for b in view.walk()}
    assert blocks == {(100, "GPU"): (0, 1, "l"), (101, "GPU"): (1, 1, "l")} | {
        (101, "CPU"): (1, 1, "l")
    }
    view.clear()
    index.check()
    assert (len(view), len(index), index.ranks) == (0, 1, (A, B))


def test_apply_reads_payloads_as_it_reads_batches() -> None:
    batch = EventBatch(ts=0.0, events=[stored(0, 1), removed(1)])
    payload = encode_batch(batch)
    for form in (payload, bytearray(payload), memoryview(payload)):
        index = Index()
        index.apply(A, form)
        assert matched(index, prompt(2)) == 1


def test_a_payload_that_cannot_be_read_changes_nothing() -> None:
    index = index_of(stored(0))
    with pytest.raises(DecodeError):
        index.apply(A, b"\xff nonsense")
    assert matched(index, prompt(1)) == 1


def test_statistics_count_by_reason() -> None:
    index = index_of(stored(0, 1), stored(1), removed(1), removed(9), stored(5), located(8))
    statistics = json.loads(json.dumps(index.statistics()))
    assert {name: statistics[name] for name in ("blocks", "orphans", "unique_blocks", "runs")} == {
        "blocks": 2,
        "orphans": 2,
        "unique_blocks": 2,
        "runs": 1,
    }
    counted = ("stored", "duplicates", "removed", "removed_unknown", "orphaned", "unplaced")
    assert [statistics["ranks"]["a/0"][name] for name in counted] == [3, 1, 1, 1, 1, 1]
    group = {
        "kind": "full_attention",
        "known": False,
        "sliding_window": None,
        "attention_chunk_size": None,
        "block_size": SIZE,
    }
    assert statistics["ranks"]["a/0"]["groups"] == {"0": group}


# Limits and errors


def test_max_blocks_leaves_out_what_does_not_fit_and_says_so() -> None:
    index = index_of(stored(0, 1, 2), max_blocks=2)
    assert (len(index), matched(index, prompt(3))) == (2, 2)
    assert told(index)["ignored"] == {"max_blocks": 1}
    apply(index, B, stored(0, 1))
    assert (len(index), told(index, B)["ignored"]) == (2, {"max_blocks": 2})
    apply(index, A, stored(1), removed(1), removed(1), stored(1))
    assert matched(index, prompt(2)) == 2


@pytest.mark.parametrize("late", [stored(0, group_idx=1), located(0, group_idx=1)])
def test_max_blocks_counts_each_group_however_it_is_told(late: Any) -> None:
    index = index_of(stored(0), late, max_blocks=1)
    assert (len(index), told(index)["ignored"]) == (1, {"max_blocks": 1})


def test_max_blocks_holds_for_orphans_too() -> None:
    index = index_of(stored(1, 2), stored(2, group_idx=1), stored(0), max_blocks=2)
    assert (len(index), told(index)["orphans"]) == (2, 0)
    assert told(index)["ignored"] == {"max_blocks": 2}


@pytest.mark.parametrize(
    "options", [{"max_blocks": 0}, {"max_orphans": -1}, {"seed": -1}, {"seed": 1 << 128}], ids=str
)
def test_options_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        Index(**options)


def test_two_indexes_of_one_seed_and_two_of_their_own_agree() -> None:
    for index in (Index(seed=7), Index(seed=7), Index(), Index()):
        apply(index, A, stored(0, 1))
        assert matched(index, prompt(2)) == 2


def test_tokens_that_cannot_be_read_are_refused_at_the_call() -> None:
    index = index_of(stored(0, 1))
    with pytest.raises(TokenError, match="str"):
        index.match("a prompt")  # type: ignore[arg-type]
    with pytest.raises(TokenError, match="float"):
        index.match([1.5] * 8)  # type: ignore[arg-type]


def test_check_finds_what_does_not_add_up() -> None:
    index = reference.Index()
    apply(index, A, stored(0, 1))
    index._budget.used += 1
    with pytest.raises(InvariantError, match="2 blocks resident, counted 3"):
        index.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"salt": 5}, "salt"),
        ({"lora": 1.5}, "lora"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"media": [("GPU", 3)]}, "media"),
        ({"ranks": Rank("a", 0)}, "give \\["),
        ({"recomputed": -1}, "recomputed"),
        ({"recomputed": 1.0}, "recomputed"),
        ({"recomputed": None}, "recomputed"),
        ({"recomputed": "1", "salt": "salt"}, "recomputed"),
        ({"recomputed": -(2**70), "block_size": 4}, "recomputed"),
    ],
)
def test_options_that_could_match_nothing_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Index().match([1, 2, 3], **options)


@pytest.mark.parametrize("kind", [Index, reference.Index])
@pytest.mark.parametrize("recomputed", [0, 1, SIZE, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 2**70])
def test_tokens_that_are_recomputed_take_no_part(kind: type[BaseIndex], recomputed: int) -> None:
    index = kind()
    index.apply(A, EventBatch(ts=0.0, events=[stored(0, 1)]))
    held = max(0, 2 * SIZE - recomputed) // SIZE
    for token_ids in (prompt(2), array("q", prompt(2)), array("i", prompt(2)), deque(prompt(2))):
        assert index.match(token_ids, recomputed=recomputed)[A].blocks == held
        assert index.match(token_ids, recomputed=recomputed, media="GPU")[A].blocks == held
        assert index.explain(token_ids, recomputed=recomputed)[A].match.blocks == held
    odd: Any = [*prompt(2), *["text"] * min(recomputed, 2)]  # is not looked at
    assert index.match(odd, recomputed=recomputed)[A].blocks == (2 if recomputed < 3 else held)


def test_a_short_prompt_of_floats_or_words_is_refused_too() -> None:
    odd: Any
    for odd in ([1.5], [None], [b"x"]):
        with pytest.raises(TokenError):
            Index().match(odd)
