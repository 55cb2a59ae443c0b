"""POST /outcomes: a router reports what became of a finished request, in tokens."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvindex.service.asking import UNREADABLE, media_type
from kvindex.service.catalog import DEFAULT_GROUP, Partition
from kvindex.service.dialects import dynamo
from kvindex.service.replies import JSON, Reply, json_reply, text_reply
from kvindex.service.service import Service

__all__ = ["Outcome", "take_outcome"]

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Outcome(msgspec.Struct, frozen=True):
    """The body of POST /outcomes: one finished request, in tokens.

    Attributes:
        model_name, routing_group: whose.
        asked: in its prompt.
        attainable: of these, those that the best rank held when it was routed.
        chosen: those that the chosen rank was expected to find cached.
        delivered: those that its engine did find; null if it did not say.
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


def take_outcome(service: Service, body: bytes, content_type: bytes | None) -> Reply:
    """Count what a body reports, and return the answer."""
    if media_type(content_type) != JSON:
        return text_reply(415, "send the body with content-type: application/json")
    try:
        one = msgspec.json.decode(body, type=Outcome)
    except msgspec.ValidationError as error:
        return text_reply(422, f"the body has not the right form: {error}")
    except UNREADABLE as error:
        return text_reply(400, f"the body is no JSON: {error}")
    if one.partition not in service.catalog.partitions:
        return dynamo.nobody(service.catalog, one.partition)
    service.traffic.outcome(one.partition, one.asked, one.attainable, one.chosen, one.delivered)
    return json_reply(200, {"status": "ok"})
