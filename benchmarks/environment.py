"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import numpy as np
import zmq

import kvindex


def facts(command: str) -> dict[str, str]:
    """Return what every table of figures begins with, by name."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores, {platform.machine()}, "
        f"{platform.system()} {platform.release()}",
        "load before": load,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": f"pyzmq {zmq.__version__} (libzmq {zmq.zmq_version()}), "
        f"msgspec {msgspec.__version__}, numpy {np.__version__}",
        "kvindex": f"{kvindex.__version__}, backend {kvindex.BACKEND}",
        "command": command,
    }


def header(found: dict[str, str]) -> str:
    """Return the facts as lines of Markdown."""
    return "\n".join(f"- {name}: {value}" for name, value in found.items())


def _cpu_model() -> str:
    """The processor's name as the kernel tells it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
