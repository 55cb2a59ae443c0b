"""What runs only where there are rings: on Linux, with the native module."""

from __future__ import annotations

import pytest

from kvindex.errors import SegmentError
from kvindex.ring.ring import check_native


def _missing() -> str:
    try:
        check_native()
    except SegmentError as error:
        return str(error)
    return ""


MISSING = _missing()
"""Why there are no rings here; "" if there are."""

needs_ring = pytest.mark.skipif(bool(MISSING), reason=MISSING)
