"""A running service's fleet over HTTP: read now and then, and news as they come."""

from __future__ import annotations

import os
import ssl
import threading
from typing import Final

import msgspec

from kvindex import ConfigurationError, KVIndexError
from kvindex.service.overview import Fleet
from kvindex.subscribe.discovery.web import HttpReply, Web
from kvindex.wire.errors import DiscoveryError

__all__ = ["ServiceError", "ServiceFleet"]

_FLEET: Final = "/api/fleet"
_TIMEOUT: Final = 10.0  # seconds for a whole answer
_SILENCE: Final = 30.0  # seconds; a service says something every 10
_MOST_BYTES: Final = 64 << 20
_MOST_LINE: Final = 8 << 20
_AGAIN: Final = 2.0  # seconds between two attempts to listen


class ServiceError(KVIndexError):
    """A service could not be asked.

    Attributes:
        url: what was asked.
        reason: what is wrong.
    """

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url
        self.reason = reason


class ServiceFleet:
    """A service's report of its fleet.

    Args:
        url: where it listens. A token is taken from the environment, KVINDEX_TOKEN.
        cacert: file of the authorities to trust; the system's by default.

    Raises:
        ConfigurationError: the URL cannot work, or the file cannot be read.

    Thread safety: `read` on one thread.
    """

    def __init__(self, url: str, cacert: str | None = None) -> None:
        if "//" not in url:
            url = f"http://{url}"
        try:
            trusted = ssl.create_default_context(cafile=cacert)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"--cacert {cacert}: {error}") from None
        self._web = Web(url, token=os.environ.get("KVINDEX_TOKEN"), context=trusted)
        self.url = self._web.url
        self._closed = threading.Event()

    def read(self) -> Fleet:
        """Return the fleet as it is now.

        Raises:
            ServiceError: it cannot be asked, or answers something else.
        """
        try:
            answer = self._web.get(_FLEET, _TIMEOUT, limit=_MOST_BYTES)
            if answer.status != 200:
                raise ServiceError(self.url, _said(answer))
            return msgspec.json.decode(answer.body, type=Fleet)
        except msgspec.DecodeError as error:
            why = f"it answers something else than kvindex serve of this version ({error})"
            raise ServiceError(self.url, why) from None
        except DiscoveryError as error:
            raise ServiceError(self.url, _unreached(error)) from None

    def watch(self, changed: threading.Event) -> None:
        """Set an event whenever something happens to the fleet, until `close`."""
        threading.Thread(
            target=self._listen, args=(changed,), name="kvindex-top-news", daemon=True
        ).start()

    def close(self) -> None:
        """Listen no longer. Idempotent."""
        self._closed.set()

    def _listen(self, changed: threading.Event) -> None:
        while not self._closed.is_set():
            try:
                with self._web.open("/events", _SILENCE) as news:
                    while line := news.read_line(_MOST_LINE, _SILENCE):
                        if line.startswith(b"event:"):
                            changed.set()
                        if self._closed.is_set():
                            return
            except DiscoveryError:
                pass  # the next read says what is wrong
            self._closed.wait(_AGAIN)


def _unreached(error: DiscoveryError) -> str:
    """Say why a service was not reached; what failed in TLS does run there."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted: {cause.verify_message}"
        return f"{why}; name the file of its authority with --cacert"
    if isinstance(cause, ssl.SSLError):
        return f"TLS fails: {cause}; does it listen for https there?"
    why = str(error).removeprefix(f"{error.url}{_FLEET} ")
    return f"it {why}; is kvindex serve running there?"


def _said(answer: HttpReply) -> str:
    if answer.status == 401:
        return "it wants its token: set KVINDEX_TOKEN"
    if answer.status == 404:
        return f"it has no {_FLEET}: is it kvindex serve?"
    return f"it answers {answer.status}: {answer.body[:300].decode(errors='replace')}"
