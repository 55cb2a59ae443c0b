"""How engines are asked and followed."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import msgspec

from kvindex.wire.errors import ConfigurationError

__all__ = ["DiscoveryOptions"]


class DiscoveryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How engines are asked and followed.

    Attributes:
        interval: seconds between two questions to an engine. An engine that has not answered yet
            is asked after a second, and then less and less often.
        forget_after: seconds for which an engine that no longer answers is kept.
        timeout: seconds in which an engine must have answered.
        token: the engines' API key; a function returns the present one.
        context: of TLS, for engines at https; certificates are checked as the system does.

    Raises:
        ConfigurationError: a time is not above 0.
    """

    interval: float = 10.0
    forget_after: float = 300.0
    timeout: float = 5.0
    token: str | Callable[[], str | None] | None = None
    context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        for name in ("interval", "forget_after", "timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 1e6:
                raise ConfigurationError(f"{name} must be above 0 seconds, not {value!r}")
