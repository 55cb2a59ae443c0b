"""The policies by name: ours, and the field's own to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from kvindex.errors import ConfigurationError
from kvindex.routing.candidates import Candidates, Choice, Policy
from kvindex.routing.choosing import Weights, choose
from kvindex.routing.gates import RoundRobin, SpillGate, TwoTier

__all__ = ["POLICIES", "CostPolicy", "make_policy"]


class CostPolicy:
    """Takes the rank where a request costs least, with or without an affinity filter.

    Args:
        name: what decisions call it.
        weights: what things cost; `decode` is here for a token of a block, not for a block.
        slack_seconds: seconds of prefill, at the rate that is measured, by which the best rank that
            holds enough of the prompt may be behind the best of all; None for `weights.slack`.

    Attributes:
        weights: what things cost.

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


_PEAK_PREFILL: Final = 15_928.0  # tokens/s, of llm-d's configuration

_DYNAMO: Final = Weights(host=0.75, storage=0.25, decode=1.0)
_AGENTIC_BLOCK: Final = 16  # tokens: Dynamo weighs a request as 64 blocks
_WEIGHTS: Final[dict[str, tuple[Weights, float | None]]] = {
    # Ours. A token that is computed again costs its time, and as much twice more: all behind it
    # wait, and what it fills pushes others out. docs/routing.md says what was tried beside it.
    "kvindex": (Weights(new=3.0, request=256.0, backlog=1.0, churn=1.0), None),
    # Keep homes: ranks that hold 0.8 of the prompt, unless they are 5 s of prefill behind.
    "affinity": (Weights(request=256.0, affinity=0.8), 5.0),
    # arXiv 2603.15202, with the credits of vllm-router 0.1.17.
    "lmetric": (Weights(product=True), None),
    # Dynamo 1.6.1's default: prefill that waits plus blocks that decode.
    "dynamo": (_DYNAMO, None),
    # Dynamo's preset for agents: prefill scale 4, 64 blocks for a request, and credit 2, which is
    # for the device alone ("device-local prefix overlap").
    "dynamo-agentic": (
        _DYNAMO._replace(device=2.0, new=4.0, queued=4.0, request=64.0 * _AGENTIC_BLOCK),
        None,
    ),
    # llm-d's optimized baseline: a filter, then the fewest tokens in flight.
    "llm-d": (
        Weights(
            host=1.0,
            storage=1.0,
            new=0.0,
            queued=0.0,
            decode=1.0,
            affinity=0.8,
            slack=18.0 * _PEAK_PREFILL,
        ),
        None,
    ),
    "least-queued": (Weights(0.0, 0.0, 0.0, new=0.0), None),
    "least-requests": (Weights(0.0, 0.0, 0.0, new=0.0, queued=0.0, request=1.0), None),
    "longest-prefix": (Weights(queued=0.0), None),
}
_GATES: Final[dict[str, Callable[[], Policy]]] = {
    "smg-gate": SpillGate,
    "two-tier": TwoTier,
    "round-robin": RoundRobin,
}
POLICIES: Final = (*_WEIGHTS, *_GATES)
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
    if policy in _GATES:
        return _GATES[policy]()
    raise ConfigurationError(f"policy is {policy!r}; the names are: {', '.join(POLICIES)}")
