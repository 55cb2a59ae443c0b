"""Who may import whom: the table of docs/design.md, held against the code's own imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import kvindex

ROOT = Path(kvindex.__file__).parent

# part -> parts of kvindex that it may import; "kvindex" stands for the public names, "_native" for
# the extension module (built from native/, so it has no source here).
ALLOWED: dict[str, set[str]] = {
    "rank": set(),
    "errors": {"rank"},
    "rank_lookup": {"errors", "rank"},
    "forks": set(),
    "waker": set(),
    "log_rate": set(),
    "curve": {"errors"},
    "backend": {"errors", "_native"},
    "wire": {"errors"},
    "sequencer": {"errors", "rank"},
    "subscribe": {"sequencer", "curve", "rank_lookup", "errors", "rank", "wire", "forks"}
    | {"waker", "log_rate"},
    "index": {"rank_lookup", "errors", "rank", "wire", "backend", "forks", "_native"},
    "publish": {"curve", "errors", "wire", "waker", "log_rate"},
    "ring": {"errors", "_native"},
    "shm": {"curve", "errors", "ring", "log_rate"},
    "saved_state": {"errors", "rank", "index", "subscribe"},
    "answering": {"rank_lookup", "errors", "rank", "index", "subscribe"},
    "client": {"rank_lookup", "errors", "rank", "index", "subscribe", "saved_state", "answering"}
    | {"discovery"},
    "fanout": {
        "errors",
        "rank",
        "rank_lookup",
        "forks",
        "index",
        "subscribe",
        "client",
        "discovery",
    }
    | {"answering", "ring", "log_rate"},
    "routing": {"errors", "rank", "rank_lookup", "forks", "index", "wire", "backend", "_native"},
    "integrations": {"client", "subscribe", "routing", "errors", "rank", "rank_lookup", "log_rate"},
    "queries": {"_native", "backend", "errors", "index", "rank"},
    "discovery": {"subscribe", "wire", "errors", "forks", "rank", "rank_lookup"},
    "audit": {"kvindex", "errors", "wire"},
    "doctor": {"kvindex", "errors", "discovery", "wire"},
    "metrics": {"kvindex", "routing"},
    "server": {"kvindex", "errors", "discovery", "fanout", "log_rate", "metrics", "queries"}
    | {"index", "routing", "wire"},
    "testing": {"errors", "rank", "wire", "publish", "subscribe", "index", "client", "kvindex"}
    | {"waker"},
    "cli": {
        "kvindex",
        "routing",
        "backend",
        "wire",
        "testing",
        "index",
        "subscribe",
        "publish",
        "fanout",
        "errors",
        "rank",
        "audit",
        "discovery",
        "doctor",
        "server",
    },
}
# The sequencer is pure: no sockets, threads, clocks or event contents.
IMPURE = {"zmq", "threading", "time", "socket", "select", "selectors", "asyncio", "kvindex.wire"}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a module, read once."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def modules() -> dict[Path, str]:
    return {
        path: path.relative_to(ROOT).parts[0].removesuffix(".py")
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent != ROOT or path.stem in ALLOWED
    }


def test_every_part_imports_only_what_it_may_know() -> None:
    for path, part in modules().items():
        for module in imports(path):
            if module.split(".")[0] == "kvindex":
                known = part_of(module)
                assert known == part or known in ALLOWED[part], f"{path} imports {module}"


def test_the_sequencer_is_pure() -> None:
    paths = sorted((ROOT / "sequencer").glob("*.py"))
    assert paths
    for path in paths:
        for module in imports(path):
            impure = {name for name in IMPURE if module == name or module.startswith(f"{name}.")}
            assert not impure, f"{path} imports {module}"


def test_parts_import_no_private_names_of_each_other() -> None:
    for path, part in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvindex."):
                for alias in node.names:
                    private = alias.name.startswith("_")
                    assert not private, f"{path} ({part}) imports {node.module}.{alias.name}"


def test_the_ring_is_used_by_its_public_names() -> None:
    for path, part in modules().items():
        for module in imports(path):
            inside = module.startswith("kvindex.ring.")
            assert part == "ring" or not inside, f"{path} imports {module}"


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
    command = [sys.executable, "-c", LISTED.format(code=code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def packages(loaded: set[str]) -> set[str]:
    return {name.split(".")[1] for name in loaded if name.startswith("kvindex.")}


def test_importing_kvindex_loads_neither_asyncio_nor_tls_nor_parts_that_are_not_used() -> None:
    loaded = loaded_by("import kvindex")
    assert not loaded.intersection(LATE)
    parts = {"discovery", "routing", "fanout", "server", "audit", "doctor", "metrics", "cli"}
    assert not packages(loaded) & parts


def test_a_client_of_named_endpoints_loads_no_discovery() -> None:
    loaded = loaded_by(
        'import kvindex\nkvindex.connect([kvindex.Worker("a", "tcp://127.0.0.1:1")]).close()'
    )
    assert not loaded.intersection(LATE)
    assert "discovery" not in packages(loaded)


def test_the_help_loads_no_command_and_a_command_loads_no_other() -> None:
    help_ = "from kvindex.cli import main\ntry: main({arguments})\nexcept SystemExit: pass"
    loaded = loaded_by(help_.format(arguments=["--help"]))
    assert not loaded.intersection(LATE)
    commands = {"demo", "serve", "doctor", "audit", "top", "status", "record"}
    assert not {name.removeprefix("kvindex.cli.") for name in loaded} & commands
    assert "kvindex.server" not in loaded_by(help_.format(arguments=["status", "--help"]))
