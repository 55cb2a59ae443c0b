"""Queues made by process groups of real processes: over pipes, and by torch if installed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvindex.shm import MessageQueue
from kvindex.shm.ring import Segment
from kvindex.wire.errors import ConfigurationError, SegmentError
from tests.native_ring import needs_ring
from tests.shm.group_ranks import (
    MESSAGES,
    PATIENCE,
    Ranks,
    Task,
    across_machines_without_an_address,
    from_outside,
    pass_round,
    pipe_groups,
    pipe_ranks,
    to_a_single_reader,
    torch_ranks,
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


PASSED: dict[str, tuple[int, list[int], set[int], dict[str, Any], list[tuple[list[int], int]]]] = {
    "each rank in turn": (3, [0, 1, 2], set(), {}, [([1, 2], 2), ([0, 2], 2), ([0, 1], 2)]),
    "a group of one": (1, [0], set(), {}, [([], 0)]),
    "nobody waits for the others": (2, [0], set(), {"blocking": False}, [([1], 1)]),
    "options": (2, [0], set(), {"codec": "pickle"}, [([1], 1)]),
    "another machine": (3, [0], {2}, {"connect_ip": "127.0.0.1"}, [([1], 2)]),
}


@pytest.mark.parametrize("case", PASSED)
def test_ranks_write_to_all_others(run: Run, case: str) -> None:
    world_size, writers, elsewhere, options, expected = PASSED[case]
    with run(world_size, partial(pass_round, writers, elsewhere, options)) as ranks:
        assert ranks.receive_all() == [expected] * world_size


def test_a_single_reader_may_be_alone(run: Run) -> None:
    with run(1, partial(to_a_single_reader, 0, True, set())) as ranks:
        assert ranks.receive_all() == [1]


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


# One rank that cannot open its end of a queue --------------------------------------------------

RANKS = 3


def failures(single_reader: bool, codecs: list[str], **options: Any) -> list[str]:
    """Return what each rank's constructor raised, every rank being a thread."""
    groups = pipe_groups(RANKS)

    def attempt(rank: int) -> str:
        try:
            if single_reader:
                MessageQueue.create_from_process_group_single_reader(
                    groups[rank], codec=codecs[rank]
                )
            else:
                MessageQueue.create_from_process_group(groups[rank], codec=codecs[rank], **options)
        except (ConfigurationError, TypeError, AttributeError) as error:
            return str(error)
        return "nothing"

    with ThreadPoolExecutor(RANKS) as threads:
        raised = list(threads.map(attempt, range(RANKS)))
    for group in groups:
        group.close()
    return raised


SAME = ["msgpack"] * RANKS
OPEN = "could not open its end of the queue"


@pytest.mark.parametrize(
    ("single", "codecs", "options", "culprit", "task", "reason"),
    [
        (False, ["msgpack", "msgpack", "pickle"], {}, 2, OPEN, "the queue's codec is 'msgpack'"),
        (True, ["msgpack", "nonsense", "msgpack"], {}, 1, OPEN, "codec must be"),
        (
            *(False, SAME, {"external_writer_handle": ("a", "tuple")}, 0),
            *("could not make the queue", "'tuple' object has no attribute 'to_bytes'"),
        ),
        (
            *(False, SAME, {"max_message_bytes": "1 GiB"}, 0),
            *("could not make the queue", "'<' not supported between instances of 'str' and 'int'"),
        ),
    ],
    ids=["another codec", "no codec", "no handle", "no length"],
)
def test_a_rank_that_cannot_open_its_end_ends_the_making_at_every_rank(
    single: bool, codecs: list[str], options: Any, culprit: int, task: str, reason: str
) -> None:
    raised = failures(single, codecs, **options)
    wrong = raised.pop(culprit)
    assert wrong.startswith(reason)
    assert set(raised) == {f"rank {culprit} {task}: {wrong}"}


def test_a_writer_without_shared_memory_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int, header: bytes) -> Segment:
        raise SegmentError("no room")

    monkeypatch.setattr(Segment, "make", refuse)
    writer, *_ = failures(False, SAME)
    assert writer.startswith("2 ranks share no memory with the writer")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "\0", "", 7])
def test_a_name_that_no_segment_has_is_no_shared_memory(name: Any) -> None:
    class Liar:
        rank, world_size = 1, 2

        def broadcast_object(self, obj: Any, source: int) -> Any:
            return name if obj is None and source == 0 else obj

        def barrier(self) -> None: ...

    with pytest.raises(ConfigurationError, match="1 ranks share no memory"):
        MessageQueue.create_from_process_group_single_reader(Liar())


@pytest.mark.parametrize("rank", [3, -1])
def test_a_rank_that_the_group_does_not_have_is_refused(rank: int) -> None:
    assert (
        failures(False, SAME, writer_rank=rank)
        == [f"writer_rank={rank!r} is no rank of this group: it has 3, from 0"] * RANKS
    )
