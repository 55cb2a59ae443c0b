"""What runs only where there are rings: on Linux, with the native module."""

from __future__ import annotations

import pytest

from kvindex.shm.ring.ring import check_native
from kvindex.wire.errors import SegmentError


def _missing() -> str:
    try:
        check_native()
    except SegmentError as error:
        return str(error)
    return ""


MISSING = _missing()
"""Why there are no rings here; "" if there are."""

needs_ring = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# Offsets that only the native parties use, as native/shm/layout.hpp has them.
STATE, NEXT_SEQ = 64, 256  # in the header
SLOT_STATE = 0  # in a reader's slot
SEQ, LENGTH, KIND = 0, 8, 16  # in a chunk's record
