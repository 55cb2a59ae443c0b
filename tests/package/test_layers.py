"""Who may import whom: the table of docs/design.md, held against the code's own imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvindex
from tests.children import Program

pytestmark = pytest.mark.unit

ROOT = Path(kvindex.__file__).parent

# A room imports rooms of the rows above its own, and what is in itself. The rooms of one row do not
# know each other. The first four rows are the SDK, which must not import the root's public names.
LAYERS = [
    ("wire",),
    ("publish", "subscribe", "shm", "index"),
    ("client",),
    ("replicas",),
    ("testing", "routing"),
    ("service",),
    ("gateway",),
    ("tools",),
]
SDK = {room for row in LAYERS[:4] for room in row}
ALLOWED = {
    room: {below for rooms in LAYERS[:row] for below in rooms} | {room}
    for row, rooms in enumerate(LAYERS)
    for room in rooms
}
IO = {"zmq", "threading", "time", "socket", "select", "selectors", "asyncio"}
# Parts that know less than their room may.
UNKNOWN: dict[str, set[str]] = {
    "index/**/*.py": {"zmq", "socket"},
    "routing/*.py": {"zmq", "socket"}
    | {f"kvindex.{room}" for room in ("subscribe", "shm", "client", "replicas")},
    "service/**/*.py": {"kvindex.testing"},
    "gateway/**/*.py": {"kvindex.testing"},
    "subscribe/sequencer/*.py": IO,
    "tools/[ad]*/*.py": {"kvindex.testing"},
}
# The same the other way round: all that they import of kvindex.
KNOWN: dict[str, set[str]] = {
    "shm/**/*.py": {"kvindex.shm"}
    | {
        f"kvindex.wire.{name}"
        for name in ("backend", "errors", "curve", "forks", "log_rate", "options", "_native")
    },
    "subscribe/sequencer/*.py": {"kvindex.subscribe.sequencer"}
    | {"kvindex.wire.errors", "kvindex.wire.rank"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def is_in(module: str, parts: set[str]) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in parts)


def files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def test_the_first_look_shows_the_rooms() -> None:
    # A folder whose files have moved may be there still, with what Python compiled.
    names = {path.name for path in ROOT.iterdir() if path.is_file() or any(path.glob("*.py"))}
    assert names == ALLOWED.keys() | {"__init__.py", "__main__.py", "py.typed"}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_rooms_below_it_only(room: str) -> None:
    assert files(room)
    for path in files(room):
        for module in imports(path):
            if module == "kvindex":
                assert room not in SDK, f"{path} imports the root"
            elif module.startswith("kvindex."):
                assert module.split(".")[1] in ALLOWED[room], f"{path} imports {module}"


@pytest.mark.parametrize("part", UNKNOWN | KNOWN)
def test_a_part_knows_nothing_that_would_bind_it_and_little_of_kvindex(part: str) -> None:
    paths = sorted(ROOT.glob(part))
    assert paths
    for path in paths:
        for module in imports(path):
            assert not is_in(module, UNKNOWN.get(part, set())), f"{path} imports {module}"
            if module.split(".")[0] == "kvindex":
                assert is_in(module, KNOWN.get(part, {"kvindex"})), f"{path} imports {module}"


def imported_names() -> Iterator[tuple[Path, str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvindex."):
                for alias in node.names:
                    yield path, node.module or "", alias.name


def test_nothing_imports_private_names_of_another_file() -> None:
    for path, module, name in imported_names():
        assert not name.startswith("_"), f"{path} imports {module}.{name}"


def test_the_ring_is_used_by_its_public_names() -> None:
    for path, module, name in imported_names():
        inside = module.startswith("kvindex.shm.ring.")
        assert ROOT / "shm" / "ring" in path.parents or not inside, f"{path} imports {name}"


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_says_what_to_read_first_and_what_it_may_import(room: str) -> None:
    said = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    assert "Read first:" in said
    assert "May import:" in said


def test_all_is_sorted_and_complete() -> None:
    assert sorted(set(kvindex.__all__)) == sorted(kvindex.__all__)
    for name in kvindex.__all__:
        assert hasattr(kvindex, name), name


LATE = ("asyncio", "ssl", "http", "email", "urllib.request", "importlib.metadata", "tempfile")
LISTED = """
import sys
before = set(sys.modules)
{code}
print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""


def loaded_by(code: str) -> set[str]:
    """Return the modules that a new process loads for this code."""
    with Program("-c", LISTED.format(code=code)) as process:
        _, err = process.finish()
    assert process.process.returncode == 0, err
    return set(err.splitlines()[-1].split())


def test_importing_kvindex_loads_neither_asyncio_nor_tls_nor_parts_that_are_not_used() -> None:
    loaded = loaded_by("import kvindex")
    assert not loaded.intersection(LATE)
    parts = {"subscribe.discovery", "shm", "replicas", "routing", "service", "tools"}
    assert not {name for name in loaded if is_in(name, {f"kvindex.{part}" for part in parts})}


def test_a_client_of_named_endpoints_loads_no_discovery() -> None:
    loaded = loaded_by(
        'import kvindex\nkvindex.connect([kvindex.Worker("a", "tcp://127.0.0.1:1")]).close()'
    )
    assert not loaded.intersection(LATE)
    assert "kvindex.subscribe.discovery" not in loaded


def test_the_help_loads_no_command_and_a_command_loads_no_other() -> None:
    help_ = "from kvindex.tools.cli import main\ntry: main({arguments})\nexcept SystemExit: pass"
    loaded = loaded_by(help_.format(arguments=["--help"]))
    assert not loaded.intersection(LATE)
    commands = {"demo", "serve", "doctor", "audit", "top", "status", "record"}
    assert not {name.removeprefix("kvindex.tools.cli.") for name in loaded} & commands
    assert "kvindex.service" not in loaded_by(help_.format(arguments=["status", "--help"]))
