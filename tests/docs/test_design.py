"""The table of docs/design.md is the one that tests/unit/test_layers.py holds the code against."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS
from tests.unit.test_layers import ALLOWED

ROW = re.compile(r"^\| `(\w+)` \|[^|]*\|[^|]*\|([^|]*)\|$", re.MULTILINE)


def test_the_design_says_who_may_import_whom() -> None:
    told = {
        part: {name.strip() for name in parts.split(",") if name.strip()}
        for part, parts in ROW.findall((DOCS / "design.md").read_text())
    }
    assert told == ALLOWED
