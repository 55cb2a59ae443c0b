"""Asking a server how it stands, without joining it."""

from __future__ import annotations

import json
import os
from typing import Any

from kvindex.errors import DecodeError
from kvindex.fanout.frames import Ask, Report
from kvindex.fanout.joining import Link
from kvindex.fanout.meeting_point import check_platform

__all__ = ["ask"]

_MAX_BYTES = 1 << 28


def ask(path: str | os.PathLike[str], timeout: float = 5.0) -> dict[str, Any]:
    """Return what `FanOut.report` gives in the process whose server listens at `path`.

    Args:
        path: as for `FanOut`.
        timeout: longest silence of the server, in seconds.

    Raises:
        DecodeError: what answers is no server of this version.
        OSError: none answers; the message says where.
    """
    check_platform()
    path = os.fspath(path)
    try:
        link = Link(path, timeout)
        try:
            link.send(Ask())
            report = link.receive()
            if not isinstance(report, Report) or report.json_bytes > _MAX_BYTES:
                raise DecodeError(f"the server at {path} answers with {report!r:.100}")
            found: dict[str, Any] = json.loads(link.read(report.json_bytes))
        finally:
            link.close()
    except OSError as error:
        trouble = error.strerror or str(error)
        raise OSError(f"no fan-out server answers at {path}: {trouble}") from error
    return found
