"""How long the doctor waits, and how much it takes in."""

from __future__ import annotations

from typing import Final

import msgspec

from kvindex.wire.errors import ConfigurationError

__all__ = ["MAX_TARGETS", "Limits"]

MAX_TARGETS: Final = 1024
"""Most targets of one examination."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that an examination waits at most.

    Attributes:
        http: for the answers of one engine to what it is and how it stands.
        handshake: for a connection and for each greeting at a port.
        live: until every stream is live, or a replay brings more.
        replay: until every stream is live, as long as replays bring more.
        listen: for events: without a test prompt for all of it, with one until its events come.
        completion: for the answer to one prompt.

    Raises:
        ConfigurationError: one is not above 0.
    """

    http: float = 5.0
    handshake: float = 2.0
    live: float = 5.0
    replay: float = 60.0
    listen: float = 3.0
    completion: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            seconds = getattr(self, name)
            if not 0 < seconds <= 3600:
                raise ConfigurationError(f"{name} must be above 0 and up to 3600 s, not {seconds}")
