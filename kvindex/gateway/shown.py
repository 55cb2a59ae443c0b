"""A gateway's engines and traffic, as the page of `kvindex serve` shows them."""

from __future__ import annotations

from collections.abc import Mapping

from kvindex.gateway.exchange import End, Exchange
from kvindex.gateway.routers import Routers
from kvindex.service.catalog import Catalog, Partition, Registration
from kvindex.service.traffic import Traffic


class Shown:
    """What the page reads of a gateway.

    Args:
        routers: of the gateway.

    Attributes:
        source: the index and the states of its ranks.
        traffic: what was asked, by model.

    Owner: one event loop; `catalog` and `missing` also from the page's threads.
    """

    def __init__(self, routers: Routers) -> None:
        self.source = routers.source
        self.traffic = Traffic()
        self._routers = routers
        self._made: tuple[object, Catalog] = (None, Catalog())

    @property
    def catalog(self) -> Catalog:
        """The engines' ranks, by model."""
        servings = self._routers.models.servings()
        if servings is not self._made[0]:
            entries = [
                Registration(
                    instance_id=each.worker,
                    partition=Partition(each.models[0] if each.models else ""),
                    dp_rank=each.first_rank + number,
                    endpoint="",
                    source="discovery",
                    details={"engine": each.url},
                )
                for each in servings.values()
                for number in range(each.ranks)
            ]
            self._made = servings, Catalog(entries)
        return self._made[1]

    def missing(self) -> Mapping[str, str]:
        """Return the engines that were not found yet, and why."""
        return self._routers.missing()

    def count(self, exchange: Exchange) -> None:
        """Count a request that has ended. O(ranks)."""
        place = exchange.place
        if place is None or not place.serving.models:
            return
        partition = Partition(place.serving.models[0])
        asked, attainable = exchange.prompt_tokens, place.attainable
        self.traffic.query(partition, asked, attainable, int((exchange.waited or 0.0) * 1e9))
        if exchange.end is End.WHOLE:
            delivered = None if exchange.usage is None else exchange.usage.cached_tokens
            self.traffic.outcome(partition, asked, attainable, place.held, delivered)
