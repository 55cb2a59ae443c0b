"""The built site: no warnings, nothing from third parties, and every public name is in it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

pytestmark = pytest.mark.e2e

MODULES = ["kvindex"]
MODULES += [
    f"kvindex.{part}"
    for part in (
        "index",
        "wire",
        "publish",
        "testing",
        "routing",
        "tools.audit",
        "subscribe.discovery",
        "service.queries",
        "replicas",
        "shm",
        "shm.ring",
    )
]
PROMETHEUS = importlib.util.find_spec("prometheus_client") is not None
MODULES += ["kvindex.service.metrics"] * PROMETHEUS
DOCUMENTED = re.compile(r"^\.\. auto\w+:: (\S+)$", re.MULTILINE)
LOADED = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']((?:https?:)?//[^"']+)"""
)


def documented() -> list[str]:
    return [
        name
        for page in sorted((DOCS / "reference").glob("*.md"))
        for name in DOCUMENTED.findall(page.read_text())
        if PROMETHEUS or not name.startswith("kvindex.service.metrics.")
    ]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    shown = [public(path) for path in documented()]
    for name in importlib.import_module(module).__all__:
        thing = public(f"{module}.{name}")
        assert any(thing is entry for entry in shown), f"{module}.{name}"


def test_the_reference_shows_public_names_only_and_each_once() -> None:
    paths = documented()
    assert len(paths) == len(set(paths))
    for path in paths:
        public(path)


def public(path: str) -> object:
    module, _, name = path.rpartition(".")
    assert name in importlib.import_module(module).__all__, path
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    built = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E"),
            *("-b", "html", DOCS, built),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return built


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not LOADED.findall(page.read_text()), page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet.name
