"""An answer is never trusted further than what was known when it was asked for."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Mapping
from typing import Any

import pytest

from kvindex import BlockStored, EventBatch, Index, Rank, State
from kvindex.client.answering import Answering
from kvindex.subscribe.status_board import StatusBoard
from kvindex.wire.errors import UnknownRankError
from kvindex.wire.rank import Trust
from tests.client.conftest import store
from tests.subscribe.test_status_board import status

pytestmark = pytest.mark.unit

A, B = Rank("a", 0), Rank("b", 0)
PROMPT = list(range(8))


class Answers(Answering):
    """An index, and a board of its ranks."""

    def __init__(self) -> None:
        self._index = Index()
        store(self._index, A, blocks=1)
        self._board = Board(self._index)

    @property
    def index(self) -> Index:
        return self._index

    def _own_statistics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing to close."""


class Board(StatusBoard):
    """A board with one live rank; another rank comes as soon as the trust was looked at."""

    def __init__(self, index: Index) -> None:
        super().__init__(time.monotonic, math.inf)
        self._index = index
        self.show([status(A)])

    def trusts(self) -> Mapping[Rank, Trust]:
        store(self._index, B, blocks=2)
        return super().trusts()


def test_a_rank_that_comes_between_trust_and_answer_is_not_taken_for_live() -> None:
    match = Answers().match(PROMPT)
    assert (match[B].blocks, match[B].state, match[B].complete) == (2, State.CONNECTING, False)
    assert (match[A].blocks, match[A].state, match[A].complete) == (1, State.LIVE, True)
    assert match.best is not None
    assert match.best.rank == A
    assert [part.rank for part in match] == [B, A]


def test_many_prompts_are_asked_with_the_same_options() -> None:
    matches = Answers().match_many([PROMPT, PROMPT[:4]], ranks=[A])
    assert [[part.tokens for part in match] for match in matches] == [[4], [4]]


def test_an_answer_leaves_out_the_tokens_that_the_engine_computes_again() -> None:
    answers = Answers()
    assert [answers.match(PROMPT[:4], recomputed=n)[A].tokens for n in (0, 1)] == [4, 0]
    assert [match[A].tokens for match in answers.match_many([PROMPT[:4]], recomputed=1)] == [0]
    assert answers.explain(PROMPT[:4], recomputed=1)[A].match.tokens == 0


def test_only_ranks_whose_stream_is_live_are_live() -> None:
    answers = Answers()
    store(answers.index, B, blocks=2)
    live = answers.live_ranks()
    assert live == {A}
    assert answers.live_ranks() is live
    answers._board.show([status(A, state=State.STALE)])
    assert answers.live_ranks() == frozenset()


def test_a_status_has_what_the_index_knows() -> None:
    answers = Answers()
    orphan = BlockStored(block_hashes=[9], parent_block_hash=8, token_ids=PROMPT[:4], block_size=4)
    answers.index.apply(A, EventBatch(ts=0.0, events=[orphan]))
    assert answers.status(A).orphans == 1
    answers.index.remove(A)
    assert answers.status(A).orphans == 0, "of a rank that is being removed: what the stream says"
    with pytest.raises(UnknownRankError):
        answers.status(B)


def test_an_explanation_says_what_the_stream_says_to_it() -> None:
    answers = Answers()
    explained = answers.explain(PROMPT)
    assert explained[A].match.state == State.LIVE
    assert explained[A].notes == ()
    assert explained[B].match.state == State.CONNECTING
    assert explained[B].notes == ("nobody follows its stream",)
    troubled = status(
        A, state=State.STALE, reason="no proof of life", complete=False, losses=2, restarts=1
    )
    answers._board.show([troubled])
    text = str(answers.explain(PROMPT, ranks=[A]))
    assert "not live (stale), so this may be out of date: no proof of life" in text
    assert "not all of its history was seen" in text
    assert "2 losses" in text
    assert "restarted 1 time" in text


@pytest.mark.parametrize("ranks", [["a/0"], ["a"], "a/0", "a", ("a/0",), [A]])
def test_a_rank_is_found_by_its_text_and_all_of_a_worker_by_its_name(ranks: Any) -> None:
    match = Answers().match(PROMPT, ranks=ranks)
    assert [part.rank for part in match] == [A]
    assert match["a/0"] == match["a"] == match[A]
    assert "a/0" in match
    assert "a" in match
    assert "b/0" not in match
    assert Answers().index.tree("a/0").rank == A


def test_a_text_that_is_no_ranks_is_refused_with_those_that_are_known() -> None:
    match = Answers().match(PROMPT)
    for ask in (match.__getitem__, lambda name: Answers().match(PROMPT, ranks=[name])):
        with pytest.raises(UnknownRankError, match="'a/7' is not known; known: a/0"):
            ask("a/7")


def test_what_belongs_to_a_process_says_what_to_send_instead() -> None:
    for kept in (Answers(), Answers().match(PROMPT)):
        with pytest.raises(TypeError, match=r"send match\.to_dict\(\)"):
            pickle.dumps(kept)
