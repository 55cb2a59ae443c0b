"""Snapshots of a pool: what was put is what comes back, whole, or nothing does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex import Rank, RankStatus
from kvindex.index import Index
from kvindex.replicas.messages import LENGTH, Begin, End
from kvindex.replicas.nats import snapshots
from kvindex.replicas.nats.log import Log, NoStreamError, StreamSettings
from kvindex.replicas.nats.snapshots import (
    PoolSnapshots,
    SnapshotContents,
    encode_snapshot,
    name_of,
)
from kvindex.replicas.outflow import Part, TakenRank
from kvindex.wire.errors import NatsError, SnapshotError
from kvindex.wire.nats import NatsPool
from tests.live import PATIENCE
from tests.replicas.nats.scenes import connection
from tests.subscribe.test_status_board import status as live

pytestmark = pytest.mark.e2e

A, B = Rank("a"), Rank("b", 3)


def index_of() -> Index:
    index = Index(seed=7, max_blocks_per_rank=1000)
    for rank in (A, B):
        index.add(rank)
    return index


def parts_of(index: Index, shown: RankStatus | None = None) -> list[Part]:
    """A snapshot that is begun a second time, since ranks were renamed."""
    taken = [
        TakenRank(A, 12, shown or live(A), index.dump(A), b"cursor"),
        TakenRank(B, 13, None, index.dump(B), None),
    ]
    return [Begin(5), taken[0], Begin(10), *taken, End(14, [(A, A), (Rank("old"), B)])]


def encoded(shown: RankStatus | None = None) -> bytes:
    index = index_of()
    return encode_snapshot(parts_of(index, shown), index, "r1-1", 42)


NAME = name_of(42, "r1-1")


# How they are written down ----------------------------------------------------------------------


def test_a_snapshot_is_read_as_it_was_written() -> None:
    index = index_of()
    contents = SnapshotContents(encoded(), NAME)
    head = contents.head
    assert contents.seed == 7
    assert (head.epoch, head.position, head.begin, head.end) == ("r1-1", 42, 10, 14)
    assert dict(head.names) == {A: A, Rank("old"): B}
    assert head.max_blocks_per_rank == 1000
    assert list(contents) == parts_of(index)[3:5]


def test_a_status_that_cannot_be_encoded_is_left_out() -> None:
    for shown in (live(A, seq=1 << 80), live(A, reason="x" * 70_000)):
        first, _ = SnapshotContents(encoded(shown), NAME)
        assert (first.status, first.cursor) == (None, b"cursor")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"", "content"),
        (lambda data: data[:3], "content"),
        (lambda data: LENGTH.pack(1 << 31) + data[4:], "format"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"x", "format"),
        (lambda data: data.replace(b"r1-1", b"r1-2"), "content"),
        (lambda data: data.replace(b"protocol\x04", b"protocol\x05"), "version"),
        (lambda data: data.replace(b"tcp://127", b"tcp://128"), "checksum"),
        (lambda data: bytes([*data[:-1], data[-1] ^ 1]), "checksum"),
    ],
)
def test_what_is_no_whole_snapshot_is_refused(
    change: Callable[[bytes], bytes], reason: str
) -> None:
    with pytest.raises(SnapshotError) as caught:
        list(SnapshotContents(change(encoded()), NAME))
    assert caught.value.reason == reason


@settings(deadline=None)
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_changed_bytes_are_refused_or_change_nothing(at: int, new: bytes) -> None:
    data = encoded()
    at %= len(data)
    changed = data[:at] + new + data[at + len(new) :]
    try:
        parts = list(SnapshotContents(changed, NAME))
    except SnapshotError:
        return
    assert parts == parts_of(index_of())[3:5]


def test_a_head_that_promises_much_costs_nothing() -> None:
    lengths = LENGTH.pack(16 << 20) + b"\xdd\xff\xff\xff\xff" + bytes(100)
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotError):
            SnapshotContents(lengths, NAME)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# The object store -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no failure."""
    monkeypatch.setattr(snapshots, "_API_SECONDS", PATIENCE)


@asynccontextmanager
async def opened(pool: NatsPool) -> AsyncIterator[tuple[PoolSnapshots, Any]]:
    """The object store of a pool, and JetStream as anybody else uses it."""
    async with connection(pool) as client:
        await Log(client, pool).make(StreamSettings(max_bytes=8 << 20))
        yield PoolSnapshots(client, pool), client.jetstream()


def note_of(pool: NatsPool, name: str = NAME) -> str:
    """The subject of the note that describes an object."""
    return f"$O.{pool.bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


@pytest.mark.parametrize("size", [0, 1, (512 << 10) - 1, 3 << 20])
async def test_an_object_is_returned_as_it_was_put(pool: NatsPool, size: int) -> None:
    async with opened(pool) as (store, _):
        data = os.urandom(size)
        await store.put(NAME, data)
        assert await store.names() == [NAME]
        assert await store.size(NAME) == size
        assert await store.get(NAME) == data


async def test_those_that_were_stored_last_are_kept_and_the_rest_leaves_nothing(
    pool: NatsPool,
) -> None:
    async with opened(pool) as (store, stream):
        for position in (1000, 7, 5, 9):  # the stream was deleted, and counts from 1 again
            await store.put(name_of(position, f"r-{position}"), b"%d" % position)
        await store.keep(2)
        assert await store.names() == [name_of(5, "r-5"), name_of(9, "r-9")]
        assert await store.newest() == [name_of(9, "r-9"), name_of(5, "r-5")]
        assert await store.get(name_of(5, "r-5")) == b"5"
        state = (await stream.stream_info(f"OBJ_{pool.bucket}")).state
        assert state.messages == 4  # a note and a chunk of each
        with pytest.raises(NoStreamError):
            await store.get(name_of(7, "r-7"))


async def test_an_unfinished_upload_is_not_listed_and_is_deleted_by_the_second_call(
    pool: NatsPool,
) -> None:
    async with opened(pool) as (store, stream):
        await store.put(NAME, b"whole")
        await stream.publish(f"$O.{pool.bucket}.C.unfinished", b"chunk")
        assert await store.newest() == [NAME]
        for left in (3, 2):
            await store.keep(2)
            state = (await stream.stream_info(f"OBJ_{pool.bucket}")).state
            assert state.messages == left
        assert await store.get(NAME) == b"whole"


async def test_an_object_that_lost_its_chunks_is_refused_without_waiting(pool: NatsPool) -> None:
    async with opened(pool) as (store, stream):
        await store.put(NAME, bytes(2 << 20))
        await stream.purge_stream(f"OBJ_{pool.bucket}", subject=f"$O.{pool.bucket}.C.>")
        with pytest.raises(NatsError, match="0 of 4 chunks"):
            await store.get(NAME)


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (b"", "unreadable"),
        (b"\xff", "unreadable"),
        (b'{"nuid": 3}', "unreadable"),
        (b"[" * 100_000, "unreadable"),
        (b"{}", "unreadable"),
        (json.dumps({"nuid": "x", "size": 1 << 50}).encode(), "unreadable"),
        (json.dumps({"nuid": "x", "size": -1}).encode(), "digest"),
        (json.dumps({"nuid": "x", "deleted": True}).encode(), "deleted"),
    ],
)
async def test_a_foreign_note_of_an_object_is_refused(
    pool: NatsPool, note: bytes, reason: str
) -> None:
    async with opened(pool) as (store, stream):
        await stream.publish(note_of(pool), note)
        with pytest.raises(NatsError, match=reason):
            await store.get(NAME)
        await stream.publish(f"$O.{pool.bucket}.M.no-base64!", note)
        assert await store.names() == [NAME]


@pytest.mark.parametrize("size", [1, 100])
async def test_another_size_than_that_of_the_chunks_is_refused_without_waiting(
    pool: NatsPool, size: int
) -> None:
    async with opened(pool) as (store, stream):
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"ab").digest()).decode()
        note = {"nuid": "x", "size": size, "chunks": 1, "digest": f"SHA-256={digest}"}
        await stream.publish(f"$O.{pool.bucket}.C.x", b"ab")
        await stream.publish(note_of(pool), json.dumps(note).encode())
        with pytest.raises(NatsError, match="digest"):
            await store.get(NAME)


async def test_notes_that_cannot_be_read_are_deleted_with_the_older_snapshots(
    pool: NatsPool,
) -> None:
    async with opened(pool) as (store, stream):
        for position in (1, 2):
            await stream.publish(note_of(pool, name_of(position, "r-1")), b"{")
        for position in (3, 4):
            await store.put(name_of(position, "r-1"), b"whole")
        await store.keep(2)
        assert await store.names() == [name_of(3, "r-1"), name_of(4, "r-1")]
