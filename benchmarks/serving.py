"""The answering end of `benchmarks.process.Side`: methods of objects, called in lines of JSON.

Each line in is `{"call": "task.method", "args": {…}}`, each line out `{"value": …}` or
`{"error": "traceback"}`. It ends when its input does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO


def serve(make_tasks: Callable[[], Mapping[str, Any]]) -> None:
    """Serve these tasks over the standard streams until the parent closes them."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    tasks = make_tasks()
    for line in sys.stdin:
        _reply(replies, tasks, json.loads(line))


def _reply(replies: TextIO, tasks: Mapping[str, Any], request: dict[str, Any]) -> None:
    task, method = request["call"].split(".")
    try:
        reply = {"value": getattr(tasks[task], method)(**request["args"])}
    except Exception:
        reply = {"error": traceback.format_exc()}
    replies.write(json.dumps(reply) + "\n")
    gc.collect()
