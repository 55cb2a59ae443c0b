"""The connections of a gateway to its engines: HTTP/1.1, kept alive, bounded in time."""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvindex.gateway.wires import Answer, UpstreamError, Wire
from kvindex.service.http import Headers
from kvindex.wire.errors import ConfigurationError

_CONNECT_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 4.0  # uvicorn, and so vLLM and SGLang, close after five
_MOST_IDLE: Final = 256  # connections to one engine


class _Origin(NamedTuple):
    """Where an engine listens."""

    host: str
    port: int
    is_secure: bool
    prefix: str  # of all paths
    field: bytes  # the Host header


class Upstream:
    """The connections of a gateway to its engines.

    Args:
        token: returns the engines' API key, for requests that bring none.
        context: for engines at https; that of the system by default.

    Owner: one event loop.
    """

    def __init__(
        self,
        token: Callable[[], str | None] = lambda: None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._token = token
        self._context = context
        self._origins: dict[str, _Origin] = {}
        self._idle: defaultdict[_Origin, list[Wire]] = defaultdict(list)
        self._wires: set[Wire] = set()
        self._counters: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def send(
        self,
        url: str,
        path: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        method: str = "POST",
        head_within: float,
    ) -> Answer:
        """Send a request; return the answer once its head has arrived.

        Args:
            url: of the engine.
            path: below the URL.
            body: whole.
            headers: all but Host and Content-Length.
            method: the HTTP method.
            head_within: seconds until the head arrives, once connected.

        Raises:
            UpstreamError: there is no answer; see its `reason`.
            ConfigurationError: the URL cannot be used.
        """
        origin = self._origin(url)
        request = self._request(origin, method, path, body, headers)
        loop = asyncio.get_running_loop()
        while True:
            wire = self._idle_wire(origin, loop.time()) or await self._connect(origin)
            answer = wire.ask(request)
            why = f"no head of an answer within {head_within:g} s"
            timer = loop.call_later(head_within, partial(answer.fail, "timeout_head", why))
            try:
                await answer.head()
                return answer
            except UpstreamError as error:
                # An engine may close an idle connection just when it is used again.
                if not (wire.is_reused and error.reason == "reset" and not wire.has_received):
                    self._failures[error.reason] += 1
                    raise
                self._counters["sent_again"] += 1
            except BaseException:
                answer.close()
                raise
            finally:
                timer.cancel()

    async def ask(
        self,
        url: str,
        path: str,
        body: bytes = b"",
        headers: Headers = (),
        *,
        method: str = "POST",
        within: float,
        most: int = 16 << 20,
    ) -> tuple[int, bytes]:
        """Return the status and the body of a short answer.

        Args: as `send`, and
            within: seconds until all has arrived.
            most: bytes of the body.

        Raises: as `send`.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await self.send(url, path, body, headers, method=method, head_within=within)
        left = max(0.0, began + within - loop.time())
        why = f"no whole answer within {within:g} s"
        timer = loop.call_later(left, partial(answer.fail, "timeout", why))
        received = bytearray()

        def receive(piece: bytes) -> bool:
            received.extend(piece)
            return len(received) <= most

        try:
            if await answer.pass_to(receive):
                text = f"{url}{path}: the answer is longer than accepted"
                raise UpstreamError(text, reason="too_long")
        except UpstreamError as error:
            self._failures[error.reason] += 1
            raise
        finally:
            timer.cancel()
            answer.close()
        return answer.status, bytes(received)

    async def close(self) -> None:
        """Close all connections."""
        for wire in list(self._wires):
            if wire.is_open:
                wire.abort()
        await asyncio.sleep(0)  # the transports notify their protocols

    def statistics(self) -> dict[str, Any]:
        """Return counters: connections `opened`, `reused`, `idle` now; `failures` by reason.

        `sent_again`: requests whose kept connection had just been closed by the engine.
        """
        return {
            **{name: self._counters[name] for name in ("opened", "reused", "sent_again")},
            "idle": sum(map(len, self._idle.values())),
            "failures": dict(self._failures),
        }

    # Connections --------------------------------------------------------------------------------

    def _idle_wire(self, origin: _Origin, now: float) -> Wire | None:
        """Return a kept connection, the last used first; close those that were idle too long."""
        idle = self._idle[origin]
        while idle:
            wire = idle.pop()
            if wire.is_open and now - wire.idle_since < _IDLE_SECONDS:
                self._counters["reused"] += 1
                wire.is_reused = True
                return wire
            if wire.is_open:
                wire.abort()
        return None

    def _keep(self, origin: _Origin, wire: Wire) -> None:
        idle = self._idle[origin]
        wire.idle_since = asyncio.get_running_loop().time()
        if len(idle) < _MOST_IDLE:
            idle.append(wire)
        else:
            wire.abort()

    def _forget(self, origin: _Origin, wire: Wire) -> None:
        self._wires.discard(wire)
        idle = self._idle[origin]
        if wire in idle:
            idle.remove(wire)
        if not idle:
            del self._idle[origin]

    async def _connect(self, origin: _Origin) -> Wire:
        name = origin.field.decode()
        wire = Wire(name, partial(self._keep, origin), partial(self._forget, origin))
        context = (self._context or ssl.create_default_context()) if origin.is_secure else None
        try:
            connecting = asyncio.get_running_loop().create_connection(
                lambda: wire, origin.host, origin.port, ssl=context
            )
            await asyncio.wait_for(connecting, _CONNECT_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            reason = "unreachable"
            if isinstance(error, ConnectionRefusedError):
                reason = "refused"
            elif isinstance(error, asyncio.TimeoutError):
                reason = "timeout_connect"
            self._failures[reason] += 1
            text = f"{name} cannot be connected to: {error or type(error).__name__}"
            raise UpstreamError(text, reason=reason) from None
        self._counters["opened"] += 1
        self._wires.add(wire)
        return wire

    # Requests -----------------------------------------------------------------------------------

    def _origin(self, url: str) -> _Origin:
        origin = self._origins.get(url)
        if origin is None:
            if len(self._origins) > 4096:  # engines come and go
                self._origins.clear()
            origin = self._origins[url] = _parse(url)
        return origin

    def _request(
        self, origin: _Origin, method: str, path: str, body: bytes, headers: Headers
    ) -> bytes:
        lines = [f"{method} {origin.prefix}{path} HTTP/1.1".encode(), b"host: " + origin.field]
        lines += [b"%b: %b" % field for field in headers]
        token = self._token()
        if token is not None and not any(name == b"authorization" for name, _ in headers):
            lines.append(b"authorization: Bearer " + token.encode())
        if body or method != "GET":
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join((*lines, b"", body))


def _parse(url: str) -> _Origin:
    """Return where the engine at a URL listens; raises ConfigurationError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{url!r} is no URL of an engine: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigurationError(f"{url!r} is no URL of an engine: expected http://HOST:PORT")
    is_secure = parts.scheme == "https"
    field = parts.netloc.rpartition("@")[2].encode()
    return _Origin(
        host, port or (443 if is_secure else 80), is_secure, parts.path.rstrip("/"), field
    )
