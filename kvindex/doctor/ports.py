"""Who answers at an engine's ports, and whether it is who should."""

from __future__ import annotations

import socket
from typing import Final

import zmq

from kvindex import PublisherAddress
from kvindex.doctor.case import Case
from kvindex.doctor.limits import Limits
from kvindex.doctor.zmtp import Peer, look
from kvindex.errors import DecodeError
from kvindex.wire import END_SEQ, parse_replay, replay_request

__all__ = ["check_rank", "check_shape"]

_PUBLISHES: Final = ("PUB", "XPUB")
_PROTOCOL: Final = {"http": "an HTTP server", "tls": "a TLS server", "other": "another protocol"}
Context = zmq.Context[zmq.Socket[bytes]]


def check_shape(case: Case) -> None:
    """Note endpoints that cannot be right whoever answers there."""
    if case.worker is None:
        return
    shared = case.worker.shared_endpoints()
    for endpoint in shared:
        publishes = [a.dp_rank for a in case.addresses if a.endpoint == endpoint]
        replays = [a.dp_rank for a in case.addresses if a.replay == endpoint]
        case.add("ports-collide", endpoint=endpoint, publishes=publishes, replays=replays)
        case.broken.update(publishes, replays)
    if all(address.replay is None for address in case.addresses):
        case.add("replay-missing")


def check_rank(case: Case, address: PublisherAddress, context: Context, limits: Limits) -> None:
    """Look at a rank's two ports and note what is wrong."""
    if case.worker is None or case.worker.bind or address.dp_rank in case.broken:
        return
    peer = look(address.endpoint, limits.handshake)
    if not _check_publisher(case, address, peer, limits):
        case.broken.add(address.dp_rank)
    if address.replay is not None and case.worker.curve is None:
        _check_replay(case, address.dp_rank, address.replay, context, limits)


def _check_publisher(case: Case, address: PublisherAddress, peer: Peer, limits: Limits) -> bool:
    rank, endpoint = address.dp_rank, address.endpoint
    if peer.kind == "refused":
        greeting = _greeting_of_caller(endpoint, limits.handshake)
        if greeting:
            case.add("publisher-connects", rank, endpoint=endpoint, greeting=greeting)
        else:
            case.add("publisher-refused", rank, endpoint=endpoint, error=peer.detail)
    elif peer.kind != "zmq":
        return _check_stranger(case, rank, endpoint, peer)
    elif peer.mechanism not in ("", "NULL"):
        if case.worker is None or case.worker.curve is None:
            case.add("port-encrypted", rank, endpoint=endpoint, mechanism=peer.mechanism)
            return False
        return True
    elif peer.socket_type and peer.socket_type not in _PUBLISHES:
        case.add("publisher-wrong-socket", rank, endpoint=endpoint, socket_type=peer.socket_type)
    else:
        return True
    return False


def _check_stranger(case: Case, rank: int, endpoint: str, peer: Peer) -> bool:
    """Note who answers instead; return whether nothing can be said against it."""
    if peer.kind in _PROTOCOL:
        protocol = _PROTOCOL[peer.kind]
        case.add("port-not-zmq", rank, endpoint=endpoint, protocol=protocol, detail=peer.detail)
    elif peer.kind == "reset":
        case.add("port-reset", rank, endpoint=endpoint)
    elif peer.kind == "silent":
        case.add("port-silent", rank, endpoint=endpoint)
    elif peer.kind == "unreachable":
        case.add("endpoint-unreachable", rank, endpoint=endpoint, error=peer.detail)
    return peer.kind == "unseen"


def _check_replay(case: Case, rank: int, endpoint: str, context: Context, limits: Limits) -> None:
    peer = look(endpoint, limits.handshake)
    if peer.kind == "refused":
        case.add("replay-refused", rank, endpoint=endpoint, error=peer.detail)
    elif peer.kind not in ("zmq", "unseen"):
        _check_stranger(case, rank, endpoint, peer)
    elif peer.socket_type and peer.socket_type != "ROUTER":
        case.add("replay-wrong-socket", rank, endpoint=endpoint, socket_type=peer.socket_type)
    elif peer.mechanism in ("", "NULL") and not _replays(endpoint, context, limits.handshake):
        case.add("replay-silent", rank, endpoint=endpoint, waited=limits.handshake)


def _replays(endpoint: str, context: Context, timeout: float) -> bool:
    """Whether the end of a replay comes, asked for from a number that nobody has reached."""
    with context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IPV6, 1)
        sock.connect(endpoint)
        sock.send_multipart(replay_request(END_SEQ))
        if not sock.poll(int(timeout * 1000) + 1):
            return False
        try:
            return parse_replay(sock.recv_multipart()).end
        except DecodeError:
            return False


def _greeting_of_caller(endpoint: str, timeout: float) -> str:
    """Listen where nobody does, if the address is ours, and return how a publisher greets.

    A publisher that was told a concrete host connects to it, and tries again ten times a second.
    """
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp":
        return ""
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), int(port)))
            listener.listen(1)
            listener.settimeout(timeout)
            caller, _ = listener.accept()
            with caller:
                caller.settimeout(timeout)
                greeting = caller.recv(16)
                return greeting.hex() if greeting[:1] == b"\xff" else ""
    except (OSError, OverflowError, UnicodeError):
        return ""
