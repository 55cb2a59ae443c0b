"""The policies by name: ours, and plain ones to compare with."""

from __future__ import annotations

import math
from typing import Final

from kvindex.routing.candidates import Candidates, Choice, Policy
from kvindex.routing.choosing import Weights, choose
from kvindex.wire.errors import ConfigurationError

__all__ = ["POLICIES", "CostPolicy", "make_policy"]


class CostPolicy:
    """Chooses the rank where a request costs least, with or without an affinity filter.

    Args:
        name: its name in decisions.
        weights: the weights of the cost; `decode` is here for a token of a block, not for a block.
        slack_seconds: seconds of prefill, at the measured rate, by which the best rank that holds
            enough of the prompt may be behind the best of all; None for `weights.slack`.

    Attributes:
        weights: the weights of the cost.

    Raises:
        ConfigurationError: a weight is no finite number; `slack` may be infinite.

    Examples:
        >>> fewest = CostPolicy("fewest-requests", Weights(new=0.0, queued=0.0, request=1.0))
        >>> fewest.name
        'fewest-requests'
    """

    def __init__(self, name: str, weights: Weights, *, slack_seconds: float | None = None) -> None:
        if not all(map(math.isfinite, weights._replace(slack=0.0))) or math.isnan(weights.slack):
            raise ConfigurationError(f"a weight of policy {name!r} is no finite number: {weights}")
        self.name = name
        self.weights = weights
        self._slack_seconds = slack_seconds
        self._scaled = (0, 0.0, weights)  # for a block size and a slack in tokens

    def choose(self, candidates: Candidates) -> Choice:
        """Choose the cheapest rank."""
        chosen = choose(
            candidates.prompt_tokens,
            candidates.hits,
            candidates.loads,
            candidates.usable,
            self._weights_for(candidates.block_size, candidates.prefill_rate),
            candidates.chance,
        )
        kept = chosen.kept if self.weights.affinity else None
        return Choice(chosen.row, chosen.costs, kept, chosen.stayed, attainable=chosen.attainable)

    def _weights_for(self, block_size: int, prefill_rate: float) -> Weights:
        """Return the weights, `decode` for a block and `slack` in tokens."""
        own, seconds = self.weights, self._slack_seconds
        slack = own.slack if seconds is None else seconds * prefill_rate
        known_size, known_slack, scaled = self._scaled
        if block_size != known_size or slack != known_slack:
            scaled = own._replace(decode=own.decode * block_size, slack=slack)
            self._scaled = (block_size, slack, scaled)
        return scaled


class RoundRobin:
    """Each rank in its turn, whatever its blocks and load."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Candidates) -> Choice:
        """Choose a rank; see `Policy`."""
        rows = candidates.rows()
        self._turn += 1
        return Choice(rows[(self._turn - 1) % len(rows)], why="it is its turn")


_WEIGHTS: Final[dict[str, tuple[Weights, float | None]]] = {
    # Ours. A token that is computed again costs its time, and as much twice more: all behind it
    # wait, and its block evicts others. docs/routing.md lists the alternatives tried.
    "kvindex": (Weights(new=3.0, request=256.0, backlog=1.0, churn=1.0), None),
    # Keep homes: ranks that hold 0.8 of the prompt, unless they are 5 s of prefill behind.
    "affinity": (Weights(request=256.0, affinity=0.8), 5.0),
    "least-queued": (Weights(0.0, 0.0, 0.0, new=0.0), None),
    "least-requests": (Weights(0.0, 0.0, 0.0, new=0.0, queued=0.0, request=1.0), None),
    "longest-prefix": (Weights(queued=0.0), None),
}
POLICIES: Final = (*_WEIGHTS, RoundRobin.name)
"""The names of the policies; "kvindex" is the default, "least-queued" looks at load alone."""


def make_policy(policy: Policy | str) -> Policy:
    """Return a policy by its name, or the policy itself.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if not isinstance(policy, str):
        return policy
    if policy in _WEIGHTS:
        weights, seconds = _WEIGHTS[policy]
        return CostPolicy(policy, weights, slack_seconds=seconds)
    if policy == RoundRobin.name:
        return RoundRobin()
    raise ConfigurationError(f"policy is {policy!r}; the names are: {', '.join(POLICIES)}")
