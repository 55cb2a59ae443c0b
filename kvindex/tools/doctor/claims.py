"""What an engine states over HTTP, and who answers at its ports: what is wrong with either.

Who answers is asked by sockets of ZeroMQ itself: whether a handshake succeeds with a SUB or with a
DEALER tells a publisher from a replay socket. What demands a key is seen by its greeting alone: it
hangs up so quickly that libzmq, nine times in ten, cannot tell why.
"""

from __future__ import annotations

import re
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Final

import zmq

from kvindex import PublisherAddress
from kvindex.subscribe.discovery import DiscoveryError, ask_engine
from kvindex.tools.doctor.case import Case
from kvindex.tools.doctor.engine import EngineHttp
from kvindex.tools.doctor.services import check_service
from kvindex.wire import END_SEQ, ReplayReply, parse_replay, replay_request
from kvindex.wire.errors import DecodeError
from kvindex.wire.web import Web

Context = zmq.Context[zmq.Socket[bytes]]

_DENIED: Final = re.compile("answers 40[13]")
_LARGE_BLOCK: Final = 256  # tokens

_PAGES = "pages are hashed by their own tokens only: the same page at two places is one"
_PLACES = "events leave out where pages belong: answers are 0 or too low"
_SPLIT = "a split prefix is announced as removed and never stored again: answers are too low"
_SHA256 = "with sha256 hashes no batch can be encoded, and every one is lost"
_HYBRID = "KV events switch off the hybrid cache manager: hybrid models cache less"

# Engine, first version with it, first version without it, what it is.
_BUGS: Final = (
    ("sglang", "0.4.8", "0.5.1", _PAGES),
    ("sglang", "0.5.1", "0.5.6", _PLACES),
    ("sglang", "0.5.6", "0.5.7", _SPLIT),
    ("vllm", "0.9.0", "0.10.2", _SHA256),
    ("vllm", "0.10.2", "0.20.0", _HYBRID),
)

_MAX_MESSAGE: Final = 8 << 20  # bytes
_PROTOCOL: Final = {"http": "an HTTP server", "tls": "a TLS server", "other": "another protocol"}
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f\x03"  # to which ZMTP 3 sends its whole greeting
_SPEAKS_FIRST: Final = 0.5  # seconds in which a ZeroMQ socket sends its greeting
_ATTEMPTS: Final = 10  # of a handshake, of about 1 ms each
_PUBLISHER_RETRIES: Final = 1.0  # seconds; it dials ten times in one
_MONITORED: Final = struct.Struct("=HI")  # what a monitor sends: the event and its value
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


# What the engine states --------------------------------------------------------------------------


def ask_and_check(case: Case) -> None:
    """Ask the engine at the case's URL what it is and where it publishes; note what is wrong."""
    url, token, limits = case.target.url, case.shared.token, case.shared.limits
    web = Web(url, token=token or None, context=case.shared.tls)
    try:
        report = ask_engine(url, limits.http, token=token or None, context=case.shared.tls)
    except DiscoveryError as error:
        if error.reason in ("status", "content") and check_service(case, web):
            return
        kind = {"denied": "engine-denied", "tls": "tls-failed"}.get(error.reason)
        case.add(kind or "engine-unreachable", url=url, error=str(error))
        return
    # A gateway lists models as its engines do, but does not say where it publishes.
    if report.publishes is None and check_service(case, web):
        return
    case.report = report
    refusal = next((why for why in report.failures.values() if _DENIED.match(why)), "")
    if refusal:  # vLLM guards only what is under /v1
        case.add("engine-denied", url=url, error=refusal)
    case.http = EngineHttp(web, timeout=limits.http, completion=limits.completion)
    case.metrics = case.http.metrics()
    _check_events(case)
    _check_cache(case)
    info = case.info
    # SGLang alone: its D caches nothing unless it is told to. vLLM's caches what it fetches.
    caches = info.get("disaggregation_decode_enable_radix_cache")
    if info.get("disaggregation_mode") == "decode" and not caches:
        case.add("decode-only", disaggregation_mode="decode")
    algorithm = info.get("speculative_algorithm")
    if isinstance(algorithm, str) and algorithm.upper() in ("EAGLE", "EAGLE3", "NEXTN"):
        case.add("speculates-bigrams", algorithm=algorithm)
    if len(case.addresses) > 1 and case.target.worker is None:
        case.add("dp-behind-one-port", ranks=len(case.addresses))
    version = version_of(report.version)
    for engine, first, fixed, bug in _BUGS:
        if report.kind == engine and version_of(first) <= version < version_of(fixed):
            about = {"version": report.version, "bug": bug, "since": fixed}
            case.add("version-known-bug", engine_name=engine, **about)


def version_of(text: str) -> tuple[int, ...]:
    """Return a version's leading numbers.

    Examples:
        >>> version_of("0.10.1.1rc2"), version_of("dev")
        ((0, 10, 1, 1), ())
    """
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number[:9]) for number in numbers[0].split(".")) if numbers else ()


def _check_events(case: Case) -> None:
    """Note what is wrong with the engine's events, and take its endpoints where none were given."""
    report = case.report
    assert report is not None
    # vLLM's answer has three shapes: an object with a list in it, a list, and an object by rank.
    sources = report.answers.get("/kv_event_sources")
    if isinstance(sources, Mapping):
        sources = sources.get("sources", list(sources.values()))
    described = [*(sources if isinstance(sources, list) else []), case.info.get("kv_events")]
    publishers = {entry.get("publisher") for entry in described if isinstance(entry, Mapping)}
    others = sorted(p for p in publishers if isinstance(p, str) and p not in ("zmq", "null"))
    if others:
        case.add("publisher-not-zmq", publisher=", ".join(others))
    elif report.publishes is False:
        case.add("events-off", url=report.url)
    _compare_endpoints(case)
    if others or report.publishes is False:
        case.broken.update(address.dp_rank for address in case.addresses)  # nothing is to be there
    if case.worker is not None or others:
        return
    try:
        case.worker = report.worker()
    except DiscoveryError as error:
        if error.reason == "unsaid":
            case.add("sources-unknown", url=report.url, failures=report.failures)
        elif error.reason == "content":
            case.add("endpoint-unreachable", endpoint=report.url, error=str(error))
    else:
        case.name = case.worker.name


def _compare_endpoints(case: Case) -> None:
    """Note where the user and the engine state different ports; hosts may be mapped."""
    given, stated = case.addresses, case.report.ranks if case.report else ()
    if not given or not stated:
        return
    by_rank = {address.dp_rank: address for address in stated}
    if len(stated) == len(given) == 1:
        # Behind a load balancer of its own a rank may be the only one, whatever its number.
        pairs = [(given[0], stated[0])]
    else:
        pairs = [(a, by_rank[a.dp_rank]) for a in given if a.dp_rank in by_rank]
        ranks = [address.dp_rank for address in given]
        if ranks != list(by_rank):
            case.add("ranks-differ", stated=list(by_rank), given=ranks)
            case.broken.update(set(ranks) - set(by_rank))
    for address, stated_address in pairs:
        ports, stated_ports = _ports(address), _ports(stated_address)
        if address.replay is None and stated_address.replay is not None:
            case.add("replay-not-given", address.dp_rank, port=stated_ports["replay"])
            ports["replay"] = stated_ports["replay"]
        if ports != stated_ports:
            case.add("endpoints-differ", address.dp_rank, stated=stated_ports, given=ports)


def _ports(address: PublisherAddress) -> dict[str, int | str | None]:
    """The ports of a rank; other endpoints as they are."""
    ports: dict[str, int | str | None] = {}
    for name, endpoint in (("port", address.endpoint), ("replay", address.replay)):
        scheme, _, port = (endpoint or "").rpartition(":")
        ports[name] = int(port) if scheme.startswith("tcp:") and port.isdigit() else endpoint
    return ports


def accept_mapped(case: Case) -> None:
    """Drop the finding that ports differ, if the test prompt arrived through one of them.

    Then a proxy maps them: nothing is to be done.
    """
    differing = {f.subject for f in case.findings if f.id == "endpoints-differ"}
    # Through the own publisher the prompt arrives, too, while the replay endpoint is another's.
    foreign = any(finding.id == "replay-of-another" for finding in case.findings)
    if not differing or foreign or not case.test or case.test["outcome"] != "all-well":
        return
    listener = case.listener
    if listener is not None:
        tested = {f"{case.name}/{r}" for r in listener.received if listener.first(r).tested}
        if not tested & differing:
            return
    case.findings = [finding for finding in case.findings if finding.id != "endpoints-differ"]


def _check_cache(case: Case) -> None:
    config = case.metrics.labels("vllm:cache_config_info")
    if config.get("enable_prefix_caching") == "False" or case.info.get("disable_radix_cache"):
        case.add("prefix-caching-off", source="cache_config_info" if config else "server_info")
    size, longest = case.block_size, case.max_model_len
    if size is not None and longest is not None and 2 * size > longest:
        case.add("block-exceeds-prompts", block_size=size, max_model_len=longest)
    elif size is not None and size >= _LARGE_BLOCK:
        case.add("block-large", block_size=size)
    blocks = config.get("num_gpu_blocks", "")
    tokens = int(blocks) * size if blocks.isdigit() and len(blocks) < 12 and size else None
    # SGLang has no such series: it reports tokens.
    if not config:
        stated = case.info.get("max_total_num_tokens")
        tokens = stated if isinstance(stated, int) else None
    if tokens and longest and tokens < 2 * longest:
        case.add("cache-small", cache_tokens=tokens, max_model_len=longest)


# Who answers at its ports ------------------------------------------------------------------------


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
    # Of an engine that states its endpoints the lack is known, of others it is the user's.
    if all(address.replay is None for address in (*case.addresses, *stated)):
        case.add("replay-missing" if stated else "replay-not-named")


def check_rank(case: Case, address: PublisherAddress) -> None:
    """Look at a rank's two ports and note what is wrong."""
    rank, worker, limit = address.dp_rank, case.worker, case.shared.limits.handshake
    if worker is None or worker.bind or rank in case.broken:
        return
    if not _check_port(case, rank, address.endpoint, zmq.SUB):
        case.broken.add(rank)
    if address.replay is None or worker.curve is not None:
        return
    if _check_port(case, rank, address.replay, zmq.DEALER):
        # No publisher reaches that number: all that it can answer is the end.
        replies = _replay(address.replay, END_SEQ, case.shared.context, limit)
        if not any(reply.end for reply in replies):
            case.add("replay-silent", rank, endpoint=address.replay, waited=limit)


def _check_port(case: Case, rank: int, endpoint: str, kind: int) -> bool:
    """Note what is wrong where a SUB or a DEALER is to connect; return whether nothing is."""
    limit, context = case.shared.limits.handshake, case.shared.context
    is_live = kind == zmq.SUB
    peer, detail = _peer_at(endpoint, limit)
    if peer == "refused":
        what = "replay-refused"
        if is_live:
            what = _who_dials(context, endpoint, limit) or "publisher-refused"
        case.add(what, rank, endpoint=endpoint, error=detail)
    elif peer in _PROTOCOL:
        protocol = _PROTOCOL[peer]
        case.add("port-not-zmq", rank, endpoint=endpoint, protocol=protocol, detail=detail)
    elif peer in ("reset", "silent"):
        case.add(f"port-{peer}", rank, endpoint=endpoint)
    elif peer == "unreachable":
        case.add("endpoint-unreachable", rank, endpoint=endpoint, error=detail)
    if peer != "zmq":
        return peer == "unseen"
    if detail not in ("", "NULL"):
        # The subscription itself shows whether a key that was given is the right one.
        if case.worker is not None and case.worker.curve is not None:
            return True
        if is_live:
            case.add("port-encrypted", rank, endpoint=endpoint, mechanism=detail)
        return False
    if _handshake(context, kind, endpoint, limit) == "other-type":
        # Most often the two endpoints were exchanged: then the other kind of socket is welcome.
        other, name = (zmq.DEALER, "ROUTER") if is_live else (zmq.SUB, "PUB")
        if _handshake(context, other, endpoint, limit) != "done":
            name = "unknown"
        what = "publisher-wrong-socket" if is_live else "replay-wrong-socket"
        case.add(what, rank, endpoint=endpoint, socket_type=name)
        return False
    return True


def _peer_at(endpoint: str, timeout: float) -> tuple[str, str]:
    """Return what answers at an endpoint, by its first bytes, and what else is known of it."""
    scheme, _, address = endpoint.partition("://")
    if scheme not in ("tcp", "ipc"):  # such as inproc
        return "unseen", ""
    try:
        connection = _dialled(scheme, address, timeout)
    except (ConnectionRefusedError, FileNotFoundError) as error:  # the latter for an ipc path
        return "refused", str(error)
    except OSError as error:
        return "unreachable", str(error) or "no answer in time"
    with connection:
        try:
            connection.settimeout(min(timeout, _SPEAKS_FIRST))
            try:
                began = connection.recv(16)
            except TimeoutError:  # most other servers wait for a request
                connection.settimeout(timeout)
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                began = connection.recv(16)
        except TimeoutError:
            return "silent", ""
        except OSError:
            return "reset", ""
        if began[:1] == b"\xff":  # as each greeting of ZeroMQ begins, and no other protocol
            try:
                connection.sendall(_SIGNATURE)
                while len(began) < 32 and (piece := connection.recv(32 - len(began))):
                    began += piece
            except OSError:
                pass  # it broke off: the subscription will show why
            # Its security mechanism.
            return "zmq", began[12:32].rstrip(b"\0").decode("ascii", "replace")
    if not began:
        return "reset", ""
    if began.startswith(b"HTTP/"):
        return "http", ""
    if began[:2] in (b"\x15\x03", b"\x16\x03"):
        return "tls", ""
    return "other", f"it began with {began!r}"


def _dialled(scheme: str, address: str, timeout: float) -> socket.socket:
    if scheme == "tcp":
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout)
        if connection.getsockname() == connection.getpeername():
            # Where nobody listens at a local port, TCP may choose that very port to dial from.
            connection.close()
            raise ConnectionRefusedError("nobody listens: it connected to itself")
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect("\0" + address[1:] if address.startswith("@") else address)
    except BaseException:
        connection.close()
        raise
    return connection


def _handshake(context: Context, kind: int, endpoint: str, timeout: float) -> str:
    """Return how a handshake with the socket at an endpoint ends; "" if none does in time."""
    misfits = 0
    for _ in range(_ATTEMPTS):
        outcome = next(_handshakes(context, kind, endpoint, timeout), "")
        if outcome in ("done", ""):
            return outcome
        # Once may be an accident. And if the other side sees first that the types do not fit, it
        # hangs up, which here is just a broken connection: a few in a hundred.
        misfits += outcome == "other-type"
        if misfits > 1:
            break
    return "other-type" if misfits else "broken"


def _handshakes(
    context: Context, kind: int, endpoint: str, timeout: float, *, binds: bool = False
) -> Iterator[str]:
    """Yield how handshakes end: "done", "broken" or "other-type"."""
    until, is_broken = time.monotonic() + timeout, False
    with context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.IPV6, 1)
        monitor = sock.get_monitor_socket(_EVENTS)
        try:
            (sock.bind if binds else sock.connect)(endpoint)
            while monitor.poll(max(0, int((until - time.monotonic()) * 1000))):
                event, _ = _MONITORED.unpack(monitor.recv_multipart()[0])
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    yield "done"
                elif event == zmq.EVENT_DISCONNECTED:
                    # Of sockets whose types do not fit libzmq says only that they parted.
                    yield "broken" if is_broken else "other-type"
                    is_broken = False
                else:
                    is_broken = True
        finally:
            sock.disable_monitor()
            monitor.close(0)


def _who_dials(context: Context, endpoint: str, timeout: float) -> str:
    """Listen where nobody does, if the address is ours; return the finding if somebody dials."""
    # A publisher that was given a concrete host connects to it, and tries again ten times a second.
    found, until = "", time.monotonic() + timeout
    try:
        for outcome in _handshakes(context, zmq.SUB, endpoint, timeout, binds=True):
            if outcome == "done":
                return "publisher-connects"
            # Subscribers dial dead ports, too. An engine among them comes within a second.
            if outcome == "other-type" and not found:
                found, until = "subscriber-dials", time.monotonic() + _PUBLISHER_RETRIES
            if time.monotonic() >= until:
                break
    except zmq.ZMQError:
        pass  # the address is another machine's, or somebody has begun to listen
    return found


# Replay ------------------------------------------------------------------------------------------


def check_replayed(case: Case) -> None:
    """Note replay endpoints that lack the batch received last."""
    limit, context = case.shared.limits.handshake, case.shared.context
    for address in case.addresses:
        marks = case.listener.first(address.dp_rank).marks if case.listener else {}
        endpoint = address.replay
        if endpoint is None or not marks:
            continue
        seq = next(reversed(marks))
        for _ in range(2):  # engines keep a batch just after they sent it
            first = next(_replay(endpoint, seq, context, limit), None)
            if first is None or not first.end:
                break
        if first is None or (seq < first.seq and not first.end):
            continue  # it is silent, or that batch has left the buffer
        if first.end or first.seq != seq or zlib.crc32(first.payload) != marks[seq]:
            there = "is missing there" if first.end else "is another there"
            case.add("replay-of-another", address.dp_rank, endpoint=endpoint, seq=seq, there=there)


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
