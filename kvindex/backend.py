"""Which implementation of the index runs: the native one, or the one in Python.

The native one runs wherever its module was built. The environment variable `KVINDEX_BACKEND` says
otherwise: "python" never loads the module, "native" makes its absence an error.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Final, Literal

from kvindex.errors import ConfigurationError

__all__ = ["BACKEND", "Backend", "choose_backend"]

Backend = Literal["native", "python"]

_VARIABLE = "KVINDEX_BACKEND"
_MODULE = "kvindex._native"


def choose_backend(wanted: str | None) -> Backend:
    """Return the backend to run, given what `KVINDEX_BACKEND` asks for (None or "": nothing).

    A native module that is there but cannot be loaded is never passed over silently: the Python
    index then runs with a `RuntimeWarning` that says why.

    Raises:
        ConfigurationError: `wanted` is neither "native" nor "python".
        ImportError: `wanted` is "native" and the native module is missing or cannot be loaded.
    """
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
                f"{_VARIABLE} is native, but {_MODULE} cannot be loaded ({error}). Install kvindex"
                " where a C++20 compiler is (with KVINDEX_STRICT_BUILD=1 a failing build says why),"
                f" or unset {_VARIABLE} to run the Python index",
                name=_MODULE,
            ) from error
        if not _is_absent(error):
            warnings.warn(
                f"{_MODULE} is installed but cannot be loaded ({error}); the Python index runs,"
                f" set {_VARIABLE}=python to accept that",
                RuntimeWarning,
                stacklevel=2,
            )
        return "python"
    return "native"


def _is_absent(error: ImportError) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == _MODULE


BACKEND: Final[Backend] = choose_backend(os.environ.get(_VARIABLE))
"""Which implementation of the index runs: "native" or "python"."""
