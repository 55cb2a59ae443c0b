"""The examples of README and docs run, against fake engines where they name endpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvindex.testing import FakeEngine

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKETCH = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORKER = re.compile(
    r'Worker\("vllm-0", "tcp://127\.0\.0\.1:5557", replay="tcp://127\.0\.0\.1:5657", dp_size=2\)'
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    ranks = [FakeEngine("vllm-0", dp_rank=rank) for rank in range(2)]
    yield ranks
    for engine in ranks:
        engine.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_of_the_page_runs(page: Path, engines: list[FakeEngine]) -> None:
    token_ids = list(range(100))
    engines[0].serve(token_ids)
    live = [engine.endpoint for engine in engines]
    replay = [engine.replay_endpoint for engine in engines]
    names: dict[str, object] = {"token_ids": token_ids}
    try:
        for example in PYTHON.findall(page.read_text()):
            exec(WORKER.sub(f'Worker("vllm-0", {live}, replay={replay})', example), names)
    finally:
        if "client" in names:
            names["client"].close()  # type: ignore[attr-defined]


def test_the_readme_example_finds_the_rank_that_holds_the_prompt(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    test_every_python_example_of_the_page_runs(ROOT / "README.md", engines)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "vllm-0/0 96 True"
    assert printed[1].endswith("6 {'GPU': 6} live")
    assert printed[3:] == [
        "vllm-0/0: 96 of 100 tokens: every whole block of the prompt is resident",
        "vllm-0/1: 0 of 100 tokens: it holds nothing at all",
    ]


CHECK_NAMES = """
import ast, sys

tree, names = ast.parse(sys.stdin.read()), {}
for node in tree.body:  # others may not be installed
    if isinstance(node, ast.Import | ast.ImportFrom) and "kvindex" in ast.unparse(node):
        exec(ast.unparse(node), names)
for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
        root = ast.unparse(node).split(".")[0]
        if root in names or root == "kvindex":
            eval(ast.unparse(node), names)
"""


def sketches() -> list[object]:
    """The examples that need more than kvindex to run, each with its page."""
    return [
        pytest.param(sketch, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, sketch in enumerate(SKETCH.findall(page.read_text()))
    ]


@pytest.mark.parametrize("sketch", sketches())
def test_every_sketch_of_the_pages_imports_what_it_names(sketch: str) -> None:
    # In a process of its own, where nobody else has imported kvindex.fanout.
    subprocess.run(
        [sys.executable, "-c", CHECK_NAMES],
        input=sketch,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_the_page_leads_to_a_file(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target
