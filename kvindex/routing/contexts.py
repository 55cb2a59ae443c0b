"""Contexts: what ranks have to keep, for the sessions that will probably go on there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Final

from kvindex.index.tokens import pack_tokens, readable
from kvindex.routing.fleet import RoutedRequest
from kvindex.routing.load import LoadBoard
from kvindex.routing.policies import Decision
from kvindex.wire.rank import Rank

CONTEXT_LIFE: Final = 300.0
"""Seconds after a session's last request for which its context counts."""

MOST_CONTEXTS: Final = 16_384
_STEP: Final = 2_048  # tokens; a prompt's marks lie at the multiples of it
_BACK: Final = 512  # tokens at a prompt's end that have no mark: agents often change the last
_MARK: Final = 16  # tokens before a multiple that are compared
_MOST_LOOKS: Final = 16


@dataclass(slots=True, eq=False)
class Context:
    """The prompt of a session's last request, and where it was sent."""

    rank: Rank
    noted_at: float
    tokens: int = 0  # as the board counts them


class Contexts:
    """The contexts of the sessions that a router has served lately; the board counts them.

    No caller names sessions: a prompt goes on with a context if it has the same tokens at the last
    mark of that. A context counts where its last request was sent, for `CONTEXT_LIFE` after that;
    nobody says when a session ends. Prompts below 2,560 tokens have no mark: they are soon computed
    again; nor are sessions told apart that have as little of their own.

    An interrupt (Ctrl-C) at any moment leaves the board with the tokens of the contexts that are
    there: each step is done as a whole or not at all.

    Thread safety: a router calls it under its lock.
    """

    def __init__(self, loads: LoadBoard, blocks: Callable[[Rank], int | None]) -> None:
        self._loads = loads
        self._blocks = blocks  # returns how many a rank holds now; None: it has gone
        # By the last mark of their prompts; the longest without a request first.
        self._open: OrderedDict[Hashable, Context] = OrderedDict()
        self._dropped = 0

    def note(self, request: RoutedRequest, decision: Decision, now: float) -> None:
        """Note where a prompt is sent. O(1); raises TokenError."""
        if len(request.token_ids) < _STEP + _BACK:
            return
        tokens, lora, salt = readable(request.token_ids), request.lora, request.salt
        last = (len(tokens) - _BACK) // _STEP * _STEP
        newest = None
        for end in range(last, max(0, last - _MOST_LOOKS * _STEP), -_STEP):
            mark = (end, lora, salt, pack_tokens(tokens[end - _MARK : end]))
            newest = newest or mark
            if mark in self._open:
                self._forget(mark)
                break
        self._open[newest] = context = Context(decision.rank, now)
        blocks = self._blocks(decision.rank)
        held = None if blocks is None else blocks * decision.own_block_size
        self._hold(context, len(tokens), held)  # of several prompts, the one that is known
        while len(self._open) > MOST_CONTEXTS:
            self._forget(next(iter(self._open)))
            self._dropped += 1

    def expire(self, now: float) -> None:
        """Forget the contexts that had no request for long. O(1) if there are none."""
        while self._open:
            mark, oldest = next(iter(self._open.items()))
            if now - oldest.noted_at < CONTEXT_LIFE:
                return
            self._forget(mark)

    def keep(self, ranks: Collection[Rank]) -> None:
        """Forget the contexts of ranks that are not among these. O(contexts)."""
        kept = set(ranks)
        for mark in [mark for mark, context in self._open.items() if context.rank not in kept]:
            self._forget(mark)

    def statistics(self) -> dict[str, int]:
        """Return how many contexts are `open`, and how many were `dropped` as too many."""
        return {"open": len(self._open), "dropped": self._dropped}

    def _forget(self, mark: Hashable) -> None:
        self._hold(self._open[mark], 0)
        del self._open[mark]  # last: what was interrupted is done again

    def _hold(self, context: Context, tokens: int, held: int | None = None) -> None:
        """Have the board count so many tokens of a context: all or, interrupted, as before."""
        before, context.tokens = context.tokens, tokens
        try:
            self._loads.hold(context.rank, tokens - before, held)
        except BaseException:
            context.tokens = before
            raise
