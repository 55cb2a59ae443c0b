"""POST /outcomes: a router reports the cached tokens of a finished request."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvindex.service.apis import dynamo
from kvindex.service.catalog import DEFAULT_GROUP, Partition
from kvindex.service.http.messages import Reply, Request, json_reply, read_json
from kvindex.service.service import Service

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Outcome(msgspec.Struct, frozen=True):
    """The body of POST /outcomes: one finished request, in tokens.

    Attributes:
        model_name, routing_group: the partition.
        asked: in its prompt.
        attainable: of these, those that the best rank held when it was routed.
        chosen: those that the chosen rank was expected to find cached.
        delivered: those that its engine did find; null if it did not report them.
    """

    model_name: str
    asked: _Tokens
    attainable: _Tokens
    chosen: _Tokens
    delivered: _Tokens | None = None
    routing_group: str = DEFAULT_GROUP

    def __post_init__(self) -> None:
        for name in ("attainable", "chosen", "delivered"):
            if (getattr(self, name) or 0) > self.asked:
                raise ValueError(f"{name} must not be more than asked, {self.asked} tokens")

    @property
    def partition(self) -> Partition:
        """Whose it is."""
        return Partition(self.model_name, self.routing_group)


def count_outcome(service: Service, request: Request) -> Reply:
    """Count what a router reports, and return the answer."""
    report = read_json(request, Outcome)
    if report.partition not in service.catalog.partitions:
        return dynamo.not_registered(service.catalog, report.partition)
    service.traffic.outcome(
        report.partition, report.asked, report.attainable, report.chosen, report.delivered
    )
    return json_reply(200, {"status": "ok"})
