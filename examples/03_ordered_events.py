"""The ordered events without an index: batches, and losses and restarts as values between them.

python examples/03_ordered_events.py                                   # a fake engine
python examples/03_ordered_events.py tcp://host:5557 tcp://host:5657   # yours, until Ctrl-C
"""

import sys
from contextlib import ExitStack

from kvindex import EventStream, Worker
from kvindex.subscribe import RankBatch, RankLost, RankRestarted, StreamItem
from kvindex.testing import FakeEngine


def show(item: StreamItem) -> None:
    if isinstance(item, RankBatch):
        kinds = [type(event).__name__ for event in item.batch.events]
        print(f"{item.rank} epoch {item.epoch} seq {item.seq}: {', '.join(kinds)}")
    elif isinstance(item, RankLost):
        # The lost batches may have had removals: a mirror of the cache must start afresh.
        print(f"{item.rank}: lost from seq {item.first_seq} on ({item.reason})")
    elif isinstance(item, RankRestarted):
        print(f"{item.rank}: a new engine process ({item.reason}): forget what it held")


with ExitStack() as stack:
    if len(sys.argv) > 1:
        replay = sys.argv[2] if sys.argv[2:] else None
        stream = stack.enter_context(EventStream([Worker("engine", sys.argv[1], replay=replay)]))
        for item in stream:  # ends when the stream is closed
            show(item)

    engine = stack.enter_context(FakeEngine("vllm-0"))
    engine.serve(range(40))
    engine.serve(range(80))
    worker = Worker("vllm-0", engine.endpoint, replay=engine.replay_endpoint)
    stream = stack.enter_context(EventStream([worker]))
    restarted = False
    for item in stream:
        show(item)
        if isinstance(item, RankBatch) and item.seq == 1:
            # The next process numbers from 0 again, and its cache is empty.
            engine.restart()
            engine.serve(range(60))
        restarted = restarted or isinstance(item, RankRestarted)
        if restarted and isinstance(item, RankBatch):
            break
