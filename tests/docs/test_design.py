"""The table of docs/design.md is the one that test_layers.py holds the code against."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import DOCS
from tests.package.test_layers import LAYERS

pytestmark = pytest.mark.unit

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|[^|]*\|[^|]*\|$", re.MULTILINE)


def test_the_design_says_who_may_import_whom() -> None:
    rows = ROW.findall((DOCS / "design.md").read_text())
    assert [tuple(re.findall(r"\w+", rooms)) for rooms in rows] == LAYERS
