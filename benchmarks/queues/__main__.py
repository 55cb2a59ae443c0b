"""`python -m benchmarks.queues NAME`: one kind of queue; see `benchmarks.serving`."""

from __future__ import annotations

import sys
import tempfile
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.queues.adapter import create
from benchmarks.queues.crew import Crew
from benchmarks.serving import serve

MOST_READERS: Final = 4


def main() -> None:
    """Serve until the parent closes the stream; nothing stays, not even vLLM's sockets."""
    with TemporaryDirectory() as tempfile.tempdir:
        serve(_tasks)


def _tasks() -> dict[str, Any]:
    return {"queue": Crew(create(sys.argv[1]), MOST_READERS)}


if __name__ == "__main__":
    main()
