"""Subscribe to engines, wait until their past is replayed, and ask which rank holds a prompt.

python examples/02_connect.py                                   # two fake engines
python examples/02_connect.py tcp://host:5557 tcp://host:5657   # yours: endpoint, replay
"""

import sys
from contextlib import ExitStack

from kvindex import Worker, connect
from kvindex.testing import FakeEngine

prompt = list(range(100))

with ExitStack() as stack:
    if len(sys.argv) > 1:
        workers = [Worker("engine", sys.argv[1], replay=sys.argv[2] if sys.argv[2:] else None)]
    else:
        short = stack.enter_context(FakeEngine("short"))
        long = stack.enter_context(FakeEngine("long"))
        short.serve(prompt[:40])
        long.serve(prompt)  # both served before we connect: replay fetches the events
        workers = [Worker(e.worker, e.endpoint, replay=e.replay_endpoint) for e in (short, long)]

    client = stack.enter_context(connect(workers))
    client.wait_live(timeout=5.0)  # a TimeoutError would name each rank that is not live, and why

    match = client.match(prompt)
    for held in match:  # longest first
        print(f"{held.rank}: {held.tokens} tokens, {held.state}, complete: {held.complete}")
    print("best:", match.best.rank if match.best else "nobody holds a block of it")
