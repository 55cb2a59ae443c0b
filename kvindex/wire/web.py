"""HTTP servers, asked with bounded answers and within a deadline.

Answers are bounded in size and time, read as JSON, and never followed.
There are no redirects and no proxies.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from kvindex.wire.errors import ConfigurationError, DiscoveryError
from kvindex.wire.forks import close_in_children

MAX_ANSWER: Final = 8 << 20
"""Most bytes of one answer. SGLang's `/server_info` is the longest of an engine, with 20 kB."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class HttpReply(msgspec.Struct, frozen=True):
    """A server's answer: the HTTP status and the body."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body's JSON.

        Raises:
            ValueError: it is no JSON, or nested too deeply.
        """
        try:
            return msgspec.json.decode(self.body)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def split_url(url: str) -> SplitResult:
    """Return the parts of a server's URL; ConfigurationError if it cannot be one, or has more."""
    if not isinstance(url, str) or not url.lower().startswith(("http://", "https://")):
        raise ConfigurationError(f"{url!r:.200} is no URL of a server: write http://HOST:PORT")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r:.200} is no URL: {error}") from None
    if not parts.hostname or port == 0 or any(c.isspace() or ord(c) < 32 for c in url):
        raise ConfigurationError(f"{url!r:.200} names no host: write http://HOST:PORT")
    if parts.username is not None:
        raise ConfigurationError("a URL must not carry a password: give token= instead")
    if parts.query or parts.fragment:
        raise ConfigurationError(f"{url!r:.200}: leave out what stands after ? or #")
    return parts


class Web:
    """One HTTP server, at its URL. Immutable: may be asked from any thread."""

    def __init__(
        self,
        url: str,
        *,
        token: str | Callable[[], str | None] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        parts = split_url(url)
        self.url = url.rstrip("/")
        self.host = parts.hostname or ""
        self._path = parts.path.rstrip("/")
        self._token = token
        is_safe = parts.scheme.lower() == "https"
        self._tls = (context or ssl.create_default_context()) if is_safe else None
        self.port = parts.port or (443 if self._tls else 80)

    def get(self, path: str, timeout: float, *, limit: int = MAX_ANSWER) -> HttpReply:
        """Return what the server answers at a path, whatever its status.

        The whole answer must arrive within `timeout` seconds, else `DiscoveryError.reason` is the
        cause. Looking up the host's name may take longer, as the system's resolver allows.
        """
        return self._whole(self.open(path, timeout), limit)

    def post(
        self,
        path: str,
        body: bytes,
        timeout: float,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        limit: int = MAX_ANSWER,
    ) -> HttpReply:
        """Return what the server answers to a JSON body, with further headers; else as `get`."""
        headers = {"Content-Type": "application/json", **headers}
        return self._whole(self._opened("POST", path, timeout, body, headers), limit)

    def open(self, path: str, timeout: float) -> Stream:
        """Return an answer whose body can be read as it arrives; the caller closes it."""
        return self._opened("GET", path, timeout)

    def _whole(self, answer: Stream, limit: int) -> HttpReply:
        with answer as stream:
            # One byte more than is allowed shows that there is more.
            body = stream.read(limit + 1)
        if len(body) > limit:
            raise self.error(answer.path, "content", f"answers more than {limit} bytes")
        return HttpReply(stream.status, body)

    def _opened(
        self,
        method: str,
        path: str,
        timeout: float,
        body: bytes | None = None,
        extra: Mapping[str, str] = _NO_HEADERS,
    ) -> Stream:
        headers = {"Accept": "application/json", "Connection": "close", "User-Agent": "kvindex"}
        if token := self._token() if callable(self._token) else self._token:
            headers["Authorization"] = f"Bearer {token}"
        deadline = _Deadline(timeout)
        sock: socket.socket | None = None
        try:
            # By hand, not by http.client: its time-out begins anew with each read, so that a server
            # which drips is never given up.
            sock = _dial(self.host, self.port, deadline)
            if self._tls is not None:
                sock.settimeout(deadline.left())
                sock = self._tls.wrap_socket(sock, server_hostname=self.host)
            # A forked child's copy would hold the connection open, and the server waiting.
            close_in_children(sock)
            connection = http.client.HTTPConnection(self.host, self.port)
            connection.default_port = 443 if self._tls else 80  # the Host header leaves it out
            connection.sock = _Wire(sock, deadline)
            connection.request(method, self._path + path, body, {**headers, **extra})
            return Stream(self, path, sock, connection.getresponse(), deadline)
        except BaseException as error:
            if sock is not None:
                sock.close()  # nobody else knows of it yet
            if isinstance(error, OSError | http.client.HTTPException | ValueError):
                raise self.explain(path, error, timeout) from error
            raise

    def explain(self, path: str, error: Exception, timeout: float) -> DiscoveryError:
        """Return the error for a failure of a socket, of TLS, or of HTTP."""
        if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
            return self.error(path, "unreachable", "hangs up before the whole answer")
        # Before the table: a time-out is an OSError, and what counts is how long was waited.
        if isinstance(error, TimeoutError):
            return self.error(path, "timeout", f"does not answer within {timeout:.3g} s")
        for kind, (reason, text) in _CAUSES.items():
            if isinstance(error, kind):
                detail = f" ({str(error)[:200]})" if reason in ("tls", "content") else ""
                return self.error(path, reason, text + detail)
        text = f"cannot be reached ({str(error)[:200] or type(error).__name__})"
        return self.error(path, "unreachable", text)

    def error(self, path: str, reason: str, text: str) -> DiscoveryError:
        """Return an error about what the server answers at a path."""
        return DiscoveryError(f"{self.url}{path} {text}", url=self.url, reason=reason)


class Stream:
    """The answer to one request, while it arrives. Owned by one thread, but for `close`."""

    def __init__(
        self,
        web: Web,
        path: str,
        sock: socket.socket,
        response: http.client.HTTPResponse,
        deadline: _Deadline,
    ) -> None:
        self.status = response.status
        self.length = response.length  # bytes of the body; None if not given
        self.path = path
        self._web = web
        self._sock = sock
        self._response = response
        self._deadline = deadline

    def read(self, limit: int, timeout: float | None = None) -> bytes:
        """Return the next `limit` bytes of the body, or what is left of it.

        They must arrive in the remaining time of `Web.open`, or within `timeout` seconds from now.
        """
        if timeout is not None:
            self._deadline.restart(timeout)
        return self._reading(self._response.read, limit)

    def read_line(self, limit: int, timeout: float) -> bytes:
        """Return the body's next line that is not empty; b"" if the body has ended."""
        self._deadline.restart(timeout)
        while line := self._reading(self._response.readline, limit + 1):
            if len(line) > limit:
                raise self._web.error(self.path, "content", f"sends a line above {limit} bytes")
            # Between events there are empty ones, and empty is what the end looks like.
            if line := line.strip():
                return line
        return b""

    def _reading(self, read: Callable[[int], bytes], most: int) -> bytes:
        try:
            return read(most)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._web.explain(self.path, error, self._deadline.seconds) from error

    def close(self) -> None:
        """Hang up; a thread that is reading gets an error."""
        # Closing alone does not wake a thread that reads, and leaves it the descriptor's number.
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the server closed first
        self._sock.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Deadline:
    """A moment until which something must be done."""

    def __init__(self, seconds: float) -> None:
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left; TimeoutError if there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Wire(io.RawIOBase):
    """A socket as http.client needs it, within a deadline; `Web.open` or `Stream` closes it."""

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._deadline.left())
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._deadline.left())
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        """Leave it open: http.client closes before the body is read."""


def _dial(host: str, port: int, deadline: _Deadline) -> socket.socket:
    """Return a connection to the first of a host's addresses that accepts one."""
    failure: OSError | None = None
    # "localhost" is ::1 first on many machines, where an engine that binds 0.0.0.0 is not.
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure or OSError("the name has no address")


# The first that fits counts: kinds before those that they derive from.
_CAUSES: Mapping[type[Exception], tuple[str, str]] = {
    ConnectionRefusedError: ("refused", "refuses the connection: nothing listens there"),
    ssl.SSLCertVerificationError: ("tls", "has a certificate that is not trusted"),
    ssl.SSLError: ("tls", "fails at TLS"),
    socket.gaierror: ("name", "cannot be found: no such host"),
    http.client.HTTPException: ("content", "does not answer in HTTP"),
    UnicodeError: ("name", "cannot be found: no such host"),
    ValueError: ("content", "does not answer in HTTP"),
}
