"""A running service's fleet over HTTP: read now and then, and news as they come."""

from __future__ import annotations

import http.client
import os
import ssl
import threading
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvindex import ConfigurationError, KVIndexError
from kvindex.server.overview import Fleet

__all__ = ["ServiceError", "ServiceFleet"]

_TIMEOUT: Final = 5.0
_SILENCE: Final = 30.0  # seconds; a service says something every 10
_MOST_BYTES: Final = 64 << 20
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
    """What a service tells of its fleet.

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
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigurationError(f"{url!r} is no URL of a service, e.g. http://127.0.0.1:8090")
        self.url = url.rstrip("/")
        token = os.environ.get("KVINDEX_TOKEN")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No proxy of the environment: services are asked directly.
        direct = urllib.request.ProxyHandler({})
        trusted = urllib.request.HTTPSHandler(context=_trusting(cacert))
        self._open = urllib.request.build_opener(direct, trusted).open
        self._closed = threading.Event()

    def read(self) -> Fleet:
        """Return the fleet as it is now.

        Raises:
            ServiceError: it cannot be asked, or answers something else.
        """
        try:
            with self._ask("/api/fleet", _TIMEOUT) as answer:
                return msgspec.json.decode(answer.read(_MOST_BYTES), type=Fleet)
        except urllib.error.HTTPError as error:
            with error:
                raise ServiceError(self.url, _said(error)) from None
        except msgspec.DecodeError as error:
            why = f"it answers something else than kvindex serve of this version ({error})"
            raise ServiceError(self.url, why) from None
        except urllib.error.URLError as error:
            raise ServiceError(self.url, _unreached(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
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
                with self._ask("/events", _SILENCE) as news:
                    for line in news:
                        if line.startswith(b"event:"):
                            changed.set()
                        if self._closed.is_set():
                            return
            except (OSError, http.client.HTTPException):
                pass  # the next read says what is wrong
            self._closed.wait(_AGAIN)

    def _ask(self, path: str, timeout: float) -> Any:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        return self._open(request, timeout=timeout)


def _trusting(cacert: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cacert)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--cacert {cacert}: {error}") from None


def _unreached(error: BaseException | str) -> str:
    """Say why a service was not reached; what failed in TLS does run there."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted: {error.verify_message}"
        return f"{why}; name the file of its authority with --cacert"
    if isinstance(error, ssl.SSLError):
        return f"TLS fails: {error}; does it listen for https there?"
    return f"it does not answer: {error}; is kvindex serve running there?"


def _said(error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "it wants its token: set KVINDEX_TOKEN"
    if error.code == 404:
        return "it has no /api/fleet: is it kvindex serve?"
    return f"it answers {error.code}: {error.read(300).decode(errors='replace')}"
