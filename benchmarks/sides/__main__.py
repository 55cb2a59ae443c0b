"""`python -m benchmarks.sides NAME [CPU,…]`: one side, serving tasks; see `benchmarks.serving`."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

from benchmarks.serving import serve
from benchmarks.sides.adapter import Adapter, create
from benchmarks.sides.applying import Applying
from benchmarks.sides.busy import Busy
from benchmarks.sides.growing import Growing
from benchmarks.sides.matching import Matching
from benchmarks.sides.remembering import Remembering
from benchmarks.sides.selecting import Selecting


def main() -> None:
    """Serve until the parent closes the stream."""
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
    serve(partial(_tasks, sys.argv[1]))


def _tasks(name: str) -> dict[str, Any]:
    if name == "dynamo-selection":
        from benchmarks.sides.dynamo_selection import DynamoSelection

        return {"select": Selecting(DynamoSelection())}
    adapter: Adapter = create(name)
    tasks = {
        "match": Matching(adapter),
        "apply": Applying(adapter),
        "busy": Busy(adapter),
        "grow": Growing(adapter),
        "memory": Remembering(adapter, name),
    }
    if name == "kvindex":
        from benchmarks.sides.besieged import Besieged
        from benchmarks.sides.booking import Booked
        from benchmarks.sides.fanned import Fanned
        from benchmarks.sides.floor import Floor
        from benchmarks.sides.kvindex_router import KVIndexRouter
        from benchmarks.sides.pooled import Pooled
        from benchmarks.sides.sharing import Sharing
        from benchmarks.sides.subscribed import Subscribed

        return {
            **tasks,
            "zmq": Subscribed(),
            "floor": Floor(),
            "fan": Fanned(),
            "pool": Pooled(),
            "siege": Besieged(),
            "book": Booked(),
            "share": Sharing(),
            "select": Selecting(KVIndexRouter()),
        }
    return tasks


if __name__ == "__main__":
    main()
