"""What tests of the doctor share: examinations with short deadlines, and strangers at ports."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvindex import Worker
from kvindex.doctor import Finding, Limits, Report, Target, examine

# For faults: nobody waits long for what will not come. For what comes, all have patience.
QUICK = Limits(http=10.0, handshake=0.3, live=0.3, listen=0.02, completion=10.0)
LIVE = Limits(http=10.0, handshake=5.0, live=15.0, listen=0.02, completion=10.0)
HEARING = Limits(http=10.0, handshake=5.0, live=15.0, listen=0.5, completion=10.0)
PATIENT = Limits(http=10.0, handshake=5.0, live=15.0, listen=15.0, completion=15.0)


def look_at(*targets: str | Worker | Target, limits: Limits = QUICK, **options: Any) -> Report:
    """Examine engines by URL or by where they publish."""
    given = [
        target
        if isinstance(target, Target)
        else Target(worker=target)
        if isinstance(target, Worker)
        else Target(url=target)
        for target in targets
    ]
    return examine(given, limits=limits, **options)


def ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


def the(report: Report, kind: str) -> Finding:
    """Return the one finding of this kind."""
    found = [finding for finding in report.findings if finding.id == kind]
    assert len(found) == 1, ids(report)
    return found[0]


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
