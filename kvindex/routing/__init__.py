"""Routing: which rank a request should go to, by each rank's cached blocks and load.

```
with router.reserve(token_ids) as booking: ...      # select and book, in one step
router.select(token_ids).reason                     # why this rank, in words
```

A router queries a `Client`, a `Replica` or an `Index`. It has no sockets and no threads of its own.

`fleet.py` has the ranks and the filters, `load.py` their load, `policies.py` the choice and its
reasons, `kv_source.py` where KV may be pulled from, `bookings.py` the requests that are under way,
`funnel.py` what they found cached. `shared_load.py` counts the load of other gateways, which it
exchanges over NATS: the only thread and socket here. `adapters/` plugs a router into Ray, LiteLLM
and verl.
Read first: `router.py`, then `policies.py` and `bookings.py`.
May import: `kvindex.wire` and `kvindex.index`; `adapters/` also `kvindex.subscribe`.
"""

from kvindex.routing.bookings import Booking, Stage
from kvindex.routing.fleet import (
    Capacity,
    Ejection,
    Filter,
    FilterRequest,
    Followed,
    Labels,
    LoraLoaded,
    OnlyLive,
    Prefer,
    PromptOptions,
    RequestOptions,
    Source,
)
from kvindex.routing.kv_source import KvSource
from kvindex.routing.load import Load, LoadBoard, LoadColumns, LocalLoadBoard
from kvindex.routing.policies import (
    POLICIES,
    Candidate,
    Candidates,
    Choice,
    CostPolicy,
    Decision,
    Policy,
    Weights,
    make_policy,
)
from kvindex.routing.router import Router
from kvindex.routing.shared_load import SharedLoad
from kvindex.wire.errors import DuplicateBookingError, NoCandidateError, UnknownBookingError
from kvindex.wire.quirks import reads_cache

__all__ = [
    "POLICIES",
    "Booking",
    "Candidate",
    "Candidates",
    "Capacity",
    "Choice",
    "CostPolicy",
    "Decision",
    "DuplicateBookingError",
    "Ejection",
    "Filter",
    "FilterRequest",
    "Followed",
    "KvSource",
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
    "PromptOptions",
    "RequestOptions",
    "Router",
    "SharedLoad",
    "Source",
    "Stage",
    "UnknownBookingError",
    "Weights",
    "make_policy",
    "reads_cache",
]
