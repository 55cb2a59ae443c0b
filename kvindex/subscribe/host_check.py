"""Whether the name in an endpoint is known at all.

ZeroMQ does not tell a name that cannot be resolved from a port where nothing listens. So it is
resolved once more, when there is trouble, on a thread of its own: that may take long.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["HostCheck"]

_AGAIN_AFTER = 30.0  # seconds: names come to be known later
_HOST = re.compile(r"tcp://(?:[^;]*;)?\[?(.*?)\]?:\d+")


class HostCheck:
    """What resolving an endpoint's host came to.

    Args:
        endpoint: where somebody tries to connect to.
        resolve: as `socket.getaddrinfo`.

    Attributes:
        trouble: why its host is unknown; "" if it is known, None while that is not known.

    Thread safety: `ask` by one thread; `trouble` can be read by any.
    """

    def __init__(
        self, endpoint: str, resolve: Callable[[str, None], Any] = socket.getaddrinfo
    ) -> None:
        found = _HOST.fullmatch(endpoint)
        self._host = "" if found is None else found[1]
        self._resolve = resolve
        self._asked_at: float | None = None
        self._asking: threading.Thread | None = None
        self.trouble: str | None = None if self._is_name else ""

    @property
    def _is_name(self) -> bool:
        try:
            ipaddress.ip_address(self._host)
        except ValueError:
            return bool(self._host)
        return False

    def ask(self, now: float) -> None:
        """Resolve it in the background, unless that was done just now."""
        asking = self._asking is not None and self._asking.is_alive()
        recent = self._asked_at is not None and now - self._asked_at < _AGAIN_AFTER
        if asking or recent or not self._is_name:
            return
        self._asked_at = now
        self._asking = threading.Thread(target=self._run, name="kvindex-resolve", daemon=True)
        self._asking.start()

    def _run(self) -> None:
        try:
            self._resolve(self._host, None)
        except (OSError, UnicodeError) as error:
            self.trouble = f"the host {self._host!r} is unknown ({error})"
        else:
            self.trouble = ""
