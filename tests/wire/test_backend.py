"""Which implementation of the index is chosen, and what is said when it is not the wanted one."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

import kvindex
from kvindex.wire.backend import choose_backend, explain_fallback, why_not_native
from kvindex.wire.errors import ConfigurationError
from tests.children import ENVIRONMENT, Program, run_code

pytestmark = pytest.mark.unit

NATIVE = "kvindex.wire._native"


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


CHOSEN = [
    *[("built", wanted, "native") for wanted in (None, "", "native")],
    *[("missing", wanted, "python") for wanted in (None, "", "python")],
    ("unloadable", "python", "python"),  # which never loads the native module
]


@pytest.mark.parametrize(("state", "wanted", "backend"), CHOSEN)
def test_native_runs_where_it_is_built_unless_python_is_wanted(
    state: str, wanted: str | None, backend: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(state)
    assert choose_backend(wanted) == backend
    assert (explain_fallback(wanted) == "") == (backend == "native" or wanted == "python")


@pytest.mark.usefixtures("missing")
def test_native_wanted_but_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", not_installed)
    with pytest.raises(ImportError, match=r"C\+\+20 compiler.*unset KVINDEX_BACKEND") as caught:
        choose_backend("native")
    assert caught.value.name == NATIVE


@pytest.mark.usefixtures("unloadable")
def test_a_module_that_cannot_be_loaded_is_not_passed_over_silently() -> None:
    reason = "undefined symbol: planted"
    with pytest.raises(ImportError, match=reason):
        choose_backend("native")
    with pytest.warns(RuntimeWarning, match=reason):
        assert choose_backend(None) == "python"
    assert reason in explain_fallback(None)


@pytest.mark.parametrize("wanted", ["Native", "cython", " python"])
def test_another_name_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=f"KVINDEX_BACKEND is '{wanted}'"):
        choose_backend(wanted)


def test_the_backend_in_use_is_the_one_that_was_asked_for() -> None:
    wanted = os.environ.get("KVINDEX_BACKEND")
    assert wanted in (None, "", kvindex.BACKEND)


# The reason for the fallback to Python ----------------------------------------------------------


@pytest.mark.usefixtures("missing")
def test_a_missing_native_module_is_told_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", not_installed)
    reason = explain_fallback(None)
    assert "pip install --no-cache-dir --force-reinstall" in reason
    assert "KVINDEX_BACKEND=python" in reason


@pytest.mark.usefixtures("missing")
def test_sources_that_hide_an_installed_native_build_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = tmp_path / "kvindex" / "_native.abi3.so"
    built.parent.mkdir()
    built.touch()
    monkeypatch.setattr(
        "importlib.metadata.distribution", lambda _: Installed(tmp_path, "_native.abi3.so")
    )
    reason = explain_fallback("")
    assert f"hide the native build in {built.parent}" in reason
    assert "pip install -e ." in reason
    with pytest.raises(ImportError, match="hide the native build"):
        choose_backend("native")
    built.unlink()  # a record of a file that is gone hides nothing
    assert "hide" not in explain_fallback("")


def not_installed(name: str) -> Installed:
    raise PackageNotFoundError(name)


class Installed:
    """What importlib.metadata tells of an installed distribution."""

    def __init__(self, root: Path, *names: str) -> None:
        self._root = root
        self.files = [PurePosixPath("kvindex", name) for name in ("_native.pyi", *names)]

    def locate_file(self, path: PurePosixPath) -> Path:
        return self._root / path


FALLBACK = """
import sys
sys.modules["kvindex.wire._native"] = None  # as on a machine without a compiler
import kvindex
print(kvindex.BACKEND)
for _ in range(2):
    kvindex.connect().close()
    kvindex.Index()
"""


@pytest.mark.parametrize(("backend", "warnings"), [("", 1), ("python", 0)])
def test_the_first_index_of_a_process_warns_once_that_python_runs(
    backend: str, warnings: int
) -> None:
    with Program("-c", FALLBACK, env={**ENVIRONMENT, "KVINDEX_BACKEND": backend}) as program:
        out, errors = program.finish()
    assert (out, program.process.returncode) == ("python\n", 0)
    assert errors.count("Python index") == errors.count("\n") == warnings


IN_A_SUB_INTERPRETER = """
import sys, kvindex
try:
    import _interpreters as interpreters
    created = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    created = interpreters.create()
index = kvindex.Index()
index.add(kvindex.Rank("a"))
try:
    code = f"import sys; sys.path[:] = {sys.path}; import kvindex"
    failed = interpreters.run_string(created, code)
except BaseException as error:
    failed = error
assert "main interpreter" in str(failed), failed
kvindex.Index().add(kvindex.Rank("b"))
assert index.match([1, 2]).best is None
"""


def test_a_sub_interpreter_is_refused_and_the_main_one_goes_on() -> None:
    with Program("-c", IN_A_SUB_INTERPRETER) as program:
        _, errors = program.finish()
    assert program.process.returncode == 0, errors


def test_the_services_queries_name_the_cause_when_sources_hide_the_native_module() -> None:
    program = """
import sys
sys.modules["kvindex.wire._native"] = None
from kvindex.wire import backend
backend.hidden_native_build = lambda: "/venv/kvindex"
from kvindex.shm import ShmRingBuffer
for use in (lambda: __import__("kvindex.service.queries"), lambda: ShmRingBuffer(1, 64, 4)):
    try:
        use()
    except Exception as error:
        print(type(error).__name__, error)
"""
    _, out, errors = run_code(program, env={**ENVIRONMENT, "KVINDEX_BACKEND": ""})
    query, ring = out.splitlines()
    for line, error in ((query, "ImportError"), (ring, "SegmentError")):
        assert line.startswith(error), errors
        assert "hide the native build in /venv/kvindex" in line
        assert "C++20 compiler" not in line


def test_the_python_index_that_was_chosen_is_no_missing_compiler() -> None:
    if kvindex.BACKEND == "native":
        assert why_not_native() == "the Python index was chosen. Unset KVINDEX_BACKEND"
