"""Every reason why a match ends is told as it is, and asking does not disturb."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvindex import EventBatch, GroupSpec, Index, Rank, State
from kvindex.index import Ending, Explanation, Trust
from kvindex.wire import CacheSettings
from kvindex.wire.errors import TokenError, UnknownRankError
from tests.index.index_events import SIZE, A, B, apply, index_of, prompt, removed, stored, tokens

pytestmark = pytest.mark.unit


def ending(explanation: Explanation, rank: Rank = A) -> tuple[Ending, int]:
    """Why the rank's match ends, and where; which is where `match` says."""
    assert explanation[rank].match == explanation.match[rank]
    return explanation[rank].ending, explanation[rank].match.tokens


def test_a_whole_prompt() -> None:
    index = index_of(stored(0, 1))
    for question in (prompt(2), [*prompt(2), 7]):
        assert ending(index.explain(question)) == (Ending.WHOLE, 2 * SIZE)
    assert "every whole block" in str(index.explain(prompt(2)))


def test_a_prompt_that_is_whole_but_for_lookahead_tokens() -> None:
    index = index_of(stored(0, 1, lookahead_token_ids=[[1000], [2000]]))
    assert ending(index.explain(prompt(3))) == (Ending.WHOLE, 2 * SIZE)
    assert ending(index.explain(prompt(2))) == (Ending.WHOLE, SIZE), "the second one lacks a token"
    assert ending(index.explain([*prompt(2), 7])) == (Ending.END, SIZE)


def test_a_rank_that_holds_nothing_at_all() -> None:
    index = Index()
    index.add(A)
    apply(index, B, stored(0))
    assert ending(index.explain(prompt(2))) == (Ending.EMPTY, 0)
    assert ending(index.explain(prompt(2)), B) == (Ending.END, SIZE)
    assert str(Index().explain(prompt(2))) == "no ranks are known"


def test_a_prompt_shorter_than_a_block() -> None:
    index = index_of(stored(0, 1))
    assert ending(index.explain(prompt(1)[:3])) == (Ending.SHORT, 0)
    assert ending(index.explain([])) == (Ending.SHORT, 0)
    assert "3 tokens is shorter than one block of 4" in str(index.explain(prompt(1)[:3]))


def test_a_hole_with_blocks_after_it() -> None:
    index = index_of(stored(*range(9)), removed(3), removed(6))
    explained = index.explain(prompt(9))[A]
    assert (explained.ending, explained.match.blocks) == (Ending.HOLE, 3)
    assert explained.held is not None
    assert explained.held.spans == ((0, 12), (16, 24), (28, 36))
    assert "block 3 (tokens 12 to 15) is not resident" in explained.text
    assert "16 to 23, 28 to 35" in explained.text


def test_nothing_from_a_block_on_or_from_the_start() -> None:
    index = index_of(stored(0, 1))
    assert ending(index.explain(prompt(9))) == (Ending.END, 2 * SIZE)
    assert "block 2 (tokens 8 to 11) is not resident, nor" in str(index.explain(prompt(9)))
    assert ending(index.explain(tokens(50, 51))) == (Ending.END, 0)
    assert "from its first block on" in str(index.explain(tokens(50, 51)))


def test_another_block_size_than_asked_for() -> None:
    index = index_of(stored(0, 1))
    explained = index.explain(prompt(2), block_size=16)
    assert ending(explained) == (Ending.BLOCK_SIZE, 0)
    assert "its blocks have 4 tokens, not the 16" in str(explained)
    assert ending(index.explain(prompt(2), block_size=SIZE)) == (Ending.WHOLE, 2 * SIZE)


@pytest.mark.parametrize(
    ("fields", "lora", "salted"),
    [
        ({"lora_name": "sql"}, "sql", False),
        ({"lora_id": 7}, 7, False),
        ({"cache_salt": "secret"}, None, True),
        ({"extra_keys": [("secret",), None, None]}, None, True),
        ({"lora_name": "sql", "cache_salt": "secret"}, "sql", True),
    ],
    ids=str,
)
def test_another_lora_or_salt_would_have_matched(
    fields: dict[str, Any], lora: object, salted: bool
) -> None:
    index = index_of(stored(0, 1, 2, **fields))
    explained = index.explain(prompt(3))[A]
    assert (explained.ending, explained.match.tokens) == (Ending.PROMPTS, 0)
    assert explained.other is not None
    assert (explained.other.lora, explained.other.salted) == (lora, salted)
    assert explained.other.tokens == 3 * SIZE
    assert "it would be 12" in explained.text
    assert "secret" not in str(explained) + json.dumps(index.explain(prompt(3)).to_dict())


def test_asked_with_a_lora_or_salt_where_there_is_none() -> None:
    index = index_of(stored(0, 1, 2))
    for options in ({"lora": "sql"}, {"salt": "s"}, {"lora": 7, "salt": "s"}):
        explained = index.explain(prompt(3), **options)[A]
        assert explained.other is not None
        assert (explained.other.lora, explained.other.salted) == (None, False)
    assert "and no salt it would be 12" in str(index.explain(prompt(3), salt="s"))


def test_the_last_64_salts_are_tried_and_it_is_said_how_many() -> None:
    index = Index()
    for n in range(70):
        apply(index, A, stored(0, base=1000 * n, token_ids=tokens(n), cache_salt=f"salt {n}"))
    old, new = (index.explain(tokens(n)) for n in (5, 6))
    assert (ending(old), ending(new)) == ((Ending.END, 0), (Ending.PROMPTS, 0))
    assert "70 of its blocks are under salts" in str(old)
    assert "the last 64 of these were tried" in str(old)
    apply(index, A, stored(0, base=1000, token_ids=tokens(5), cache_salt="salt 5"))
    assert ending(index.explain(tokens(5))) == (Ending.PROMPTS, 0)
    apply(index, A, stored(0, base=2, token_ids=tokens(90), cache_salt="x" * 300))
    assert ending(index.explain(tokens(90))) == (Ending.END, 0), "too long to be remembered"


def test_salts_are_forgotten_with_the_blocks() -> None:
    index = index_of(stored(0, cache_salt="s"))
    index.tree(A).clear()
    assert index._view_origins(A) == ([], [])


def test_media_that_do_not_count() -> None:
    index = index_of(stored(0), stored(1, 2, medium="CPU"))
    explained = index.explain(prompt(3), media="GPU")
    assert ending(explained) == (Ending.MEDIA, SIZE)
    assert "on all media the first 12 tokens" in str(explained)
    assert ending(index.explain(prompt(3))) == (Ending.WHOLE, 3 * SIZE)


def test_a_medium_that_a_rank_has_no_block_on_and_negative_tokens_are_noted() -> None:
    index = index_of(stored(0), stored(1, 2, medium="CPU"))
    assert (
        index.explain(prompt(3), media=["gpu", "cpu"])[A].notes == index.explain(prompt(3))[A].notes
    )
    notes = index.explain(prompt(3), media=["VRAM"])[A].notes
    assert "none of its blocks is on VRAM; its media: CPU, GPU" in notes
    explained = index.explain([*prompt(2), -100])
    assert "token 8 of the prompt is -100: no engine has a negative token id" in str(explained)


def test_a_console_prints_an_explanation() -> None:
    explained = index_of(stored(0)).explain(prompt(1))
    assert repr(explained) == str(explained) != ""


@pytest.mark.parametrize(
    ("kind", "window"), [("sliding_window", 9), ("mamba", None)], ids=["window", "mamba"]
)
def test_a_group_that_lacks_what_a_hit_needs_is_named(kind: str, window: int | None) -> None:
    index = Index()
    kinds = {0: GroupSpec(), 1: GroupSpec(kind, window), 2: GroupSpec()}
    index.configure(A, CacheSettings(groups=kinds))
    apply(index, A, *(stored(*range(6), group_idx=group) for group in range(3)))
    assert ending(index.explain(prompt(6))) == (Ending.WHOLE, 6 * SIZE)
    apply(index, A, removed(*range(3), group_idx=1))
    assert ending(index.explain(prompt(6))) == (Ending.WHOLE, 6 * SIZE)
    apply(index, A, removed(4, 5, group_idx=1), removed(5, group_idx=2))
    explained = index.explain(prompt(6))[A]
    assert explained.ending is Ending.GROUP
    assert [(group.group_idx, group.kind) for group in explained.limits] == [
        (1, kind), (2, "full_attention"),
    ]  # fmt: skip
    assert explained.limits[0].spans == ((12, 16),)
    assert f"group 1 ({kind}" in explained.text
    assert "only tokens 12 to 15" in explained.text


def test_a_group_of_chunks_needs_no_more_than_the_chunk_that_the_hit_ends_in() -> None:
    index = Index()
    chunks = GroupSpec("chunked_local_attention", attention_chunk_size=2 * SIZE)
    kinds = {0: chunks, 1: GroupSpec(), 2: GroupSpec("sliding_window", 9)}
    index.configure(A, CacheSettings(groups=kinds))
    apply(index, A, *(stored(*range(6), group_idx=group) for group in range(3)))
    apply(index, A, removed(*range(4), group_idx=0), removed(4, group_idx=2))
    explained = index.explain(prompt(5))[A]
    assert (explained.ending, explained.match.tokens) == (Ending.GROUP, 4 * SIZE)
    assert explained.held is not None
    assert explained.held.kind == "full_attention", "its blocks are those that the match counts"
    assert [group.group_idx for group in explained.limits] == [2]
    apply(index, A, removed(4, group_idx=0))
    assert [group.group_idx for group in index.explain(prompt(5))[A].limits] == [0, 2]


def test_answers_that_are_upper_bounds_are_noted() -> None:
    index = index_of(stored(0), stored(1, 2, medium="CPU"))
    assert index.explain(prompt(3))[A].notes == (
        "4 of these tokens are on the device; the engine decides whether it loads the rest",
    )
    assert index.explain(prompt(1))[A].notes == ()
    index.configure(A, CacheSettings(upper_bound=True))
    assert "an upper bound: " in str(index.explain(prompt(1)))
    assert index.explain(tokens(50))[A].notes == ()


def test_events_of_unknown_kinds_are_named_as_what_makes_an_upper_bound() -> None:
    index = index_of(stored(0))
    unknown = ("BlocksEvicted", "TierBlocksCleared", "BlocksEvicted", "BlockInactive")
    index.apply(A, EventBatch(ts=0.0, events=[], skipped=unknown))
    (note,) = index.explain(prompt(1))[A].notes
    assert note.endswith("; some are of unknown kinds: BlocksEvicted 2, TierBlocksCleared 1")


def test_orphans_and_ignored_blocks_are_noted() -> None:
    index = index_of(stored(0), stored(5, 6), stored(9, block_size=3))
    text = str(index.explain(prompt(9)))
    assert "a lower bound: blocks were left out, or have no known place (2 wait)" in text
    assert "blocks were ignored: token_count 1" in text


def test_ranks_are_narrowed_and_found_by_name() -> None:
    index = index_of(stored(0, 1))
    apply(index, B, stored(0))
    assert [reason.match.rank for reason in index.explain(prompt(2))] == [A, B]
    assert len(index.explain(prompt(2), ranks=[B])) == 1
    with pytest.raises(UnknownRankError, match="c/0 is not known; known: a/0, b/0"):
        index.explain(prompt(2))[Rank("c")]
    with pytest.raises(UnknownRankError, match="c/0"):
        index.explain(prompt(2), ranks=[Rank("c")])
    with pytest.raises(TokenError):
        index.explain(["words"])  # type: ignore[arg-type]


def test_an_explanation_is_ready_for_json_and_takes_trust() -> None:
    trusted = index_of(stored(0, 1), removed(0)).explain(
        prompt(2), trust=lambda _: Trust(State.STALE, False, 3), notes=lambda _: ["a note"]
    )
    plain = json.loads(json.dumps(trusted.to_dict()))["a/0"]
    assert (plain["ending"], plain["match"]["state"], plain["notes"]) == (
        "hole", "stale", ["a note"],
    )  # fmt: skip
    assert str(trusted).endswith("; a note")


def test_asking_why_changes_nothing() -> None:
    index = index_of(stored(*range(6)), removed(2), stored(0, base=500, cache_salt="s"))
    before = index.statistics(), index.match(prompt(6)).to_dict()
    index.explain(prompt(6))
    index.explain(prompt(6), lora="sql", salt="other", media="CPU", block_size=9)
    assert (index.statistics(), index.match(prompt(6)).to_dict()) == before


def test_a_prompt_beyond_what_is_held_is_explained_in_whole() -> None:
    index = Index()
    index.apply(A, EventBatch(ts=0.0, events=[stored(*range(1_000))]))
    index.apply(A, EventBatch(ts=0.0, events=[removed(*range(1, 1_000, 2))]))
    explained = index.explain(prompt(1_000))[A]
    assert explained.held is not None
    assert len(explained.held.spans) == 500
    assert "and 491 further stretches" in explained.text
