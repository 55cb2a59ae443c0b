"""Which program answers at an engine's ports, and whether it is the expected one."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Iterator
from typing import Final

import zmq

from kvindex import PublisherAddress
from kvindex.tools.doctor.case import Case
from kvindex.tools.doctor.zmtp import Peer, greet, look
from kvindex.wire import END_SEQ, ReplayReply, parse_replay, replay_request
from kvindex.wire.errors import DecodeError

_MAX_MESSAGE: Final = 8 << 20  # bytes

_PUBLISHES: Final = ("PUB", "XPUB")
_PROTOCOL: Final = {"http": "an HTTP server", "tls": "a TLS server", "other": "another protocol"}
Context = zmq.Context[zmq.Socket[bytes]]


def check_shape(case: Case) -> None:
    """Note endpoints that are wrong whatever answers there."""
    if case.worker is None:
        return
    shared = case.worker.shared_endpoints()
    for endpoint in shared:
        publishes = [a.dp_rank for a in case.addresses if a.endpoint == endpoint]
        replays = [a.dp_rank for a in case.addresses if a.replay == endpoint]
        case.add("ports-collide", endpoint=endpoint, publishes=publishes, replays=replays)
        case.broken.update(publishes, replays)
    stated = case.report.ranks if case.report else ()
    if all(address.replay is None for address in (*case.addresses, *stated)):
        case.add("replay-missing" if stated else "replay-not-named")


def check_rank(case: Case, address: PublisherAddress) -> None:
    """Look at a rank's two ports and note what is wrong."""
    if case.worker is None or case.worker.bind or address.dp_rank in case.broken:
        return
    if not _check_publisher(case, address.dp_rank, address.endpoint):
        case.broken.add(address.dp_rank)
    if address.replay is not None and case.worker.curve is None:
        _check_replay(case, address.dp_rank, address.replay)


def check_replayed(case: Case) -> None:
    """Note replay endpoints that lack the batch received last."""
    for address in case.addresses:
        marks = case.listener.first(address.dp_rank).marks if case.listener else {}
        if address.replay is not None and marks:
            _check_replayed(case, address.dp_rank, address.replay, marks)


def _check_replayed(case: Case, rank: int, endpoint: str, marks: dict[int, int]) -> None:
    seq = next(reversed(marks))
    for _ in range(2):  # engines keep a batch just after they sent it
        replay = _replay(endpoint, seq, case.shared.context, case.shared.limits.handshake)
        first = next(replay, None)
        if first is None or not first.end:
            break
    if first is None or (seq < first.seq and not first.end):
        return  # it is silent, or that batch has left the buffer
    if first.end or first.seq != seq or zlib.crc32(first.payload) != marks[seq]:
        there = "is missing there" if first.end else "is another there"
        case.add("replay-of-another", rank, endpoint=endpoint, seq=seq, there=there)


def _check_publisher(case: Case, rank: int, endpoint: str) -> bool:
    """Note what is wrong where a rank is to publish; return whether nothing is."""
    limit = case.shared.limits.handshake
    peer = look(endpoint, limit)
    if peer.kind == "refused":
        kind = _who_dials(endpoint, limit)
        if kind in _PUBLISHES:
            case.add("publisher-connects", rank, endpoint=endpoint, socket_type=kind)
        elif kind:
            case.add("subscriber-dials", rank, endpoint=endpoint, socket_type=kind)
        else:
            case.add("publisher-refused", rank, endpoint=endpoint, error=peer.detail)
    elif peer.kind != "zmq":
        return _check_stranger(case, rank, endpoint, peer)
    elif peer.mechanism not in ("", "NULL"):
        if case.worker is not None and case.worker.curve is not None:
            return True
        case.add("port-encrypted", rank, endpoint=endpoint, mechanism=peer.mechanism)
    elif peer.socket_type and peer.socket_type not in _PUBLISHES:
        case.add("publisher-wrong-socket", rank, endpoint=endpoint, socket_type=peer.socket_type)
    else:
        return True
    return False


def _check_stranger(case: Case, rank: int, endpoint: str, peer: Peer) -> bool:
    """Note which peer answers instead; return whether that is no fault."""
    if peer.kind in _PROTOCOL:
        protocol = _PROTOCOL[peer.kind]
        case.add("port-not-zmq", rank, endpoint=endpoint, protocol=protocol, detail=peer.detail)
    elif peer.kind in ("reset", "silent"):
        case.add(f"port-{peer.kind}", rank, endpoint=endpoint)
    elif peer.kind == "unreachable":
        case.add("endpoint-unreachable", rank, endpoint=endpoint, error=peer.detail)
    return peer.kind == "unseen"


def _check_replay(case: Case, rank: int, endpoint: str) -> None:
    limit = case.shared.limits.handshake
    peer = look(endpoint, limit)
    if peer.kind == "refused":
        case.add("replay-refused", rank, endpoint=endpoint, error=peer.detail)
    elif peer.kind not in ("zmq", "unseen"):
        _check_stranger(case, rank, endpoint, peer)
    elif peer.socket_type and peer.socket_type != "ROUTER":
        case.add("replay-wrong-socket", rank, endpoint=endpoint, socket_type=peer.socket_type)
    elif peer.mechanism in ("", "NULL") and not _replays(endpoint, case.shared.context, limit):
        case.add("replay-silent", rank, endpoint=endpoint, waited=limit)


def _replays(endpoint: str, context: Context, timeout: float) -> bool:
    """Whether a replay ends that is requested from a number that no publisher has reached."""
    return any(reply.end for reply in _replay(endpoint, END_SEQ, context, timeout))


def _replay(endpoint: str, start: int, context: Context, timeout: float) -> Iterator[ReplayReply]:
    """Ask for a replay from a number, and yield the replies up to its end, within the time."""
    until = time.monotonic() + timeout
    with context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IPV6, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        sock.connect(endpoint)
        sock.send_multipart(replay_request(start))
        while sock.poll(max(0, int((until - time.monotonic()) * 1000) + 1)):
            try:
                reply = parse_replay(sock.recv_multipart())
            except DecodeError:
                return
            yield reply
            if reply.end:
                return


def _who_dials(endpoint: str, timeout: float) -> str:
    """Listen where nobody does, if the address is ours, and return the kind of socket that dials.

    A publisher that was given a concrete host connects to it, and tries again ten times a second.
    So do subscribers: a publisher counts first.
    """
    kind, until = "", time.monotonic() + timeout
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp":
        return ""
    try:
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), int(port)))
            listener.listen(8)
            while kind not in _PUBLISHES and (left := until - time.monotonic()) > 0:
                listener.settimeout(left)
                caller, _ = listener.accept()
                with caller:
                    kind = greet(caller, left).socket_type or kind
    except (OSError, OverflowError, UnicodeError):
        pass  # nobody dials any more, or the address is another machine's
    return kind
