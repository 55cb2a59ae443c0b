"""Restart the router and keep its index: save, and continue from the file.

python examples/07_warm_restart.py                                      # a fake engine
python examples/07_warm_restart.py router.kvindex tcp://host:5557 tcp://host:5657  # yours, again
"""

import sys
import tempfile
from pathlib import Path

from kvindex import Client, Rank, Worker, connect
from kvindex.testing import FakeEngine, Workload

rank = Rank("vllm-0")


def start(path: Path, worker: Worker) -> Client:
    """Start a router: the same line at the first start and every other."""
    client = connect([worker], resume=path)  # no file yet: every rank starts from scratch
    client.wait_live()
    return client


def show(what: str, client: Client) -> None:
    status = client.status(rank)
    counters = status.counters
    print(
        f"{what}: {len(client.index)} blocks, {counters.get('replayed', 0)} batches replayed, "
        f"{status.restarts} restarts, complete {status.complete}"
    )


def stop(path: Path, client: Client) -> None:
    """Stop a router. It may save at any other time too, say once a minute: kill -9 is no harm."""
    client.save(path)
    client.close()


def demonstrate(path: Path) -> None:
    with FakeEngine("vllm-0") as engine:
        worker = Worker("vllm-0", engine.endpoint, replay=engine.replay_endpoint)

        engine.run(Workload(100, seed=1))
        client = start(path, worker)
        show("first start", client)
        stop(path, client)

        engine.run(Workload(5, seed=2))  # the engine does not wait for routers
        client = start(path, worker)
        show("started again", client)  # replay fetched only the missed batches
        stop(path, client)

        engine.restart()  # its cache is empty now: the saved blocks are gone
        engine.run(Workload(5, seed=3))
        client = start(path, worker)
        show("engine restarted", client)  # kvindex noticed, and dropped the restored blocks
        client.close()


if len(sys.argv) > 1:
    path, endpoint, replay = sys.argv[1:]
    client = start(Path(path), Worker("vllm-0", endpoint, replay=replay))
    show("started", client)
    stop(Path(path), client)
else:
    with tempfile.TemporaryDirectory() as folder:
        demonstrate(Path(folder) / "router.kvindex")
