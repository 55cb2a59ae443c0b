"""Code as users write it; mypy checks it, and that what is refused is refused by types, too.

An ignored error that is none is reported by mypy (`warn_unused_ignores`).
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from kvindex import (
    BlockStored,
    EventBatch,
    EventStream,
    Index,
    Match,
    Rank,
    RankMatch,
    ReplayPolicy,
    State,
    TokenError,
    TokenIds,
    Trust,
    Worker,
    connect,
)

pytestmark = pytest.mark.unit

RANK = Rank("a")
TOKENS = [1, 2, 3, 4]


def stored() -> Index:
    index = Index()
    event = BlockStored(block_hashes=[7], token_ids=TOKENS, block_size=4)
    index.apply(RANK, EventBatch(ts=0.0, events=[event]))
    return index


def held(token_ids: TokenIds) -> int:
    return stored().match(token_ids)[RANK].tokens


def test_tokens_may_be_any_sequence_or_buffer_of_ints() -> None:
    sequence: Sequence[int] = TOKENS
    assert held(TOKENS) == 4
    assert held(tuple(TOKENS)) == 4
    assert held(range(1, 5)) == 4
    assert held(deque(TOKENS)) == 4
    assert held(sequence) == 4
    assert held(array("I", TOKENS)) == 4
    assert held(memoryview(array("q", TOKENS))) == 4


def test_tokens_may_be_an_array_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    if TYPE_CHECKING:
        import numpy as np
    assert held(np.array(TOKENS, dtype=np.uint32)) == 4
    assert held(np.array(TOKENS)) == 4


def test_what_is_no_prompt_is_refused() -> None:
    with pytest.raises(TokenError):
        held("1234")  # type: ignore[arg-type]
    with pytest.raises(TokenError):
        held([1.0])  # type: ignore[arg-type]
    with pytest.raises(TokenError):
        held([TOKENS])  # type: ignore[arg-type]
    with pytest.raises(TokenError):
        held(b"1234")  # to types it is a sequence of ints


def test_options_are_checked_and_answers_are_typed() -> None:
    index = stored()
    trust = {RANK: Trust(State.LIVE, True, 0)}
    match: Match = index.match(TOKENS, lora=None, media="GPU", trust=trust)
    best: RankMatch | None = match.best
    assert best is not None
    assert best in match.top(3)
    many: list[Match] = index.match_many([TOKENS], ranks=[RANK], media=("GPU", "CPU"))
    assert many[0][RANK].tokens == 4
    with pytest.raises(TypeError):
        index.match_many([TOKENS], medium="GPU")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        index.match(TOKENS, "sql")  # type: ignore[call-arg, arg-type]


def test_settings_of_connections_are_checked() -> None:
    worker = Worker("a", "tcp://127.0.0.1:1")
    with connect(worker, on_loss="keep", replay_policy=ReplayPolicy(attempts=5)) as client:
        assert client.ranks == (RANK,)
    with EventStream([worker], probe_interval=1.0, max_items=10):
        pass
    unknown: Any = None
    for opened in (connect, EventStream):
        with pytest.raises(TypeError):
            opened(worker, retries=unknown)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="on_loss"):
        connect(worker, on_loss="drop")  # type: ignore[arg-type]
