"""Routing: which rank a request should go to, by each rank's cached blocks and load.

```
with router.reserve(token_ids) as booking: ...      # select and book, in one step
router.select(token_ids).reason                     # why this rank, in words
```

No sockets, no threads: it asks a `Client`, a `Replica` or an `Index`, and counts its bookings.

`adapters/` plugs it into the routers of Ray, LiteLLM and verl.
Read first: `router.py`, then `policies.py` (the policies) and `bookings.py`.
May import: `kvindex.wire` and `kvindex.index`; `adapters/` also `kvindex.subscribe`.
"""

from kvindex.routing.bookings import Booking, Stage
from kvindex.routing.candidates import Candidates, Choice, Policy
from kvindex.routing.choosing import Weights
from kvindex.routing.decision import Candidate, Decision
from kvindex.routing.filters import (
    Asked,
    Capacity,
    Filter,
    Labels,
    LoraLoaded,
    OnlyLive,
    Prefer,
)
from kvindex.routing.fleet import Followed, Source
from kvindex.routing.loads import Load, LoadBoard, LoadColumns, LocalLoadBoard
from kvindex.routing.policies import POLICIES, CostPolicy, make_policy
from kvindex.routing.requests import reads_cache
from kvindex.routing.router import Router
from kvindex.wire.errors import DuplicateBookingError, NoCandidateError, UnknownBookingError

__all__ = [
    "POLICIES",
    "Asked",
    "Booking",
    "Candidate",
    "Candidates",
    "Capacity",
    "Choice",
    "CostPolicy",
    "Decision",
    "DuplicateBookingError",
    "Filter",
    "Followed",
    "Labels",
    "Load",
    "LoadBoard",
    "LoadColumns",
    "LocalLoadBoard",
    "LoraLoaded",
    "NoCandidateError",
    "OnlyLive",
    "Policy",
    "Prefer",
    "Router",
    "Source",
    "Stage",
    "UnknownBookingError",
    "Weights",
    "make_policy",
    "reads_cache",
]
