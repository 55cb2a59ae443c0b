"""Which requests are admitted, and which addresses a registration may make this process dial.

Requests are judged by their token, their Host header, and the origin of a browser's page: header
fields in, a refusal or nothing out.

Whoever may call `/register` names a host and a port, and this process connects there. Without a
list of allowed networks that would be a way to reach what only this machine can reach. So an
endpoint is taken apart, its host is resolved once, the address is held against the list, and what
ZeroMQ is given afterwards is that address: it never resolves the name again. Workers from flags,
files and discovery are the operator's own words; they are not checked here.
"""

from __future__ import annotations

import base64
import binascii
import concurrent.futures
import hashlib
import hmac
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final, TypeAlias

import msgspec

from kvindex.service.http.messages import Headers, Reply, refused
from kvindex.wire.errors import ConfigurationError, EndpointRefusedError

REASONS: Final = (
    "bodies",  # 503: more than Limits.bodies_bytes are being served
    "body",  # 413: longer than Limits.body_bytes
    "connections",  # 503: more than Limits.connections
    "handshake",  # TLS failed, or took longer than Limits.head_seconds
    "head",  # 431: longer than Limits.head_bytes
    "host",  # 421: a Host header that names another host: DNS rebinding
    "host_form",  # 400: none, several, or no host name
    "malformed",  # 400: no HTTP/1.1
    "operators",  # 403: it is for operators, and this is none
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
        bodies_bytes: of the bodies of all open requests.
        tokens: of a query.
        ranks: DP ranks that are registered over HTTP, all together.
        ranks_per_instance: of them, those of one instance.
        streams: connections that receive `/events`.
        connections: open connections.
        head_bytes: of a request line with its headers.
        head_seconds: from the first byte of a connection or request to the end of its headers.
        body_seconds: from there to the end of the body; and the longest time for which a client
            may read nothing of a response.
        idle_seconds: between two requests of a kept connection.

    Raises:
        ConfigurationError: a limit is not above 0.
    """

    body_bytes: int = 8 << 20
    bodies_bytes: int = 512 << 20
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
    """The answer to a request that is not let in."""

    status: int
    reason: str  # one of REASONS, or "failed"
    message: str  # what is wrong and what to do

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
        return self.status in (408, 413, 431, 501, 505)


_NO_HOST = Refusal(400, "host_form", "a request needs exactly one Host header with a host name")
_OTHER_ORIGIN = Refusal(
    403, "origin", "a page of another origin may not ask this server: see --allow-origin"
)
_NO_TOKEN = Refusal(
    401, "token_missing", "this server wants a token: send 'Authorization: Bearer TOKEN'"
)
_NO_OPERATOR = Refusal(
    403, "operators", "this is for operators: it needs a token of theirs (--admin-token-file)"
)
_NOT_HERE = Refusal(
    403,
    "operators",
    "this is for operators: ask from the machine itself, or start the server with "
    "--admin-token-file",
)
_WRONG_TOKEN = Refusal(401, "token", "the token in the Authorization header is not this server's")


def check_tokens(tokens: Iterable[str], source: str) -> tuple[str, ...]:
    """Return tokens that can be used, or raise ConfigurationError, with where they come from."""
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
        tokens: any of them opens; none: no token is wanted. A client sends it as OpenAI's clients
            do (`authorization`), or as Anthropic's (`x-api-key`).
        operator_tokens: any of them opens all, and only they what is for operators. None: only this
            machine's own clients are operators.
        allowed_hosts: names besides localhost and addresses that a Host header may have;
            "*.example.com" stands for all below it, "*" for any.
        allowed_origins: "https://HOST[:PORT]" of other sites whose pages may ask; "*": any.
        limits: see Limits.
        form: returns the answer to a refused request, from its path ("" before it is known).

    Thread safety: `admit` and `refuse` on the server's thread; `counters` may be read on any.

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
        operator_tokens: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        allowed_origins: Sequence[str] = (),
        limits: Limits | None = None,
        form: Callable[[Refusal, str], Reply] = lambda refusal, _: refusal.reply,
    ) -> None:
        self.form = form
        self.limits = limits or Limits()
        self.counters = dict.fromkeys(REASONS, 0)  # refused requests
        self._clients, self._operators = (
            [hashlib.sha256(token.encode()).digest() for token in each]
            for each in (tokens, operator_tokens)
        )
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in allowed_origins)
        names = {name.lower().rstrip(".") for name in allowed_hosts}
        self._any_host = "*" in names
        self._names = _LOCAL_NAMES | {name for name in names if not name.startswith("*")}
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*.")))
        self._hosts: dict[bytes, Refusal | None] = {}

    def admit(
        self, headers: Headers, *, is_operators: bool = False, is_local: bool = True
    ) -> Refusal | None:
        """Return why a request with these header fields is refused, or None; counts it.

        `is_operators`: what it asks for is for operators; `is_local`: it comes from this machine.
        """
        host: bytes | None = None
        hosts = 0
        authorization = origin = key = None
        for name, value in headers:
            if name == b"host":
                host = value
                hosts += 1
            elif name == b"authorization":
                # Of two neither counts: a proxy before us may have checked the other one.
                authorization = value if authorization is None else b""
            elif name == b"x-api-key":
                key = value if key is None else b""
            elif name == b"origin":
                origin = value
        refusal = self._judge_names(host if hosts == 1 else None, origin)
        if refusal is None:
            token = key if authorization is None else _token(authorization)
            refusal = self._judge_token(token, is_operators=is_operators, is_local=is_local)
        return None if refusal is None else self.refuse(refusal)

    def allows_origin(self, origin: bytes) -> bool:
        """Return whether pages of another site may ask."""
        return origin.lower() in self._origins or b"*" in self._origins

    def admit_preflight(self, headers: Headers) -> Refusal | None:
        """As `admit`, for a browser's question whether it may ask: it brings no token."""
        fields = dict(headers)
        refusal = self._judge_names(fields.get(b"host"), fields.get(b"origin"))
        return None if refusal is None else self.refuse(refusal)

    def refuse(self, refusal: Refusal) -> Refusal:
        """Count a refusal, and return it."""
        self.counters[refusal.reason] += 1
        return refusal

    def _judge_names(self, host: bytes | None, origin: bytes | None) -> Refusal | None:
        if host is None:
            return _NO_HOST
        refusal = self._hosts.get(host, _NO_HOST)
        if refusal is _NO_HOST:  # not seen yet, or ill-formed
            refusal = self._judge_host(host)
        if refusal is not None:
            return refusal
        if origin is not None:
            # A proxy in front may speak TLS for this server, so its own pages come by either.
            ours = host.lower()
            own = (b"http://" + ours, b"https://" + ours)
            if origin.lower() not in own and not self.allows_origin(origin):
                return _OTHER_ORIGIN
        return None

    def _judge_token(
        self, token: bytes | None, *, is_operators: bool, is_local: bool
    ) -> Refusal | None:
        if is_operators and not self._operators and not is_local:
            return _NOT_HERE
        needs_operator = is_operators and bool(self._operators)
        if not self._clients and not needs_operator:
            return None
        if token is None:
            return _NO_TOKEN
        # All are compared, and by their digests: the time shows neither which nor how much fits.
        digest = hashlib.sha256(token).digest()
        matches = [
            [hmac.compare_digest(digest, known) for known in each]
            for each in (self._clients, self._operators)
        ]
        of_clients, of_operators = map(any, matches)
        if of_operators:
            return None
        if not of_clients:
            return _WRONG_TOKEN
        return _NO_OPERATOR if needs_operator else None

    def _judge_host(self, host: bytes) -> Refusal | None:
        parts = _HOST.fullmatch(host.decode("latin-1"))
        if parts is None:
            return _NO_HOST
        name = parts[1].lower().rstrip(".")
        # A page can be rebound to this machine by its name only, never by an address.
        is_ours = (
            self._any_host
            or name in self._names
            or name.endswith(self._suffixes)
            or address_of(name) is not None
        )
        refusal = None
        if not is_ours:
            refusal = Refusal(
                421,
                "host",
                f"this server is not called {name[:253]!r}: ask it by its address or as localhost, "
                "or start it with --allowed-host NAME",
            )
        # A stranger may send any number of names; those that are forgotten are judged anew.
        if len(self._hosts) >= _MAX_CACHED:
            self._hosts.clear()
        self._hosts[host] = refusal
        return refusal


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


# The networks of registrations --------------------------------------------------------------------

Address: TypeAlias = "IPv4Address | IPv6Address"
Network: TypeAlias = "IPv4Network | IPv6Network"
Resolve: TypeAlias = Callable[[str], Sequence[str]]

LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
PRIVATE: Final = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")

_WORDS: Final = {"loopback": LOOPBACK, "private": PRIVATE, "any": ("0.0.0.0/0", "::/0")}
_ENDPOINT = re.compile(
    r"tcp://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_][A-Za-z0-9_.-]{0,252})):([0-9]{1,5})"
)
_NAT64 = ip_network("64:ff9b::/96")
_COMPATIBLE = ip_network("::/96")  # an IPv4 address behind zeros: RFC 4291, 2.5.5.1
_GUARDED: Final = tuple(
    ip_network(text)
    for text in (
        *("169.254.0.0/16", "fe80::/10", "fec0::/10"),  # link-local: most clouds' metadata
        *("fd00:ec2::/32", "fd20:ce::254"),  # AWS, Google
        *("100.100.100.200", "168.63.129.16", "192.0.0.0/24"),  # Alibaba, Azure, Oracle
        *("64:ff9b:1::/48", "0.0.0.0/8", "240.0.0.0/4"),  # a NAT64 of one's own; no hosts
    )
)
_NAME_SECONDS: Final = 5.0  # for a name to be resolved in
_MOST_NAMES: Final = 16  # that are being resolved at once
_resolving = threading.BoundedSemaphore(_MOST_NAMES)


def address_of(text: str) -> Address | None:
    """Return the IP address in a text, which may stand in brackets; None if it is none."""
    try:
        return ip_address(text.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, for itself only.

    Examples:
        >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    address = address_of(host)
    if address is None:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return networks from CIDR texts, single addresses, or "loopback", "private" and "any".

    Raises:
        ConfigurationError: one is none of these; says which.

    Examples:
        >>> parse_networks(["10.0.0.0/8", "192.168.1.7"])
        (IPv4Network('10.0.0.0/8'), IPv4Network('192.168.1.7/32'))
    """
    networks: list[Network] = []
    for text in texts:
        for network in _WORDS.get(text, (text,)):
            try:
                networks.append(ip_network(network))
            except ValueError as error:
                raise ConfigurationError(
                    f"{text!r} is no network ({error}): write it as 10.0.0.0/8, or one of "
                    + ", ".join(_WORDS)
                ) from None
    return tuple(networks)


def resolved(host: str, within: float = _NAME_SECONDS) -> list[str]:
    """Return the addresses of a host name, in the resolver's order.

    Raises:
        EndpointRefusedError: it did not answer within so many seconds.
    """
    answer: concurrent.futures.Future[list[str]] = concurrent.futures.Future()

    def resolve() -> None:
        try:
            addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.set_result(list(dict.fromkeys(str(address[0]) for *_, address in addresses)))
        except (OSError, UnicodeError):
            answer.set_result([])
        finally:
            _resolving.release()

    # On a thread of its own: the system's resolver may wait for a silent name server for as long as
    # it likes, and nothing ends it. So few are allowed at once.
    if _resolving.acquire(timeout=within):
        threading.Thread(target=resolve, name="kvindex-resolver", daemon=True).start()
        concurrent.futures.wait([answer], within)
    if not answer.done():
        raise EndpointRefusedError(
            f"the name {host!r} was not resolved within {within:g} s; register the address itself",
            reason="name",
        )
    return answer.result()


class Networks:
    """An allow-list of networks for endpoints that arrive over HTTP.

    Thread safety: immutable; `check` waits while a name is resolved.

    Examples:
        >>> networks = Networks(parse_networks(["loopback"]))
        >>> networks.check("tcp://127.0.0.1:5557")
        'tcp://127.0.0.1:5557'
        >>> networks.check("tcp://10.0.0.5:5557")
        Traceback (most recent call last):
            ...
        kvindex.wire.errors.EndpointRefusedError: 'tcp://10.0.0.5:5557': 10.0.0.5 is in none of the
        allowed networks (127.0.0.0/8, ::1/128); allow its network with --register-network
    """

    def __init__(self, allowed: Iterable[Network], resolve: Resolve = resolved) -> None:
        self.allowed = tuple(allowed)
        self._resolve = resolve

    def check(self, endpoint: str) -> str:
        """Return the endpoint to dial: the same one, with the address in the place of a name.

        What must not be dialled is an EndpointRefusedError, whose `reason` is "transport" (not
        tcp), "form", "name" (it has no address) or "network".
        """
        host, port = _parts(endpoint)
        texts = [host] if address_of(host) else self._resolve(host)
        addresses = [address for address in map(address_of, texts) if address is not None]
        if not addresses:
            raise EndpointRefusedError(
                f"{endpoint!r}: the name {host!r} has no address here; check it, or register the "
                "address itself",
                reason="name",
            )
        for address in addresses:
            if self.allows(address):
                shown = f"[{address}]" if address.version == 6 else str(address)
                return f"tcp://{shown}:{port}"
        address = addresses[0]
        forms = (address, *_inside(address))
        if any(form.is_multicast or any(form in net for net in _GUARDED) for form in forms):
            why = (
                f"{address} is a link-local, multicast or metadata address, or none of a host: "
                "registrations may not name it"
            )
        else:
            listed = ", ".join(map(str, self.allowed)) or "no network is allowed"
            why = (
                f"{address} is in none of the allowed networks ({listed}); allow its network with "
                "--register-network"
            )
        raise EndpointRefusedError(f"{endpoint!r}: {why}", reason="network")

    def allows(self, address: Address) -> bool:
        """Return whether this address may be dialled."""
        # What an IPv6 address stands for is dialled by some gateway: it is held to the same rules.
        for form in (address, *_inside(address)):
            if form.is_multicast or form.is_unspecified:
                return False
            if getattr(form, "ipv4_mapped", None) is not None:
                continue  # what is inside decides
            # Where clouds have their metadata, only a network within that special one lets in: no
            # wide one, as "any" or a whole private range, was meant for it.
            guarded = [net for net in _GUARDED if form in net]
            if not any(
                form in network
                and all(
                    network.network_address in net and network.prefixlen >= net.prefixlen
                    for net in guarded
                )
                for network in self.allowed
            ):
                return False
        return True


def _parts(endpoint: str) -> tuple[str, int]:
    """Return host and port of a tcp endpoint."""
    if not endpoint.startswith("tcp://"):
        scheme = endpoint.partition("://")[0][:20]
        raise EndpointRefusedError(
            f"an endpoint of a registration is tcp://HOST:PORT, not {scheme!r}: name workers with "
            "other endpoints in the configuration of this server",
            reason="transport",
        )
    parts = _ENDPOINT.fullmatch(endpoint)
    port = int(parts[3]) if parts else 0
    if parts is None or not 1 <= port <= 65_535:
        raise EndpointRefusedError(
            f"{endpoint[:200]!r} is not tcp://HOST:PORT with a host name or an address, and a port "
            "of 1 to 65535",
            reason="form",
        )
    return parts[1] or parts[2], port


def _inside(address: Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that an IPv6 address stands for."""
    if not isinstance(address, IPv6Address):
        return []
    inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    # ::1 is loopback itself, and no IPv4 address behind zeros.
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        inside.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [form for form in inside if form is not None]
