"""Queues made by process groups of real processes: over pipes, and by torch if installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvindex.shm import MessageQueue
from tests.native_ring import needs_ring
from tests.shm.group_ranks import PATIENCE, Ranks, Task, pipe_ranks, torch_ranks
from tests.shm.queue_tasks import (
    MESSAGES,
    across_machines,
    across_machines_without_an_address,
    from_each_rank_in_turn,
    from_outside,
    to_a_single_reader,
    with_pickle,
    without_waiting,
)

pytestmark = [pytest.mark.e2e, needs_ring]

Run = Callable[[int, Any], AbstractContextManager[Ranks]]

KINDS = ["pipes"] + ["torch"] * (find_spec("torch") is not None)


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Start so many ranks with a task."""

    def start(world_size: int, task: Task) -> AbstractContextManager[Ranks]:
        if request.param == "pipes":
            return pipe_ranks(world_size, task)
        everyone = list(range(world_size))
        return torch_ranks(world_size, task, f"{tmp_path}/store", "gloo", everyone)

    return start


def test_each_rank_in_turn_writes_to_all_others(run: Run) -> None:
    with run(3, from_each_rank_in_turn) as ranks:
        for results in ranks.receive_all():
            assert results == [([1, 2], 2), ([0, 2], 2), ([0, 1], 2)]


def test_a_group_of_one_needs_no_other_code(run: Run) -> None:
    with run(1, from_each_rank_in_turn) as ranks:
        assert ranks.receive_all() == [[([], 0)]]
    with run(1, partial(to_a_single_reader, 0, True, set())) as ranks:
        assert ranks.receive_all() == [1]


def test_ranks_need_not_wait_for_each_other(run: Run) -> None:
    with run(2, without_waiting) as ranks:
        assert ranks.receive_all() == [([1], 1)] * 2


def test_options_reach_both_sides(run: Run) -> None:
    with run(2, with_pickle) as ranks:
        assert ranks.receive_all() == [[1, 2]] * 2


def test_ranks_on_another_machine_read_by_tcp(run: Run) -> None:
    with run(3, across_machines) as ranks:
        assert ranks.receive_all() == [([1], 2)] * 3


def test_ranks_on_another_machine_need_an_address(run: Run) -> None:
    with run(3, across_machines_without_an_address) as ranks:
        name, text = ranks.receive(0)
        assert name == "ConfigurationError"
        assert "1 ranks share no memory with the writer: give it connect_ip" in text
        for rank in (1, 2):  # no rank waits for ever
            name, _ = ranks.receive(rank)
            assert name in ("PeerDiedError", "QueueTimeoutError", "ConfigurationError")


def test_a_writer_outside_of_the_group_writes_to_all_of_it(run: Run) -> None:
    with MessageQueue(2, 2, None, 64, 4) as writer:
        with run(2, partial(from_outside, writer.export_handle().to_bytes())) as ranks:
            writer.wait_until_ready(PATIENCE)
            for message in MESSAGES:
                writer.enqueue(message, PATIENCE)
            assert ranks.receive_all() == [True, True]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("reader_rank", "elsewhere"), [(0, set()), (1, {2}), (2, {2})])
def test_every_rank_writes_to_a_single_reader(
    run: Run, reader_rank: int, elsewhere: set[int], blocking: bool
) -> None:
    with run(3, partial(to_a_single_reader, reader_rank, blocking, elsewhere)) as ranks:
        assert ranks.receive_all() == [3 if rank == reader_rank else 0 for rank in range(3)]
