"""Which implementation of the index is chosen, and what is said when it is not the wanted one."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

import kvindex
from kvindex.backend import choose_backend
from kvindex.errors import ConfigurationError

NATIVE = "kvindex._native"


class Unloadable(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the native module, and fails to load it as a file of another platform does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == NATIVE else None

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError("undefined symbol: planted", name=NATIVE)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NATIVE, ModuleType(NATIVE))


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NATIVE, None)


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NATIVE, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Unloadable(), *sys.meta_path])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("wanted", [None, "", "native"])
def test_native_runs_where_it_is_built(wanted: str | None) -> None:
    assert choose_backend(wanted) == "native"


@pytest.mark.usefixtures("unloadable")
def test_python_wanted_never_loads_the_native_module() -> None:
    assert choose_backend("python") == "python"


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize("wanted", [None, ""])
def test_python_runs_where_native_was_not_built(wanted: str | None) -> None:
    assert choose_backend(wanted) == "python"


@pytest.mark.usefixtures("missing")
def test_native_wanted_but_missing_says_how_to_get_it() -> None:
    with pytest.raises(ImportError, match=r"C\+\+20 compiler.*unset KVINDEX_BACKEND") as caught:
        choose_backend("native")
    assert caught.value.name == NATIVE


@pytest.mark.usefixtures("unloadable")
def test_native_wanted_but_unloadable_says_why() -> None:
    with pytest.raises(ImportError, match="undefined symbol: planted"):
        choose_backend("native")


@pytest.mark.usefixtures("unloadable")
def test_a_module_that_cannot_be_loaded_is_not_passed_over_silently() -> None:
    with pytest.warns(RuntimeWarning, match="undefined symbol: planted"):
        assert choose_backend(None) == "python"


@pytest.mark.parametrize("wanted", ["Native", "cython", " python"])
def test_another_name_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=f"KVINDEX_BACKEND is '{wanted}'"):
        choose_backend(wanted)


def test_the_backend_in_use_is_the_one_that_was_asked_for() -> None:
    wanted = os.environ.get("KVINDEX_BACKEND")
    assert wanted in (None, "", kvindex.BACKEND)
