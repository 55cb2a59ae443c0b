"""The arithmetic of cost policies: from each rank's cached tokens and load to the cheapest rank.

`choose_in_python` is the specification. Its twin, `native/core/choosing.cpp`, gives the same bits.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, NamedTuple

from kvindex.index import Hits
from kvindex.routing.loads import LoadColumns
from kvindex.wire.backend import BACKEND

if TYPE_CHECKING or BACKEND == "native":
    from kvindex.wire._native import choose as core_choose

__all__ = ["Chosen", "Weights", "choose", "choose_in_python", "choose_natively"]


class Weights(NamedTuple):
    """The weights of a cost, in tokens of prefill.

    ```
    credited = device × tokens on the device + host × … + storage × …
    missing  = prompt tokens - credited
    price    = new + backlog × least queued tokens / prompt tokens
                   + churn × max(0, tokens given lately / their mean over ranks - 1)
    work     = max(0, queued × queued tokens + price × missing)
    cost     = work × (open requests + 1)                          if `product`, else
               work + decode × decode blocks + request × open requests
    ```

    Attributes:
        device: credit for a token that the device holds.
        host: for a token that the host holds, after the device's prefix.
        storage: for a token that lies further away, after that.
        new: weight of a token that this request has to prefill.
        queued: of a token that earlier requests have to prefill.
        decode: of a block that open requests occupy.
        request: of an open request.
        product: whether the cost is a product.
        affinity: ranks with a credit of at least this part of the prompt are preferred; 0: none.
        slack: how much the best of these may cost more than the best of all, in tokens; if it
            costs more, all ranks are equal again.
        backlog: weight of the tokens that wait on the rank with fewest, for an uncached prompt.
            They are 0 unless every rank has a backlog; then hits shorten it.
        churn: how much more a missing token costs on a rank that was given more tokens to prefill
            lately than the mean rank: it would evict the blocks stored there last.
    """

    device: float = 1.0
    host: float = 0.8
    storage: float = 0.3
    new: float = 1.0
    queued: float = 1.0
    decode: float = 0.0
    request: float = 0.0
    product: bool = False
    affinity: float = 0.0
    slack: float = math.inf
    backlog: float = 0.0
    churn: float = 0.0


class Chosen(NamedTuple):
    """The result.

    Attributes:
        row: the cheapest rank's row; -1 if no row is usable.
        kept: how many rows hold enough of the prompt to be preferred.
        stayed: whether one of these was chosen.
        attainable: the most tokens that a usable row holds.
        costs: one for each row; infinite where it is not usable.
    """

    row: int
    kept: int
    stayed: bool
    attainable: int
    costs: array[float]


def choose_in_python(
    prompt_tokens: int,
    hits: Hits,
    loads: LoadColumns,
    usable: bytes | bytearray,
    weights: Weights,
    chance: float,
) -> Chosen:
    """Return the cheapest rank, and every rank's cost.

    Among ranks of equal cost, the one that was given least lately comes first; among those that
    were given the same, chance decides.

    Args:
        prompt_tokens: tokens of the prompt.
        hits: the cached tokens of each row's rank.
        loads: the load of each row's rank.
        usable: for each row, whether it may be chosen.
        weights: the weights of the cost.
        chance: a random number in [0, 1).

    Complexity: O(rows).
    """
    costs = array("d")
    kept = []
    rows = []
    attainable = 0
    per_new = weights.new
    if prompt_tokens > 0:
        per_new += weights.backlog * _least_queued(loads, usable) / prompt_tokens
    mean_given = 0.0 if weights.churn == 0.0 else _mean_given(loads, usable)
    for row, may_be in enumerate(usable):
        if not may_be:
            costs.append(math.inf)
            continue
        device, host, tokens = hits.device[row], hits.host[row], hits.tokens[row]
        credited = (
            weights.device * device
            + weights.host * (host - device)
            + weights.storage * (tokens - host)
        )
        new = prompt_tokens - credited
        price = per_new
        if mean_given > 0.0:
            price += weights.churn * max(0.0, loads.given[row] / mean_given - 1.0)
        work = max(0.0, weights.queued * loads.queued[row] + price * new)
        if weights.product:
            cost = work * (loads.open[row] + 1.0)
        else:
            cost = work + weights.decode * loads.decode[row] + weights.request * loads.open[row]
        costs.append(math.inf if math.isnan(cost) else cost)
        rows.append(row)
        attainable = max(attainable, tokens)
        if weights.affinity > 0.0 and credited >= weights.affinity * prompt_tokens:
            kept.append(row)
    stayed = bool(kept) and _least(costs, kept) - _least(costs, rows) <= weights.slack
    among = kept if stayed else rows
    if not among:
        return Chosen(-1, 0, False, 0, costs)
    least = _least(costs, among)
    equal = [row for row in among if costs[row] == least]
    given = [math.inf if math.isnan(one) else one for one in loads.given]
    fewest = min(given[row] for row in equal)
    equal = [row for row in equal if given[row] == fewest]
    return Chosen(equal[int(chance * len(equal))], len(kept), stayed, attainable, costs)


def _least_queued(loads: LoadColumns, usable: bytes | bytearray) -> float:
    least = math.inf
    for queued, may_be in zip(loads.queued, usable, strict=True):
        if may_be and queued < least:
            least = queued
    return least if least < math.inf else 0.0


def _mean_given(loads: LoadColumns, usable: bytes | bytearray) -> float:
    """Return the mean of the tokens given to usable rows; 0 if it is no finite number."""
    total = 0.0
    rows = 0
    for given, may_be in zip(loads.given, usable, strict=True):
        if may_be:
            total += given
            rows += 1
    return total / rows if rows and 0.0 < total < math.inf else 0.0


def _least(costs: array[float], rows: list[int]) -> float:
    return min(costs[row] for row in rows)


def choose_natively(
    prompt_tokens: int,
    hits: Hits,
    loads: LoadColumns,
    usable: bytes | bytearray,
    weights: Weights,
    chance: float,
) -> Chosen:
    """Return the cheapest rank, and every rank's cost; as `choose_in_python`, to the bit.

    Raises:
        ValueError: a column has another length or other numbers than it should have.
    """
    costs = _ZERO * len(usable)
    row, kept, stayed, attainable = core_choose(
        prompt_tokens, hits, loads, usable, weights, chance, costs
    )
    return Chosen(row, kept, stayed, attainable, costs)


_ZERO = array("d", [0.0])

choose = choose_natively if BACKEND == "native" else choose_in_python
