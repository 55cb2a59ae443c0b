"""A Kubernetes API server, as far as lists and watches go."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from kvindex.wire.errors import UNREADABLE, ConfigurationError, DiscoveryError
from kvindex.wire.web import Stream, Web

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its account's token, the API server's certificate, and its namespace."""

_PAGE = 500  # objects in one answer to a list
_MAX_PAGES = 200
_MAX_ANSWER = 64 << 20  # bytes of a page
_MAX_EVENT = 4 << 20  # bytes of one event; an object has 1.5 MB at most
_TIMEOUT = 30.0  # seconds for a list
_WATCH = 240  # seconds after which the server ends a watch, and a new one goes on
_SLACK = 15.0  # seconds beyond that until it is taken for dead


class KubeApi:
    """Lists and watches objects.

    Args:
        url: of the API server or a `kubectl proxy`; None for the one of the cluster that this
            process runs in.
        token: a file with the bearer token, which is read for each request since it is renewed;
            None for the service account's, if `url` is None.
        certificate: a file with the certificate that signed the server's; likewise.
        account: where the service account is; for tests.
        watch_seconds: for how long the server is asked to keep one watch.

    Raises:
        ConfigurationError: there is no cluster around this process, or a file cannot be used.

    Thread safety: one thread, but for `close`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        account: Path | None = None,
        watch_seconds: int = _WATCH,
    ) -> None:
        self.namespace: str | None = None
        if url is None:
            url = _in_cluster()
            account = account or SERVICE_ACCOUNT
            token = token or account / "token"
            certificate = certificate or account / "ca.crt"
            self.namespace = _read(account / "namespace")
        self._token = None if token is None else Path(token)
        context = None
        if certificate is not None and url.lower().startswith("https://"):
            try:
                context = ssl.create_default_context(cafile=os.fspath(certificate))
            except OSError as error:
                raise ConfigurationError(f"{certificate} is no certificate: {error}") from None
        self._web = Web(url, token=self._present_token, context=context)
        self.url = self._web.url
        self._watch_seconds = watch_seconds
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._is_closed = False

    def get(self, path: str) -> Mapping[str, Any]:
        """Return one object; DiscoveryError if it cannot be read."""
        with self._opened(path) as stream:
            body = stream.read(_MAX_ANSWER + 1)
        self._check(stream.status, path, body)
        if len(body) > _MAX_ANSWER:
            raise self._error(path, "content", f"answers more than {_MAX_ANSWER} bytes")
        return self._object(path, body)

    def list(self, path: str, selector: str) -> tuple[list[Any], str]:
        """Return all objects with certain labels, and the version of that list.

        Raises:
            DiscoveryError: they cannot be read; "expired" if the list changed between its pages.
        """
        items: list[Any] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            answer = self.get(f"{path}?{urlencode(query)}")
            page, metadata = answer.get("items"), answer.get("metadata")
            if not isinstance(page, list) or not isinstance(metadata, Mapping):
                raise self._error(path, "content", "answers no list")
            items += page
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            query["continue"] = str(metadata["continue"])
        raise self._error(path, "content", f"has more than {_MAX_PAGES * _PAGE} objects")

    def watch(self, path: str, selector: str, version: str) -> Iterator[tuple[str, Any]]:
        """Yield the changes after a version of a list: the kind of event, and the object.

        The watch ends when the server ends it, every few minutes.

        Raises:
            DiscoveryError: it cannot begin, or broke; "expired" if the version is too old.
        """
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._watch_seconds),
        }
        with self._opened(f"{path}?{urlencode(query)}") as stream:
            if stream.status != 200:
                self._check(stream.status, path, stream.read(65_536))
            while line := stream.read_line(_MAX_EVENT, self._watch_seconds + _SLACK):
                event = self._object(path, line)
                kind, changed = str(event.get("type")), event.get("object")
                if kind == "ERROR":
                    status = changed if isinstance(changed, Mapping) else {}
                    code = status.get("code")
                    self._check(
                        code if isinstance(code, int) else 500, path, msgspec.json.encode(status)
                    )
                yield kind, changed

    def close(self) -> None:
        """End a watch that is under way, and all later ones. From any thread."""
        with self._lock:
            self._is_closed = True
            stream = self._stream
        if stream is not None:
            stream.close()

    def _opened(self, path: str) -> Stream:
        stream = self._web.open(path, _TIMEOUT)
        with self._lock:
            self._stream = stream
            if self._is_closed:
                stream.close()
        return stream

    def _present_token(self) -> str | None:
        return None if self._token is None else _read(self._token)

    def _check(self, status: int, path: str, body: bytes) -> None:
        if 200 <= status < 300:
            return
        message = _message(body)
        what = {401: "denied", 403: "denied", 410: "expired", 504: "timeout"}.get(status, "status")
        hint = ": the service account needs get, list and watch" if what == "denied" else ""
        raise self._error(path, what, f"answers {status}{f' ({message})' if message else ''}{hint}")

    def _object(self, path: str, body: bytes) -> Mapping[str, Any]:
        try:
            content = msgspec.json.decode(body)
        except UNREADABLE as error:
            raise self._error(path, "content", f"answers no JSON ({error})") from None
        if not isinstance(content, dict):
            raise self._error(path, "content", "answers no object")
        return content

    def _error(self, path: str, reason: str, text: str) -> DiscoveryError:
        shown = path.partition("?")[0]
        return DiscoveryError(f"{self.url}{shown} {text}", url=self.url, reason=reason)


def _message(body: bytes) -> str:
    try:
        message = msgspec.json.decode(body).get("message")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return message[:300] if isinstance(message, str) and message.isprintable() else ""


def _in_cluster() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise ConfigurationError(
            "this process runs in no Kubernetes cluster: give the API server's URL, that of "
            "`kubectl proxy` for instance"
        )
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise DiscoveryError(
            f"{path} cannot be read: {error}", url=str(path), reason="unreachable"
        ) from None
