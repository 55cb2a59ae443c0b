"""Predictions: the blocks that ranks will soon hold, because prompts were just sent to them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvindex.index import ExtraKeys, Hits, Index, Lora, Match, RankRows, TokenIds
from kvindex.index.tokens import Prompt as LazyTokens
from kvindex.routing.bookings import Booking, Stage
from kvindex.wire import BlockRemoved, BlockStored, EventBatch
from kvindex.wire.errors import TokenError
from kvindex.wire.rank import Rank

__all__ = ["Predictions", "Prompt"]

_MASK = 2**64 - 1


class Prompt(NamedTuple):
    """A request's question to an index.

    Attributes:
        token_ids, lora, salt, extra_keys: as for `Index.match`.
        reads_cache: whether the engine will read its cache. It caches the prompt in any case.
    """

    token_ids: TokenIds
    lora: Lora
    salt: str | None
    extra_keys: ExtraKeys | None
    reads_cache: bool

    def ask(self, index: Index) -> Match:
        """Return the ranks' match of the prompt without its last token."""
        return index.match(
            self.token_ids,
            lora=self.lora,
            salt=self.salt,
            extra_keys=self.extra_keys,
            recomputed=1,
        )

    def packed(self, length: int) -> array[int]:
        """Return its first tokens as 64-bit ints, whatever form they have: text, too. O(length).

        Raises:
            TokenError: one of them is no token; the index checks only the tokens it needs.
        """
        return array("q", LazyTokens(self.token_ids).packed(0, length))


class _Sent(NamedTuple):
    """The blocks of one prompt that was sent, by names of our own."""

    rank: Rank
    block_hashes: list[int]


class Predictions:
    """The blocks that ranks were sent a moment ago.

    They lie in an index of their own, apart from the blocks that events reported. A prediction
    lasts from the booking until so many seconds after its first token (by then, the engine's event
    must have come), or until the booking is cancelled.

    Args:
        seconds: how long after the first token.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._index = Index()
        self._ranks: set[Rank] = set()  # of the index
        self._open: dict[Booking, _Sent] = {}
        self._ending: deque[tuple[float, _Sent]] = deque()
        self._made = 0

    def send(self, booking: Booking, prompt: Prompt, block_size: int) -> None:
        """Predict that a rank will hold the prompt's whole blocks. O(tokens).

        Raises:
            TokenError: as `Prompt.packed`.
        """
        blocks = len(prompt.token_ids) // block_size
        if not blocks:
            return
        tokens = prompt.packed(blocks * block_size)
        extras: list[Any] = [item and tuple(item) for item in prompt.extra_keys or ()][:blocks]
        extras += [None] * (blocks - len(extras))
        if prompt.salt:
            extras[0] = (*(extras[0] or ()), prompt.salt)
        names = _names(tokens, block_size, prompt.lora, extras)
        stored = BlockStored(
            block_hashes=[*names],
            parent_block_hash=None,
            token_ids=tokens.tolist(),
            block_size=block_size,
            lora_name=prompt.lora if isinstance(prompt.lora, str) else None,
            lora_id=prompt.lora if isinstance(prompt.lora, int) else None,
            extra_keys=extras if any(extras) else None,
        )
        self._open[booking] = _Sent(booking.rank, names)  # first, so that it is sure to end
        self._ranks.add(booking.rank)
        self._index.apply(booking.rank, EventBatch(ts=0.0, events=[stored]))
        self._made += 1

    def confirm(self, booking: Booking, now: float) -> None:
        """Schedule the end of a prediction: the first token has come. O(1)."""
        sent = self._open.get(booking)
        if sent is not None:
            self._ending.append((now + self._seconds, sent))
            self._open.pop(booking, None)

    def end(self, booking: Booking, now: float) -> None:
        """End a prediction: soon, if the request has its answer, else before the next choice.

        Not at once: the index refuses finalizers and signal handlers that interrupt a change of it.
        """
        if booking.stage is Stage.FINISHED:
            self.confirm(booking, now)
            return
        sent = self._open.get(booking)
        if sent is not None:
            self._ending.appendleft((now, sent))
            self._open.pop(booking, None)

    def expire(self, now: float) -> None:
        """End the predictions whose time is over. O(1) if there are none."""
        while self._ending and self._ending[0][0] <= now:
            first = self._ending[0]
            self._remove(first[1])
            # Only now, so that an interrupted step is done again.
            if self._ending and self._ending[0] is first:
                self._ending.popleft()

    def keep(self, ranks: Collection[Rank]) -> None:
        """Forget the predictions of ranks that are not among these. O(ranks)."""
        for rank in self._ranks.difference(ranks):
            self._index.remove(rank)
            self._ranks.discard(rank)

    def added_to(self, confirmed: Hits, prompt: Prompt, rows: RankRows, live: bytes) -> Hits:
        """Return each rank's hit by events or by prediction, whichever is more. O(tokens + ranks).

        Ranks that are not live hold nothing, whatever they were sent.
        """
        if not len(self._index):
            return confirmed
        try:
            match = prompt.ask(self._index)
        except TokenError:  # text, of which this index has seen none yet
            match = prompt._replace(token_ids=prompt.packed(len(prompt.token_ids))).ask(self._index)
        predicted = match.hits(rows, live)
        columns = zip(confirmed[:3], predicted[:3], strict=True)
        device, host, tokens = (array("q", map(max, *pair)) for pair in columns)
        return Hits(device, host, tokens, confirmed.block_size)

    def statistics(self) -> dict[str, int]:
        """Return how many predictions were `made`, and how many `blocks` are predicted now."""
        return {"made": self._made, "blocks": len(self._index)}

    def _remove(self, sent: _Sent) -> None:
        if sent.rank not in self._ranks:
            return  # forgotten with its rank
        removed = BlockRemoved(block_hashes=list(sent.block_hashes))
        self._index.apply(sent.rank, EventBatch(ts=0.0, events=[removed]))


def _names(tokens: array[int], block_size: int, lora: Lora, extras: Sequence[object]) -> list[int]:
    """Return a name for each block: the same for the same block after the same prefix."""
    names = []
    data = memoryview(tokens).cast("B")
    step = block_size * tokens.itemsize
    name = hash(lora)
    for block, extra in enumerate(extras):
        own = bytes(data[block * step : (block + 1) * step])
        name = hash((name, own, repr(extra))) & _MASK
        names.append(name)
    return names
