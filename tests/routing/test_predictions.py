"""Predictions: the blocks that a rank will hold soon, since a prompt was just sent there."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import pytest

from kvindex import BlockStored, EventBatch, TokenError
from kvindex.routing import Router
from kvindex.wire import text_token
from tests.routing.fleet import (
    BLOCK,
    NOTHING,
    PROMPT,
    A,
    B,
    Clock,
    Followed,
    fleet,
    hold,
    router_of,
)

pytestmark = pytest.mark.unit

WHOLE = 10 * BLOCK  # tokens of the prompt's whole blocks


def test_predictions_keep_siblings_together_and_apart_from_held_blocks(clock: Clock) -> None:
    index = fleet("ab")
    router = Router(index, clock=clock, predict=5.0)
    first, sibling = router.reserve(PROMPT), router.reserve(PROMPT)
    assert sibling.rank == first.rank
    assert (sibling.decision.tokens, sibling.decision.predicted_tokens) == (WHOLE, WHOLE)
    assert index.match(PROMPT).best is None  # an index reports what events stored
    first.finish()
    sibling.cancel()
    clock.now += 4.9
    assert router.select(PROMPT).predicted_tokens == WHOLE
    clock.now += 0.2
    assert router.select(PROMPT).predicted_tokens == 0
    assert router.statistics()["predictions"] == {"made": 2, "blocks": 0}


def test_blocks_of_an_engine_that_does_not_read_its_cache_are_predicted_for_those_that_read() -> (
    None
):
    router = router_of("ab", predict=5.0)
    first = router.reserve(PROMPT, reads_cache=False)
    again = router.select(PROMPT, reads_cache=False)
    assert (again.rank != first.rank, again.tokens, again.predicted_tokens) == (True, 0, 0)
    sibling = router.select(PROMPT)
    assert (sibling.rank, sibling.predicted_tokens) == (first.rank, WHOLE)


def test_a_prediction_ends_with_its_cancelled_booking() -> None:
    router = router_of("a", predict=5.0)
    router.reserve(PROMPT).cancel()
    assert router.select(PROMPT).tokens == 0


def test_a_rank_that_is_not_live_is_predicted_to_hold_nothing() -> None:
    followed = Followed(fleet("ab"))
    router = Router(followed, predict=5.0)
    router.reserve(PROMPT, ranks="a")
    assert router.select(PROMPT, ranks="a").predicted_tokens == WHOLE
    followed.live = frozenset([B])
    decision = router.select(PROMPT, ranks="a")
    assert (decision.tokens, decision.predicted_tokens) == (0, 0)


def test_predictions_of_a_rank_that_was_removed_are_forgotten(clock: Clock) -> None:
    index = fleet("a")
    router = Router(index, clock=clock, predict=5.0)
    first, second = router.reserve(PROMPT), router.reserve(PROMPT)
    index.remove(A)
    hold(index, B, 0)
    assert router.select(PROMPT).rank == B
    assert router.statistics()["predictions"] == {"made": 2, "blocks": 0}
    first.finish()
    second.cancel()
    clock.now += 6.0
    index.add(A)
    assert router.select(PROMPT, ranks="a").tokens == 0  # its engine has restarted


DIGEST = "sha256:ab"  # TensorRT-LLM has the digests of images among its tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [DIGEST, *range(1, 33)],
        [*range(32), DIGEST],  # only the last token, which no lookup needs, is text
        [2**63 + 5, *range(32)],
        [-1, *range(32)],
        deque(range(33)),
        array("I", [2**32 - 1, *range(32)]),
        memoryview(array("Q", [2**64 - 1, *range(32)])),
    ],
    ids=["text", "text at the end", "large", "negative", "deque", "4 bytes", "8 bytes"],
)
def test_every_prompt_that_is_routed_is_predicted_too(tokens: Any) -> None:
    index = fleet("ab")
    stored = BlockStored(
        block_hashes=[1], token_ids=[text_token(DIGEST), *range(101, 116)], block_size=BLOCK
    )
    index.apply(A, EventBatch(ts=0.0, events=[stored]))
    router = Router(index, predict=5.0)
    router.reserve(PROMPT)  # so that predictions are queried, though none has text
    first, second = router.reserve(tokens), router.reserve(tokens)
    assert second.decision.predicted_tokens == 32
    assert second.rank == first.rank


def test_a_prompt_that_cannot_be_predicted_leaks_no_load() -> None:
    router = router_of("a", predict=5.0)
    unread = [*range(5_000), 2**64, *range(32)]  # the index reads the beginning: nobody holds it
    assert router.select(unread).rank == A
    with pytest.raises(TokenError, match="does not fit into 64 bits"):
        router.reserve(unread)
    assert router.load(A) == NOTHING


def test_predictions_distinguish_loras_salts_and_extra_keys() -> None:
    router = router_of({"a": 9}, predict=5.0)
    extra = [None, (("image", 3),)]
    for options in ({"lora": "french"}, {"salt": "s"}, {"lora": 3}, {"extra_keys": extra}):
        router.reserve(PROMPT, **options)
        assert router.select(PROMPT, **options).tokens == WHOLE
    assert router.select(PROMPT).predicted_tokens == 0
    assert router.select(PROMPT, lora="german").tokens == 0


def test_the_end_of_a_prediction_leaves_that_of_another_lora() -> None:
    router = router_of("a", predict=5.0)
    french, german = (router.reserve(PROMPT, lora=lora) for lora in ("french", "german"))
    french.cancel()
    assert router.select(PROMPT, lora="french").predicted_tokens == 0
    assert router.select(PROMPT, lora="german").predicted_tokens == WHOLE
    german.cancel()
    assert router.select(PROMPT, lora="german").predicted_tokens == 0
