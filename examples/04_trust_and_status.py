"""How far an answer can be trusted: losses, `on_loss`, and what status and statistics show.

python examples/04_trust_and_status.py                 # a fake engine, faults
python examples/04_trust_and_status.py tcp://host:5557 # the status of yours
"""

import sys
import time
from contextlib import ExitStack
from typing import Literal

from kvindex import NotLiveError, Rank, RankStatus, ReplayPolicy, Worker, connect
from kvindex.testing import FakeEngine, FaultyLink

prompt = list(range(160))
rank = Rank("vllm-0")


def show(status: RankStatus) -> None:
    print(
        f"  {status.rank}: {status.state}, seq {status.seq}, complete {status.complete}, "
        f"lag {status.lag} batches {status.reason}"
    )
    print("  counted:", ", ".join(f"{n} {name}" for name, n in sorted(status.counters.items())))


def lose_a_batch(on_loss: Literal["reset", "keep"]) -> None:
    """Drop one batch while replay is silent: then nothing can repair the gap."""
    with ExitStack() as stack:
        engine = stack.enter_context(FakeEngine("vllm-0"))
        link = stack.enter_context(FaultyLink(engine.endpoint, engine.replay_endpoint))
        worker = Worker("vllm-0", link.endpoint, replay=link.replay_endpoint)
        impatient = ReplayPolicy(timeout=0.1, attempts=2)
        client = stack.enter_context(
            connect([worker], on_loss=on_loss, replay_policy=impatient, probe_interval=0.2)
        )
        client.wait_live()
        engine.serve(prompt[:80])
        while client.status(rank).seq != 0:
            time.sleep(0.01)
        before = client.match(prompt)[rank].tokens
        link.silence_replay()
        link.drop_next()
        engine.serve(range(1000, 1080))  # this batch never arrives
        engine.serve(range(2000, 2080))  # the next one shows that it is missing
        while not client.status(rank).losses:
            time.sleep(0.01)
        after = client.match(prompt)[rank].tokens
        print(f"on_loss={on_loss!r}: {before} tokens before, {after} after the loss")
        show(client.status(rank))


if len(sys.argv) > 1:
    with connect([Worker("vllm-0", sys.argv[1])]) as client:
        try:
            client.wait_live(timeout=5.0)
        except NotLiveError as error:
            print(error)  # names each rank, what is wrong, and what to try
        show(client.status(rank))
else:
    lose_a_batch("reset")  # the default: removals may be lost, so the rank's blocks are dropped
    lose_a_batch("keep")  # answers stay, flagged: complete is False from now on

    # Nothing listens there: the error names the rank, and what to check.
    with connect([Worker("down-0", "tcp://127.0.0.1:9")]) as client:
        try:
            client.wait_live(timeout=0.5)
        except NotLiveError as error:
            print(error)
