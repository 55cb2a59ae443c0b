"""The settings of `kvindex gateway`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvindex import ConfigurationError
from kvindex.service.http import Limits, Listening
from kvindex.wire.nats import NatsPool

MOST_BODY: Final = 64 << 20
"""Bytes of a request's body by default: images come as text within it."""


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway serves; the engines come beside it.

    Attributes:
        listening: where it listens, and whom it admits.
        open_requests: most open requests of a rank; None: no limit.
        queued_tokens: most tokens that wait for their prefill on a rank; None: no limit.
        waiting: requests of one model that may wait for a rank with room.
        queue_within: seconds for which a request may wait.
        head_within: seconds until an engine begins to answer. A whole answer begins when all of it
            is generated, so this is its longest generation.
        silent_within: seconds for which an engine may send nothing of an answer that has begun.
        tokens_within: seconds that a request may wait for its tokens.
        tokenizers: folders with a model's tokenizer and chat template, by the model's name; "": for
            any other model.
        drain: seconds for open requests to end in, once the gateway is to end.
        policy: of the routers; see `kvindex.routing.POLICIES`.
        pool: on NATS; then its relay follows the engines' events, this gateway has a replica of the
            relay's index, and it shares its load with the pool's other gateways.

    Raises:
        ConfigurationError: a value cannot work, with what would.
    """

    listening: Listening = Listening(port=8080, limits=Limits(body_bytes=MOST_BODY))
    open_requests: int | None = None
    queued_tokens: int | None = None
    waiting: int = 1024
    queue_within: float = 30.0
    head_within: float = 600.0
    silent_within: float = 300.0
    tokens_within: float = 2.0
    tokenizers: Mapping[str, str] = {}
    drain: float = 30.0
    policy: str = "kvindex"
    pool: NatsPool | None = None

    def __post_init__(self) -> None:
        for name in ("queue_within", "head_within", "silent_within", "tokens_within", "drain"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} must be above 0 s, not {getattr(self, name)!r}")
        if self.waiting < 0:
            raise ConfigurationError(f"waiting must be 0 or more, not {self.waiting}")
