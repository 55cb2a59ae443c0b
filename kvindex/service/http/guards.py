"""Which requests are admitted: by token, Host header, and the origin of a browser's page.

Pure: header fields in, a refusal or nothing out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from kvindex.service.http.messages import Headers, Reply, refused
from kvindex.service.http.networks import address_of
from kvindex.wire.errors import ConfigurationError

REASONS: Final = (
    "body",  # 413: longer than Limits.body_bytes
    "connections",  # 503: more than Limits.connections
    "handshake",  # TLS failed, or took longer than Limits.head_seconds
    "head",  # 431: longer than Limits.head_bytes
    "host",  # 421: a Host header that names another host: DNS rebinding
    "host_form",  # 400: none, several, or no host name
    "malformed",  # 400: no HTTP/1.1
    "origin",  # 403: a page of another origin asks
    "pipelined",  # 503: one connection asks on and on before it is answered
    "slow_body",  # 408: not all there within Limits.body_seconds
    "slow_head",  # 408: not all there within Limits.head_seconds
    "slow_reader",  # for Limits.body_seconds nothing of a response was read, or too little
    "streams",  # 503: more than Limits.streams event streams
    "token",  # 401: another token
    "token_missing",  # 401: none
)
"""Why requests are refused; each is a counter."""

_MIN_TOKEN = 16  # characters: a search takes too long
_LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_MAX_CACHED = 256
_CHALLENGES: Final = (
    (b"www-authenticate", b'Bearer realm="kvindex"'),
    (b"www-authenticate", b'Basic realm="kvindex", charset="UTF-8"'),
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server takes of the network, at most.

    Attributes:
        body_bytes: of a request's body; 8 MiB is a query of a million tokens.
        tokens: of a query.
        ranks: DP ranks that are registered over HTTP, all together.
        ranks_per_instance: of them, those of one instance.
        streams: connections that receive `/events`.
        connections: open connections, for each process.
        head_bytes: of a request line with its headers.
        head_seconds: from the first byte of a connection or request to the end of its headers.
        body_seconds: from there to the end of the body; and the longest time for which a client
            may read nothing of a response.
        idle_seconds: between two requests of a kept connection.

    Raises:
        ConfigurationError: a limit is not above 0.
    """

    body_bytes: int = 8 << 20
    tokens: int = 1 << 20
    ranks: int = 4096
    ranks_per_instance: int = 1024
    streams: int = 64
    connections: int = 4096
    head_bytes: int = 64 << 10
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 75.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigurationError(
                    f"limits: {name} must be above 0, not {getattr(self, name)!r}"
                )


class Refusal(msgspec.Struct, frozen=True):
    """The answer to a request that is not let in.

    Attributes:
        status: the HTTP status code.
        reason: one of REASONS.
        message: what is wrong and what to do.
    """

    status: int
    reason: str
    message: str

    @property
    def reply(self) -> Reply:
        """The answer: `{"error": message, "reason": reason}`."""
        fields: Headers = ()
        if self.status == 401:
            fields = _CHALLENGES
        elif self.status == 503:
            fields = ((b"retry-after", b"1"),)
        return refused(self.status, self.message, self.reason)._replace(headers=fields)

    @property
    def closes(self) -> bool:
        """Whether the connection is closed after it, since the next request cannot be found."""
        return self.status in (408, 413, 431)


_NO_HOST = Refusal(400, "host_form", "a request needs exactly one Host header with a host name")
_OTHER_ORIGIN = Refusal(403, "origin", "a page of another origin may not ask this server")
_NO_TOKEN = Refusal(
    401, "token_missing", "this server wants a token: send 'Authorization: Bearer TOKEN'"
)
_WRONG_TOKEN = Refusal(401, "token", "the token in the Authorization header is not this server's")


def check_tokens(tokens: Iterable[str], source: str) -> tuple[str, ...]:
    """Return tokens that can be used.

    Raises:
        ConfigurationError: there is none, or one is short or cannot stand in a header.
    """
    usable = tuple(tokens)
    if not usable:
        raise ConfigurationError(f"{source} holds no token: write one, on a line of its own")
    for token in usable:
        if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable():
            raise ConfigurationError(
                f"{source}: a token has {len(token)} characters; it needs at least {_MIN_TOKEN}, "
                "all of them printable ASCII: python -c 'import secrets; "
                "print(secrets.token_urlsafe(32))' makes one"
            )
    return usable


class Guard:
    """Decides which requests are admitted, and counts the refused ones.

    Args:
        tokens: any of them opens; none: no token is wanted.
        allowed_hosts: names besides localhost and addresses that a Host header may have;
            "*.example.com" stands for all below it, "*" for any.
        limits: see Limits.
        form: returns the answer to a request that is refused.

    Attributes:
        limits: as given.
        counters: refused requests by reason; any thread may read it.
        form: as given.

    Thread safety: `admit` and `refuse` on the server's thread.

    Examples:
        >>> guard = Guard(tokens=["a-token-of-16-characters"])
        >>> guard.admit([(b"host", b"127.0.0.1:8090")]).status
        401
        >>> guard.admit([(b"host", b"evil.example")]).status
        421
    """

    def __init__(
        self,
        *,
        tokens: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        limits: Limits | None = None,
        form: Callable[[Refusal], Reply] = attrgetter("reply"),
    ) -> None:
        self.form = form
        self.limits = limits or Limits()
        self.counters = dict.fromkeys(REASONS, 0)
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
        names = {name.lower().rstrip(".") for name in allowed_hosts}
        self._any_host = "*" in names
        self._names = _LOCAL_NAMES | {name for name in names if not name.startswith("*")}
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*.")))
        self._hosts: dict[bytes, Refusal | None] = {}

    def admit(self, headers: Headers) -> Refusal | None:
        """Return why a request with these header fields is refused, or None; counts it.

        Complexity: one pass over the fields; a comparison of tokens takes the same time whatever
        they are.
        """
        host: bytes | None = None
        hosts = 0
        authorization = origin = None
        for name, value in headers:
            if name == b"host":
                host = value
                hosts += 1
            elif name == b"authorization":
                authorization = value if authorization is None else b""  # of two, neither counts
            elif name == b"origin":
                origin = value
        refusal = self._judge(host if hosts == 1 else None, authorization, origin)
        return None if refusal is None else self.refuse(refusal)

    def refuse(self, refusal: Refusal) -> Refusal:
        """Count a refusal, and return it."""
        self.counters[refusal.reason] += 1
        return refusal

    def _judge(
        self, host: bytes | None, authorization: bytes | None, origin: bytes | None
    ) -> Refusal | None:
        if host is None:
            return _NO_HOST
        refusal = self._hosts.get(host, _NO_HOST)
        if refusal is _NO_HOST:  # not seen yet, or ill-formed
            refusal = self._judge_host(host)
        if refusal is not None:
            return refusal
        if origin is not None and origin.lower() not in _origins(host.lower()):
            return _OTHER_ORIGIN
        if self._digests:
            return self._judge_token(authorization)
        return None

    def _judge_host(self, host: bytes) -> Refusal | None:
        parts = _HOST.fullmatch(host.decode("latin-1"))
        if parts is None:
            return _NO_HOST
        name = parts[1].lower().rstrip(".")
        refusal = None
        if not (self._any_host or self._is_ours(name)):
            refusal = Refusal(
                421,
                "host",
                f"this server is not called {name[:253]!r}: ask it by its address or as localhost, "
                "or start it with --allowed-host NAME",
            )
        if len(self._hosts) >= _MAX_CACHED:
            self._hosts.clear()
        self._hosts[host] = refusal
        return refusal

    def _is_ours(self, name: str) -> bool:
        # A page can be rebound to this machine by its name only, never by an address.
        return name in self._names or name.endswith(self._suffixes) or address_of(name) is not None

    def _judge_token(self, authorization: bytes | None) -> Refusal | None:
        if authorization is None:
            return _NO_TOKEN
        given = hashlib.sha256(_token(authorization)).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return None if any(matches) else _WRONG_TOKEN


def _origins(host: bytes) -> tuple[bytes, bytes]:
    """Return the origins of this server's pages: a proxy in front may speak TLS for it."""
    return b"http://" + host, b"https://" + host


def _token(authorization: bytes) -> bytes:
    """Return the token of a header field: Bearer's own, or Basic's password (browsers ask so)."""
    scheme, _, rest = authorization.strip().partition(b" ")
    rest = rest.strip()
    if scheme.lower() == b"bearer":
        return rest
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""
