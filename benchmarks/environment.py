"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone

import msgspec
import zmq

import kvindex


def header() -> str:
    """Return the lines that every table of figures begins with."""
    return "\n".join(
        [
            f"date      {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
            f"machine   {platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            f"python    {platform.python_implementation()} {platform.python_version()}",
            f"libraries pyzmq {zmq.__version__} (libzmq {zmq.zmq_version()}), "
            f"msgspec {msgspec.__version__}",
            f"kvindex   {kvindex.__version__}, backend {kvindex.BACKEND}",
        ]
    )


def resident_bytes() -> int:
    """Return this process's resident memory in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
