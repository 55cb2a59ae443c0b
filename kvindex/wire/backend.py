"""Which implementation of the index runs: the native one, or the one in Python.

The native one runs wherever its module was built. The environment variable `KVINDEX_BACKEND`
overrides that: "python" takes the Python index, "native" makes a missing module an error. If unset
and there is no native module, the Python index runs, and the first index of the process logs a
warning.

This is about the index only. Queues in shared memory and the fan-out have no Python twin: they load
the native module when they are used, whichever index runs, and raise SegmentError without it.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final, Literal

from kvindex.wire.errors import ConfigurationError

logger = logging.getLogger(__name__)

Backend = Literal["native", "python"]

SLOWER: Final = "more than 100 times slower than the native one"
"""How the Python index compares, for messages."""

_VARIABLE = "KVINDEX_BACKEND"
_MODULE = "kvindex.wire._native"


def refuse_sub_interpreter() -> None:
    """Raise ImportError in a sub-interpreter, before native code is loaded there."""
    # The native index would be initialized a second time, and fail in the main interpreter.
    if sys.implementation.name != "cpython":
        return
    import ctypes

    here = ctypes.pythonapi.PyInterpreterState_Get
    main = ctypes.pythonapi.PyInterpreterState_Main
    here.restype = main.restype = ctypes.c_void_p
    if here() != main():
        raise ImportError(
            "kvindex works in the main interpreter of a process only, and this is a"
            " sub-interpreter. With mod_wsgi set WSGIApplicationGroup %{GLOBAL}, with uWSGI"
            " single-interpreter = true; else use a process of its own",
            name="kvindex",
        )


def choose_backend(wanted: str | None) -> Backend:
    """Return the backend to run, given the value of `KVINDEX_BACKEND` (None or "": unset)."""
    if wanted not in (None, "", "native", "python"):
        raise ConfigurationError(
            f'{_VARIABLE} is {wanted!r}; it can be "native", "python" or unset (native if built)'
        )
    if wanted == "python":
        return "python"
    try:
        import_module(_MODULE)
    except ImportError as error:
        if wanted == "native":
            raise ImportError(
                f"{_VARIABLE} is native, but {why_not_native()}. Or unset {_VARIABLE} to run the"
                " Python index",
                name=_MODULE,
            ) from error
        # Missing is a choice of whoever installed; broken is none, and would go unnoticed.
        if not _is_absent(error):
            warnings.warn(
                f"{_MODULE} is installed but cannot be loaded ({error}); the Python index runs,"
                f" set {_VARIABLE}=python to accept that",
                RuntimeWarning,
                stacklevel=2,
            )
        return "python"
    return "native"


def explain_fallback(wanted: str | None) -> str:
    """Return why the Python index runs uninvited, and what to do; "" if it does not."""
    if wanted == "python":
        return ""
    try:
        import_module(_MODULE)
    except ImportError:
        return f"{why_not_native()}. {_VARIABLE}=python accepts this"
    return ""


def why_not_native() -> str:
    """Return why native code does not run here, and what to do about it."""
    try:
        import_module(_MODULE)
    except ImportError as error:
        hidden = hidden_native_build()
        if not _is_absent(error):
            return f"{_MODULE} cannot be loaded ({error}). Install kvindex on this machine"
        if hidden is not None:
            return (
                f"the sources in {Path(__file__).parents[1]} have no native module and hide the"
                f" native build in {hidden}. Start Python in another directory, or install the"
                " sources with `pip install -e .`"
            )
        return (
            "the native module was not built. Install a C++20 compiler, then kvindex again: in its"
            " checkout, `pip install --no-cache-dir --force-reinstall -e .` (with"
            " KVINDEX_STRICT_BUILD=1 a build that fails says why)"
        )
    return f"the Python index was chosen. Unset {_VARIABLE}"


def hidden_native_build() -> Path | None:
    """Return where an installed native build lies that this copy of the package hides, if any."""
    # Here: it takes as long to load as the index, and only a missing native module needs it.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = distribution("kvindex")
    except PackageNotFoundError:
        return None
    for file in installed.files or ():
        if file.name.startswith("_native.") and file.suffix != ".pyi":
            path = Path(str(installed.locate_file(file)))
            return path.parent if path.exists() else None
    return None


@cache
def warn_of_fallback() -> None:
    """Log, once in a process, why the Python index runs uninvited."""
    cause = explain_fallback(os.environ.get(_VARIABLE))
    if cause:
        logger.warning("the Python index runs, %s: %s", SLOWER, cause)


def _is_absent(error: ImportError) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == _MODULE


refuse_sub_interpreter()
BACKEND: Final[Backend] = choose_backend(os.environ.get(_VARIABLE))
"""Which implementation of the index runs in this process: "native" (C++) or "python".

Both give the same answers; the Python one is more than 100 times slower, and has no snapshots and
no prefixes. The environment variable `KVINDEX_BACKEND` chooses.
"""
