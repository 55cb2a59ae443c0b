"""A ring that is handed to another process, in each way that Python starts one."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kvindex.shm import ShmRingBuffer
from kvindex.wire.errors import SegmentError
from tests.live import PATIENCE
from tests.native_ring import needs_ring

pytestmark = [pytest.mark.e2e, needs_ring]


def use(ring: ShmRingBuffer, connection: Connection) -> None:
    """Read what the maker wrote, answer, and try what only the maker may."""
    try:
        with ring.get_data(1) as chunk, ring.get_metadata(1) as flags:
            begins_with = bytes(chunk[:5])
            chunk[:5] = b"child"
            flags[2] = 1
        refused = ""
        try:
            ring.writer()
        except SegmentError as error:
            refused = str(error)
        connection.send((begins_with, refused, ring.reader(1).active))
        connection.recv()
        ring.close()
    except BaseException as error:
        connection.send(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_ring_is_used_by_a_process_that_it_is_passed_to(method: str) -> None:
    start: Any = multiprocessing.get_context(method)  # typeshed knows no Process of it
    here, there = start.Pipe()
    with ShmRingBuffer(2, 64, 2) as ring:
        with ring.get_data(1) as chunk:
            chunk[:5] = b"maker"
        process = start.Process(target=use, args=(ring, there))
        process.start()
        there.close()
        assert here.poll(PATIENCE)
        begins_with, refused, active = here.recv()
        assert (begins_with, active) == (b"maker", False)
        assert "only the maker" in refused
        with ring.get_data(1) as chunk, ring.get_metadata(1) as flags:
            assert (bytes(chunk[:5]), list(flags)) == (b"child", [0, 0, 1])
        assert ring.reader_lives(1)
        here.send("close")
        process.join(PATIENCE)
        assert process.exitcode == 0
        assert not ring.reader_lives(1)
        assert Path("/dev/shm", ring.name).exists(), "the maker's to unlink"
