"""What a `Match` answers: order, trust, containment, what narrows it, and its columns."""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Collection
from typing import Any

import pytest

from kvindex import (
    EventBatch,
    Hits,
    Index,
    Match,
    Rank,
    RankMatch,
    RankRows,
    State,
)
from kvindex.index import Trust
from kvindex.index.api import BaseIndex
from kvindex.wire import GroupSpec
from kvindex.wire.errors import ConfigurationError, UnknownRankError
from tests.index.index_events import (
    SIZE,
    A,
    B,
    C,
    apply,
    both,
    index_of,
    prompt,
    stored,
    three_ranks,
    tokens,
)
from tests.index.index_stories import Scene, Story, answers, configured, holds, of, stories

pytestmark = pytest.mark.unit

DEAD = {A: State.CONNECTING, B: State.CONNECTING, C: State.LIVE}


def trust_in(states: dict[Rank, State]) -> dict[Rank, Trust]:
    return {rank: Trust(state, True, 0) for rank, state in states.items()}


@pytest.mark.parametrize(
    ("states", "ranks", "best"),
    [
        pytest.param({}, None, B, id="who holds most"),
        pytest.param({A: State.LIVE, B: State.STALE}, None, A, id="live before stale"),
        pytest.param(dict.fromkeys((A, B, C), State.STALE), None, B, id="stale if none is live"),
        pytest.param(DEAD, None, None, id="none while a live rank holds nothing"),
        pytest.param(DEAD, [A, B], B, id="only ranks that were asked for stand in the way"),
    ],
)
def test_the_best_rank_is_the_one_to_choose(
    states: dict[Rank, State], ranks: list[Rank] | None, best: Rank | None
) -> None:
    match = three_ranks().match(prompt(9), ranks=ranks, trust=trust_in(states))
    assert (match.best.rank if match.best else None) == best
    assert match.top(3)[:1] == ([match.best] if match.best else [])
    assert match, "it is true when a rank holds something"
    assert next(iter(match)).rank == B, "iteration shows what the dead hold, longest first"


def test_best_is_none_when_nobody_holds_anything() -> None:
    index = three_ranks()
    for match in (index.match(tokens(30)), index.match([]), Index().match(prompt(2))):
        assert match.best is None
        assert not match


def test_trust_is_shown_with_each_rank() -> None:
    trust = {A: Trust(State.LIVE, True, 0), B: Trust(State.STALE, False, 7)}
    match = three_ranks().match(prompt(9), trust=lambda rank: trust.get(rank))
    assert (match[B].state, match[B].complete, match[B].lag) == ("stale", False, 7)
    assert match[C].state is None


def test_iteration_is_longest_first_then_by_rank_and_includes_ranks_that_hold_nothing() -> None:
    index = three_ranks()
    for rank in (Rank("c", 1), Rank("b", 1)):
        apply(index, rank, stored(0, 1))
    match = index.match(prompt(9))
    order = [(str(entry.rank), entry.blocks) for entry in match]
    assert order == [("b/0", 3), ("a/0", 2), ("b/1", 2), ("c/1", 2), ("c/3", 0)]
    assert len(match) == 5
    assert (match[B].tokens, match[B].block_size, match[B].by_medium) == (12, SIZE, {"GPU": 3})
    assert (match[C].tokens, match[C].block_size, match[C].by_medium) == (0, SIZE, {})
    plain = json.loads(json.dumps(match.to_dict()))
    assert list(plain) == ["b/0", "a/0", "b/1", "c/1", "c/3"]
    fields = {"worker": "b", "dp_rank": 0, "blocks": 3, "by_medium": {"GPU": 3}}
    assert fields.items() <= plain["b/0"].items()


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
    for entry in match:
        assert entry in match
        assert match[entry.rank] == entry
    assert index.match(prompt(1))[B] not in match, "another answer of the same rank"
    with pytest.raises(KeyError, match=r"d/0 is not known; known: a/0, a/1, b/0, c/3"):
        match[Rank("d")]


def test_the_best_ranks_are_the_first_of_the_iteration_that_may_be_chosen() -> None:
    index = Index()
    held = {"a": 1, "b": 4, "c": 3, "d": 0, "e": 4, "f": 2}
    for worker, blocks in held.items():
        index.add(Rank(worker))
        if blocks:
            apply(index, Rank(worker), stored(*range(blocks)))
    for dead in ("", "b", "be", "bec", "abcef", "abcdef"):
        states = {Rank(w): State.STALE if w in dead else State.LIVE for w in held}
        match = index.match(prompt(9), trust=trust_in(states))
        order = list(match)
        assert [entry.rank.worker for entry in order] == list("becfad"), "longest first, then rank"
        live = [entry for entry in order if entry.state == "live"] or order
        candidates = [entry for entry in live if entry.tokens]
        for n in range(8):
            assert match.top(n) == candidates[:n]
    with pytest.raises(ValueError, match="must be"):
        match.top(-1)


def test_an_answer_does_not_change_when_the_index_does() -> None:
    index = three_ranks()
    match = index.match(prompt(9))
    index.remove(B)
    assert match[B].blocks == 3


def test_a_rank_without_a_hit_has_its_block_size_too() -> None:
    index = three_ranks()
    index.add(Rank("d"))
    sizes = {str(entry.rank): entry.block_size for entry in index.match(tokens(30))}
    assert sizes == {"a/0": SIZE, "b/0": SIZE, "c/3": SIZE, "d/0": 0}
    assert index.match([], ranks=[C])[C].block_size == SIZE
    assert three_ranks().match(prompt(9), media="CPU")[A].block_size == SIZE


def test_a_block_size_that_no_rank_has_is_reported_once_all_sizes_are_known() -> None:
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


# What narrows an answer

IMAGE = [None, [("digest", 3)]]
DOUBLE = stored(0, token_ids=tokens(0, 1), block_size=2 * SIZE)

NARROWED = {
    "a block size narrows to ranks of that size": Story(
        Scene(stored(0, 1), of(B, DOUBLE)),
        Scene(holds(0, block_size=2 * SIZE), holds(1, rank=B, block_size=2 * SIZE)),
        Scene(holds(2), holds(1, rank=B)),
    ),
    "media are folded": Story(
        Scene(stored(0, 1), stored(0, medium="cpu")),
        Scene(holds(1, media="cpu"), holds(1, media={"CPU"}), holds(0, media=["DISK"])),
    ),
    "extra keys tell equal tokens apart": Story(
        stored(0, 1, extra_keys=[None, (("digest", 3),)]),
        Scene(holds(2, extra_keys=IMAGE), holds(1), holds(1, extra_keys=[None, [("digest", 4)]])),
        holds(2, extra_keys=[*IMAGE, None, ["beyond the prompt"]]),
    ),
    "the order of extra keys within a block does not matter": Story(
        stored(0, lora_name="l", extra_keys=[("l", ("image", 0), "salt")]),
        holds(1, lora="l", salt="salt", extra_keys=[[("image", 0)]]),
    ),
    "partial blocks never count": Story(stored(0, 1), holds(1, prompt(2)[:-1])),
    "lookahead tokens belong to the block": Story(
        stored(0, lookahead_token_ids=[tokens(1)[:1]]),
        holds(0, prompt(1)),  # the prompt has no next token
        Scene(holds(1, prompt(1) + tokens(1)[:1]), holds(0, [*prompt(1), 5])),
    ),
    "the block size is the one of the group that is counted": Story(
        configured(groups={0: GroupSpec("sliding_window", 8), 1: GroupSpec()}),
        answers(tokens(9), block_size=0),
        Scene(stored(0, 1), answers(tokens(9), block_size=SIZE)),
        stored(0, block_size=2 * SIZE, token_ids=prompt(2), group_idx=1, base=500),
        answers(tokens(9), block_size=2 * SIZE),
    ),
}


@stories(NARROWED)
def test_a_question_narrows_the_answer(story: Story, way: str) -> None:
    story.run(way)


def test_extra_keys_need_a_block_size_where_there_are_several() -> None:
    index = index_of(stored(0, 1))
    apply(index, B, DOUBLE)
    with pytest.raises(ConfigurationError, match=r"block sizes \[4, 8\]"):
        index.match(prompt(2), extra_keys=[None])
    assert index.match(prompt(2), extra_keys=[None], block_size=SIZE)[A].blocks == 2


@pytest.mark.parametrize("count", [0, 1, 3, 12])
def test_few_names_and_many_stand_for_the_same_ranks(count: int) -> None:
    index = Index()
    ranks = [Rank(f"w{number}", number % 2) for number in range(count)]
    for rank in (*ranks, A):
        index.add(rank)
    match = index.match(prompt(1), ranks=[str(rank) for rank in ranks])
    assert {entry.rank for entry in match} == set(ranks)
    with pytest.raises(UnknownRankError, match="'x'"):
        index.match(prompt(1), ranks=[*map(str, ranks), "x"])
    with pytest.raises(UnknownRankError, match="d/0"):
        index.match(prompt(1), ranks=[*ranks, Rank("d")])


def test_match_many_answers_each_prompt_with_the_same_options() -> None:
    index = three_ranks()
    matches = index.match_many([prompt(1), tokens(9), prompt(3)], ranks=[B])
    assert [match[B].blocks for match in matches] == [1, 0, 3]
    assert index.match_many([]) == []


@both
@pytest.mark.parametrize("recomputed", [0, 1, SIZE, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 2**70])
def test_tokens_that_are_recomputed_take_no_part(kind: type[BaseIndex], recomputed: int) -> None:
    index = kind()
    apply(index, A, stored(0, 1))
    held = max(0, 2 * SIZE - recomputed) // SIZE
    for token_ids in (prompt(2), array("q", prompt(2)), array("i", prompt(2)), deque(prompt(2))):
        assert index.match(token_ids, recomputed=recomputed)[A].blocks == held
        assert index.match(token_ids, recomputed=recomputed, media="GPU")[A].blocks == held
        assert index.explain(token_ids, recomputed=recomputed)[A].match.blocks == held
    odd: Any = [*prompt(2), *["text"] * min(recomputed, 2)]  # is not looked at
    assert index.match(odd, recomputed=recomputed)[A].blocks == (2 if recomputed < 3 else held)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"salt": 5}, "salt"),
        ({"lora": 1.5}, "lora"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"media": [("GPU", 3)]}, "media"),
        ({"media": []}, "media is empty"),
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


# Columns, one row for each rank of a list -------------------------------------------------------


C, NOBODY = Rank("c", 3), Rank("nobody")
ROWS = RankRows([C, NOBODY, B, A])


def filled(index: BaseIndex) -> BaseIndex:
    """A holds a block, B two and two more on the host, C stores another prompt."""
    on_host = [stored(2, 3, medium="CPU"), stored(4, medium="DISK")]
    index.apply(A, EventBatch(ts=0.0, events=[stored(0)]))
    index.apply(B, EventBatch(ts=0.0, events=[stored(0, 1), *on_host]))
    index.apply(C, EventBatch(ts=0.0, events=[stored(7, parent=None)]))
    return index


def column(*values: int) -> array[int]:
    return array("q", [value * SIZE for value in values])


@both
def test_each_row_tells_what_its_rank_holds_up_to_each_tier(kind: type[BaseIndex]) -> None:
    match = filled(kind()).match(prompt(9))
    assert match.hits(ROWS) == Hits(
        column(0, 0, 2, 1), column(0, 0, 4, 1), column(0, 0, 5, 1), column(1, 0, 1, 1)
    )


@both
def test_rows_that_are_not_live_or_not_asked_for_hold_nothing(kind: type[BaseIndex]) -> None:
    index, held = filled(kind()), column(0, 0, 0, 1)
    expected = Hits(held, held, held, column(1, 0, 1, 1))
    for live in (bytes([1, 1, 0, 1]), bytearray([1, 1, 0, 9])):
        assert index.match(prompt(9)).hits(ROWS, live) == expected
    assert index.match(prompt(9), ranks=[A]).hits(ROWS) == expected


@both
@pytest.mark.parametrize("live", [b"", bytes(3), bytes(5)], ids=["none", "short", "long"])
def test_a_mask_of_another_length_is_refused(kind: type[BaseIndex], live: bytes) -> None:
    match = filled(kind()).match(prompt(9))
    with pytest.raises(ValueError, match="a byte for each of 4 rows"):
        match.hits(ROWS, live)


@both
def test_rows_follow_the_index_when_its_ranks_change(kind: type[BaseIndex]) -> None:
    index, other = filled(kind()), kind()
    other.apply(A, EventBatch(ts=0.0, events=[stored(0, 1, 2)]))

    def tokens(index: BaseIndex = index) -> array[int]:
        return index.match(prompt(9)).hits(ROWS).tokens

    before = index.match(prompt(9))
    for _ in range(2):
        assert tokens() == column(0, 0, 5, 1)
        assert tokens(other) == column(0, 0, 0, 3), "one list of rows serves several indexes"
    index.rename({A: B, B: A})
    assert tokens() == column(0, 0, 1, 5)
    index.remove(A)
    assert tokens() == column(0, 0, 1, 0)
    index.apply(NOBODY, EventBatch(ts=0.0, events=[stored(0, 1, 2)]))
    assert tokens() == column(0, 3, 1, 0)
    assert before.hits(ROWS).tokens == column(0, 0, 5, 1), "an answer does not change"


@both
def test_any_number_of_rows_may_be_asked_for(kind: type[BaseIndex]) -> None:
    index = kind()
    ranks = [Rank("w", dp_rank) for dp_rank in range(200)]
    for rank in ranks:
        index.apply(rank, EventBatch(ts=0.0, events=[stored(*range(rank.dp_rank % 7 + 1))]))
    for rank in ranks[::3]:
        index.remove(rank)
    match: Match = index.match(prompt(9))
    for chosen in (ranks, ranks[50:60], ranks[::-1], []):
        expected = [match[rank].tokens if rank in match else 0 for rank in chosen]
        assert match.hits(RankRows(chosen)).tokens.tolist() == expected


def test_columns_are_ones_own() -> None:
    match = filled(Index()).match(prompt(9))
    match.hits(ROWS).tokens[0] = 5
    assert match.hits(ROWS).tokens[0] == 0


def test_a_rank_has_one_row() -> None:
    with pytest.raises(ConfigurationError, match="b/0 has two rows"):
        RankRows([A, B, B])


def test_rows_are_a_sequence_of_ranks() -> None:
    assert (list(ROWS), len(ROWS), ROWS[2], ROWS[:2]) == ([C, NOBODY, B, A], 4, B, (C, NOBODY))
    assert A in ROWS
    assert repr(RankRows([A])) == "RankRows([Rank(worker='a', dp_rank=0)])"
