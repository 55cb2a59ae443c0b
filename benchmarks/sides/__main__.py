"""`python -m benchmarks.sides NAME [CPU,…]`: one side, serving tasks over its standard streams.

Each line in is `{"call": "task.method", "args": {…}}`, each line out `{"value": …}` or
`{"error": "traceback"}`. It ends when its input does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from typing import Any, TextIO

from benchmarks.sides.adapter import Adapter, create
from benchmarks.sides.applying import Applying
from benchmarks.sides.busy import Busy
from benchmarks.sides.growing import Growing
from benchmarks.sides.matching import Matching
from benchmarks.sides.remembering import Remembering


def main() -> None:
    """Serve until the parent closes the stream."""
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    tasks = _tasks(sys.argv[1])
    for line in sys.stdin:
        _reply(replies, tasks, json.loads(line))


def _tasks(name: str) -> dict[str, Any]:
    adapter: Adapter = create(name)
    tasks = {
        "match": Matching(adapter),
        "apply": Applying(adapter),
        "busy": Busy(adapter),
        "grow": Growing(adapter),
        "memory": Remembering(adapter, name),
    }
    if name == "kvindex":
        from benchmarks.sides.floor import Floor
        from benchmarks.sides.subscribed import Subscribed

        return {**tasks, "zmq": Subscribed(), "floor": Floor()}
    return tasks


def _reply(replies: TextIO, tasks: dict[str, Any], request: dict[str, Any]) -> None:
    task, method = request["call"].split(".")
    try:
        reply = {"value": getattr(tasks[task], method)(**request["args"])}
    except Exception:
        reply = {"error": traceback.format_exc()}
    replies.write(json.dumps(reply) + "\n")
    gc.collect()


if __name__ == "__main__":
    main()
