"""One rank that cannot open its end of a group's queue is no riddle to the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvindex.shm import MessageQueue
from kvindex.wire.errors import ConfigurationError
from tests.native_ring import needs_ring
from tests.shm.group_ranks import pipe_groups

pytestmark = [pytest.mark.e2e, needs_ring]

RANKS = 3


def tries(single_reader: bool, codecs: list[str], **options: Any) -> list[str]:
    """Return what each rank's constructor raised, every rank being a thread."""
    groups = pipe_groups(RANKS)

    def one(rank: int) -> str:
        try:
            if single_reader:
                MessageQueue.create_from_process_group_single_reader(
                    groups[rank], codec=codecs[rank]
                )
            else:
                MessageQueue.create_from_process_group(groups[rank], codec=codecs[rank], **options)
        except ConfigurationError as error:
            return str(error)
        return "nothing"

    with ThreadPoolExecutor(RANKS) as threads:
        raised = list(threads.map(one, range(RANKS)))
    for group in groups:
        group.close()
    return raised


def test_a_reader_with_another_codec_ends_the_making_at_every_rank() -> None:
    writer, reader, wrong = tries(False, ["msgpack", "msgpack", "pickle"])
    assert wrong.startswith("the queue's codec is 'msgpack'")
    assert writer == reader
    assert writer.startswith("rank 2 could not open its end of the queue: the queue's codec")


def test_a_writer_that_cannot_make_its_queue_ends_the_making_at_every_rank() -> None:
    first, wrong, third = tries(True, ["msgpack", "nonsense", "msgpack"])
    assert wrong.startswith("codec must be")
    assert first == third
    assert first.startswith("rank 1 could not open its end of the queue: codec must be")


def test_an_external_handle_that_is_none_ends_the_making_at_every_rank() -> None:
    raised = tries(False, ["msgpack"] * RANKS, external_writer_handle=("a", "tuple"))
    wrong, *others = raised
    assert wrong == "external_writer_handle must be a Handle or None, not a tuple"
    assert set(others) == {f"rank 0 could not make the queue: {wrong}"}


def test_an_option_of_the_wrong_kind_ends_the_making_at_every_rank() -> None:
    wrong, *others = tries(False, ["msgpack"] * RANKS, max_message_bytes="1 GiB")
    assert wrong == "max_message_bytes must be a positive int, not '1 GiB'"
    assert set(others) == {f"rank 0 could not make the queue: {wrong}"}
