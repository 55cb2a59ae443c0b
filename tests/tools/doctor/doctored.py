"""What tests of the doctor share: examinations with short deadlines, and strangers at ports."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvindex import Worker
from kvindex.testing import FakeEngine
from kvindex.testing.ports import reserve_port
from kvindex.tools.doctor import Diagnosis, Finding, Limits, Target, examine
from kvindex.wire.errors import KVIndexError
from tests.live import PATIENCE

# Nobody waits long for what will not come. For what comes, all have patience.
PATIENT = Limits(
    http=PATIENCE,
    handshake=PATIENCE,
    live=PATIENCE,
    replay=PATIENCE,
    listen=PATIENCE,
    completion=PATIENCE,
)
HEARING = replace(PATIENT, listen=0.5)
LIVE = replace(PATIENT, listen=0.02)
NEVER_LIVE = replace(LIVE, live=0.5)
BRIEFLY = 0.1  # for what will not come


def briefly(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Have a function, whose last argument is a time-out, wait in vain for a moment only."""
    waits = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: waits(*given[:-1], BRIEFLY))


def look_at(
    *targets: str | Worker | Target, limits: Limits = NEVER_LIVE, **options: Any
) -> Diagnosis:
    """Examine engines by URL or by where they publish."""
    given = []
    for target in targets:
        named = Target(url=target) if isinstance(target, str) else target
        given.append(Target(worker=named) if isinstance(named, Worker) else named)
    return examine(given, limits=limits, **options)


def ids(report: Diagnosis) -> list[str]:
    return [finding.id for finding in report.findings]


def finds(kinds: list[str], *targets: str | Worker | Target, **options: Any) -> Diagnosis:
    """Return the report of an examination, which must have these findings and no other."""
    report = look_at(*targets, **options)
    assert ids(report) == kinds
    return report


def the(report: Diagnosis, kind: str) -> Finding:
    """Return the one finding of this kind."""
    findings = [finding for finding in report.findings if finding.id == kind]
    assert len(findings) == 1, ids(report)
    return findings[0]


@contextmanager
def two_ranks(dialect: str) -> Iterator[list[FakeEngine]]:
    """An engine's ranks 0 and 1 at ports that follow each other, as SGLang says them."""
    for _ in range(100):
        with ExitStack() as stack:
            zero = stack.enter_context(FakeEngine("a", dialect=dialect))
            base: dict[str, Any] = {
                "endpoint": zero.endpoint,
                "replay_endpoint": zero.replay_endpoint,
            }
            try:
                one = FakeEngine("a", dp_rank=1, dialect=dialect, **base)
            except KVIndexError:
                continue  # the port after it is somebody else's
            yield [zero, stack.enter_context(one)]
            return
    raise AssertionError("no two ports follow each other")


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


@contextmanager
def unused(scheme: str = "tcp") -> Iterator[str]:
    """An endpoint, or a URL, at which nobody listens, and which nobody dials.

    At 127.0.0.1 clients of other tests may still dial a port whose engine has ended.
    """
    host = "127.0.0.9" if sys.platform == "linux" else "127.0.0.1"
    holder, port = reserve_port(host)
    with holder:
        yield f"{scheme}://{host}:{port}"


@contextmanager
def bound(
    kind: int, endpoint: str = "tcp://127.0.0.1:*"
) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A ZeroMQ socket of this kind at a port, and its endpoint."""
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind(endpoint)
        yield sock, sock.getsockopt_string(zmq.LAST_ENDPOINT)


@contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens at a TCP port, and what it does with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            kept = []
            try:
                while True:
                    connection, _ = server.accept()
                    kept.append(connection)
                    answer(connection)
            except OSError:
                pass  # it was closed
            finally:
                for connection in kept:
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
