"""A fake engine that streams, until a signal: `… -m benchmarks.streaming_engine NAME BLOCKS`."""

from __future__ import annotations

import signal
import sys
from typing import Final

from kvindex.testing import FakeEngine, HttpEngine, HttpOptions

_LONGEST: Final = 1 << 17  # tokens


def main() -> None:
    """Print the engine's URL, and serve."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    options = HttpOptions(max_model_len=_LONGEST, render=True)
    with FakeEngine(sys.argv[1], num_blocks=int(sys.argv[2])) as engine:
        with HttpEngine(engine, options=options) as server:
            print(f"HTTP at {server.url}", flush=True)
            signal.pause()


if __name__ == "__main__":
    main()
