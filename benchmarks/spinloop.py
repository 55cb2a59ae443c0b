"""Lets vLLM's small C extension `spinloop` be loaded without the GPU packages of its wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_LINKED_NOT_USED: Final = ("libnvrtc.so.13", "libc10_cuda.so", "libtorch_cuda.so")
"""Libraries that the extension was linked with and of which it uses no symbol."""

_QUIET: Final = {"VLLM_LOGGING_LEVEL": "ERROR"}


def without_spinloop(python: str) -> dict[str, str]:
    """Return the environment of vLLM as it is by default."""
    return {**_QUIET, "VLLM_USE_SPINLOOP_EXT": "0"}


def with_spinloop(python: str) -> dict[str, str]:
    """Return the environment of vLLM with its extension turned on.

    A CPU build of torch lacks libraries that the loader wants to see before it loads the
    extension. Their names become links to one that torch has.
    """
    venv = Path(python).parent.parent
    (there,) = venv.glob("lib/python*/site-packages/torch/lib")
    folder = venv / "linked-not-used"
    folder.mkdir(exist_ok=True)
    for name in _LINKED_NOT_USED:
        link = folder / name
        if not (there / name).exists() and not link.is_symlink():
            link.symlink_to(there / "libc10.so")
    return {**_QUIET, "VLLM_USE_SPINLOOP_EXT": "1", "LD_LIBRARY_PATH": str(folder)}
