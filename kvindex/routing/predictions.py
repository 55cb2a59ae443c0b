"""Predictions: the blocks that ranks will soon hold, because prompts were just sent to them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

from kvindex.index import Hits, Index, RankRows
from kvindex.index.tokens import Prompt
from kvindex.routing.fleet import RoutedRequest
from kvindex.wire import BlockRemoved, BlockStored, EventBatch
from kvindex.wire.errors import TokenError
from kvindex.wire.rank import Rank

_MASK = 2**64 - 1


class Prediction(NamedTuple):
    """The blocks of one prompt that was sent to a rank, by names of our own."""

    rank: Rank
    block_hashes: list[int]


class Predictions:
    """The blocks of prompts that were sent to ranks a moment ago.

    They lie in an index of their own, apart from the blocks that events reported. A prediction
    lasts from the booking until so many `seconds` after its first token (by then, the engine must
    have sent its event), or until the booking is cancelled. With `seconds` None, there are none.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._index = Index()
        self._ending: deque[tuple[float, Prediction]] = deque()  # the earliest first
        self._made = 0

    def prepare(
        self, rank: Rank, request: RoutedRequest, block_size: int
    ) -> tuple[Prediction, BlockStored] | None:
        """Return the prediction of a prompt's whole blocks, and their event for `add`. O(tokens).

        None if there is no whole block, or nothing is predicted.

        Raises:
            TokenError: a token is none; an index checks only the tokens that it needs.
        """
        blocks = len(request.token_ids) // block_size
        if not blocks or self._seconds is None:
            return None
        tokens = _packed(request, blocks * block_size)
        extras: list[Any] = [item and tuple(item) for item in request.extra_keys or ()][:blocks]
        extras += [None] * (blocks - len(extras))
        if request.salt:
            extras[0] = (*(extras[0] or ()), request.salt)
        # A block's name is the same for the same block after the same prefix.
        names = []
        data, step = memoryview(tokens).cast("B"), block_size * tokens.itemsize
        name = hash(request.lora)
        for block, extra in enumerate(extras):
            content = bytes(data[block * step : (block + 1) * step])
            name = hash((name, content, repr(extra))) & _MASK
            names.append(name)
        stored = BlockStored(
            block_hashes=[*names],
            parent_block_hash=None,
            token_ids=tokens.tolist(),
            block_size=block_size,
            lora_name=request.lora if isinstance(request.lora, str) else None,
            lora_id=request.lora if isinstance(request.lora, int) else None,
            extra_keys=extras if any(extras) else None,
        )
        return Prediction(rank, names), stored

    def add(self, prediction: Prediction, stored: BlockStored) -> None:
        """Let a prediction count from now on."""
        self._index.apply(prediction.rank, EventBatch(ts=0.0, events=[stored]))
        self._made += 1

    def end(self, prediction: Prediction, now: float, *, at_once: bool) -> None:
        """Schedule the end of a prediction: now, or `seconds` from now. O(1)."""
        if at_once or self._seconds is None:
            self._ending.appendleft((now, prediction))
        else:
            self._ending.append((now + self._seconds, prediction))

    def expire(self, now: float) -> None:
        """End the predictions whose time is over. O(1) if there are none."""
        while self._ending and self._ending[0][0] <= now:
            rank, block_hashes = self._ending[0][1]
            removed = BlockRemoved(block_hashes=list(block_hashes))
            self._index.apply(rank, EventBatch(ts=0.0, events=[removed]))
            self._ending.popleft()  # only now: an interrupted step is done again

    def keep(self, ranks: Collection[Rank]) -> None:
        """Forget the predictions of ranks that are not among these. O(ranks)."""
        for rank in set(self._index.ranks).difference(ranks):
            self._index.remove(rank)

    def added_to(
        self, confirmed: Hits, request: RoutedRequest, rows: RankRows, counts: bytes
    ) -> Hits:
        """Return each rank's hit by events or by prediction, whichever is more. O(tokens + ranks).

        A rank with 0 in `counts` holds nothing, whatever it was sent.
        """
        if not len(self._index):
            return confirmed
        try:
            match = request.match(self._index)
        except TokenError:  # text, of which this index has seen none yet
            packed = _packed(request, len(request.token_ids))
            match = request._replace(token_ids=packed).match(self._index)
        columns = zip(confirmed[:3], match.hits(rows, counts)[:3], strict=True)
        device, host, tokens = (array("q", map(max, *pair)) for pair in columns)
        return Hits(device, host, tokens, confirmed.block_size)

    def statistics(self) -> dict[str, int]:
        """Return how many predictions were `made`, and how many `blocks` are predicted now."""
        if self._seconds is None:
            return {}
        return {"made": self._made, "blocks": len(self._index)}


def _packed(request: RoutedRequest, length: int) -> array[int]:
    """Return a prompt's first tokens as 64-bit ints, whatever form they have: text, too."""
    return array("q", Prompt(request.token_ids).packed(0, length))
