"""Snapshots as files and bytes: what comes along, what is refused, what a failure leaves.

That a restored index goes on as the dumped one: tests/index/test_snapshots.py, and each story.
"""

from __future__ import annotations

import io
import os
import stat
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvindex import (
    BACKEND,
    AllBlocksCleared,
    CacheSettings,
    Client,
    EventBatch,
    GroupSpec,
    Index,
    Rank,
)
from kvindex.client.saved_state import read_saved
from kvindex.index import (
    SnapshotReader,
    SnapshotRecord,
    SnapshotWriter,
    read_snapshot,
    reference,
    replaced_file,
    write_snapshot,
)
from kvindex.index.snapshot import open_section, seal_section
from kvindex.wire.errors import ConfigurationError, SnapshotError, UnknownRankError
from tests.index.index_events import (
    A,
    B,
    apply,
    counts_of,
    index_of,
    located,
    matched,
    prompt,
    removed,
    stored,
)

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(BACKEND != "native", reason="the Python index has no snapshots"),
]

SEED = 2**128 - 1
HEAD = 26  # bytes of a snapshot before its first rank


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(SnapshotError) as caught:
        call()
    return caught.value.reason


def changed(data: bytes, at: int, to: bytes) -> bytes:
    """The bytes with some of them replaced; `at` may count from the end."""
    at %= len(data)
    return data[:at] + to + data[at + len(to) :]


def flipped(data: bytes, at: int) -> bytes:
    return changed(data, at, bytes([data[at] ^ 1]))


def assert_refused(read: Callable[[bytes], Any], reasons: dict[str, list[bytes]]) -> None:
    for reason, damaged in reasons.items():
        for data in damaged:
            assert refused(partial(read, data)) == reason, data


def two_ranks() -> Index:
    index = index_of(stored(0, 1, 2), located(1, medium="CPU"))
    apply(index, B, stored(0), stored(8, 9))
    return index


# One rank


def test_ranks_are_restored_one_by_one_and_under_other_names() -> None:
    index = two_ranks()
    copy = Index(seed=index.seed)
    for rank in index.ranks:
        copy.restore(rank, index.dump(rank))
    copy.check()
    assert copy.ranks == (A, B)
    assert list(copy.match(prompt(4))) == list(index.match(prompt(4)))
    assert [counts_of(copy, rank) for rank in (A, B)] == [counts_of(index, r) for r in (A, B)]
    copy.restore(Rank("c", 5), index.dump(A))
    copy.check()
    assert matched(copy, prompt(3), Rank("c", 5)) == matched(index, prompt(3), A) == 3


def test_restoring_replaces_what_the_rank_held_and_had_learned() -> None:
    index = index_of(stored(0, 1))
    section = index.dump(A)
    apply(index, A, AllBlocksCleared(), stored(0, base=500), stored(7, parent=3))
    index.restore(A, section)
    index.check()
    assert matched(index, prompt(3)) == 2
    assert counts_of(index)["cleared"] == counts_of(index)["orphans"] == 0


def test_holes_are_joined_where_only_another_rank_parted_them() -> None:
    index = index_of(stored(0, 1, 2, 3))
    apply(index, B, stored(0, 1))
    apply(index, A, removed(0, 1, 2))
    copy = Index(seed=index.seed)
    copy.restore(A, index.dump(A))
    copy.check()
    apply(copy, A, stored(0, 1, 2))
    assert matched(copy, prompt(4)) == 4


def test_orphans_beyond_the_limit_are_given_up_oldest_first_and_counted() -> None:
    index = index_of(stored(1, 2, 3))
    copy = Index.load(index.to_bytes(), max_orphans=2)
    assert (counts_of(copy)["orphans"], counts_of(copy)["orphans_dropped"]) == (2, 1)
    apply(copy, A, stored(0), stored(1))
    assert matched(copy, prompt(4)) == 4


def test_a_rank_that_holds_nothing_is_still_known_and_an_unknown_one_cannot_be_dumped() -> None:
    index = Index()
    index.add(A)
    assert Index.from_bytes(index.to_bytes()).ranks == (A,)
    with pytest.raises(UnknownRankError):
        index.dump(B)


def test_text_of_any_code_points_comes_along() -> None:
    index = index_of(stored(0, medium="\ud800", kv_cache_spec_kind="\ud801"))
    index.apply(A, EventBatch(0.0, [], skipped=("\ud802",)))
    copy = Index.from_bytes(index.to_bytes())
    assert counts_of(copy) == counts_of(index)
    assert matched(copy, prompt(1), media="\ud800") == 1


# Room


@pytest.mark.parametrize(("limit", "room"), [("max_blocks", 1), ("max_blocks_per_rank", 2)])
def test_what_does_not_fit_is_refused_whole_and_changes_nothing(limit: str, room: int) -> None:
    index = two_ranks()
    small = Index(seed=index.seed, **{limit: 2})
    apply(small, B, stored(0))
    with pytest.raises(SnapshotError, match=f"{limit} leaves room for {room}"):
        small.restore(A, index.dump(A))
    assert refused(lambda: small.restore(A, index.dump(A))) == "room"
    assert (small.ranks, len(small)) == ((B,), 1)
    small.check()
    assert refused(lambda: Index.from_bytes(index.to_bytes(), **{limit: 2})) == "room"
    assert len(Index.from_bytes(index.to_bytes(), **{limit: 4})) == 4


def test_a_rank_makes_room_for_itself() -> None:
    index = index_of(stored(0, 1, 2), max_blocks=3)
    index.restore(A, index.dump(A))
    apply(index, A, stored(3))
    assert (len(index), counts_of(index)["ignored"]) == (3, {"max_blocks": 1})


# What is no section


def test_damaged_sections_are_refused_with_the_reason() -> None:
    index = two_ranks()
    section = index.dump(A)
    reasons = {
        "format": [b"KVIX", b"no section at all", section + b"."],
        "truncated": [b"", section[:-1], section[:20], section[:3]],
        "version": [changed(section, 4, b"\x02"), changed(section, 4, b"\x04")],
        "checksum": [flipped(section, 30), flipped(section, -33), flipped(section, -1)],
        "backend": [flipped(section, 14), flipped(section, 29)],
    }
    assert_refused(partial(index.restore, B), reasons)
    index.check()
    assert matched(index, prompt(3), B) == 1
    assert refused(lambda: Index().restore(A, section)) == "backend", "another seed"


@pytest.mark.parametrize("text", ["DISK", "sqlx", "mamba", "TagX"])
def test_what_is_no_text_is_refused(text: str) -> None:
    index = Index(seed=1)
    index.configure(A, CacheSettings(groups={1: GroupSpec("mamba")}))
    index.apply(A, EventBatch(ts=0.0, events=[stored(0, medium="DISK", lora_name="sqlx")]))
    index.apply(A, msgspec.msgpack.encode([0.0, [["TagX"]], None]))
    body = body_of(index)
    other = Index(seed=1)
    restore(other, A, body)
    assert other.statistics()["ranks"] == index.statistics()["ranks"]
    for damage in (b"\xff", b"\x80", b"\xc3"):
        damaged = body.replace(text.encode(), damage + text.encode()[1:])
        assert damaged != body
        assert refused(partial(restore, other, B, damaged)) == "content"
    assert other.ranks == (A,)


@pytest.mark.parametrize("tag", [b"s", b"i", b"x12", b"i0", b"i1x", b"i-", b"i" + b"1" * 641])
def test_a_lora_that_none_can_have_is_refused(tag: bytes) -> None:
    index = index_of(stored(0, lora_name="sqlx"), seed=1)
    for good in (b"i12", b"i-7", b"s\xed\xa0\x80"):
        restore(index, B, with_lora(body_of(index), good))
        assert list(index.tree(B).walk())
    body = with_lora(body_of(index), tag)
    assert refused(lambda: restore(index, B, body)) == "content"


def sealed(body: bytes) -> bytes:
    return seal_section(body, SEED, bytes(16))


def body_of(index: Index) -> bytes:
    return bytes(open_section(index.dump(A), index.seed, index._identity()))


def restore(index: Index, rank: Rank, body: bytes) -> None:
    index.restore(rank, seal_section(body, index.seed, index._identity()))


def with_lora(body: bytes, tag: bytes) -> bytes:
    size = bytes([len(tag)]) if len(tag) < 128 else bytes([0x80 | len(tag) & 0x7F, len(tag) >> 7])
    return body.replace(b"\x05ssqlx", size + tag)


# The Python index


def test_the_python_index_says_that_snapshots_need_the_native_module(tmp_path: Path) -> None:
    index: Any = reference.Index()
    path = tmp_path / "state"
    message = r"need the native module.*Unset KVINDEX_BACKEND"
    for call in (
        partial(index.dump, A),
        partial(index.restore, A, b""),
        partial(index.save, path),
        index.to_bytes,
        partial(reference.Index.load, two_ranks().to_bytes()),
        partial(read_saved, path, index),
    ):
        with pytest.raises(ConfigurationError, match=message):
            call()
    with Client(index=index) as client, pytest.raises(ConfigurationError, match=message):
        client.save(path)
    assert not path.exists()


# Files


def test_a_saved_index_is_loaded_as_it_was_and_only_its_owner_reads_the_file(
    tmp_path: Path,
) -> None:
    index = two_ranks()
    path = tmp_path / "index.kvi"
    path.write_bytes(b"before")
    path.chmod(0o644)
    index.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    copy = Index.load(path)
    assert (copy.seed, copy.statistics()) == (index.seed, index.statistics())
    assert Index.load(str(path)).ranks == index.ranks
    assert index.to_bytes() == path.read_bytes()
    with open(path, "rb") as file:
        assert Index.load(file).ranks == index.ranks


def test_a_failing_save_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "index.kvi"
    path.write_bytes(b"before")
    index = two_ranks()
    with pytest.raises(ConfigurationError, match="cursor"):
        write_snapshot(path, index, cursors={A: bytes(65_537)})
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["index.kvi"]
    with pytest.raises(FileNotFoundError):
        index.save(tmp_path / "nowhere" / "index.kvi")


def test_nobody_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replaced_file(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"half"
    assert os.listdir(tmp_path) == ["file"]


def test_cursors_come_back_as_they_were() -> None:
    index = two_ranks()
    file = io.BytesIO()
    write_snapshot(file, index, cursors={A: b"", Rank("gone"): b"?"})
    snapshot = read_snapshot(file.getvalue())
    assert snapshot.seed == index.seed
    assert [(record.rank, record.cursor) for record in snapshot.ranks] == [(A, b""), (B, None)]


def test_records_are_written_and_read_one_by_one() -> None:
    file = io.BytesIO(b"before")
    file.seek(6)
    writer = SnapshotWriter(file, seed=SEED)
    records = [
        SnapshotRecord(Rank("ä\ud800", -3), sealed(b"section"), b"cursor" * 10_000),
        SnapshotRecord(Rank("", 2**40), sealed(bytes(3 * 2**20)), None),
    ]
    for record in records:
        writer.add(*record)
    with pytest.raises(ConfigurationError, match="already"):
        writer.add(*records[0])
    writer.finish()
    file.write(b"after")
    file.seek(6)
    with SnapshotReader(file) as reader:
        assert reader.seed == SEED
        assert list(reader) == records
    assert file.read() == b"after"  # a file that was opened elsewhere may go on


def test_a_rank_that_goes_away_meanwhile_is_left_out() -> None:
    index = two_ranks()

    class Leaving(io.BytesIO):
        def write(self, data: Any) -> int:
            index.remove(B)
            return super().write(data)

    file = Leaving()
    write_snapshot(file, index)
    assert [record.rank for record in read_snapshot(file.getvalue()).ranks] == [A]


def test_what_is_no_snapshot_is_refused_with_the_reason() -> None:
    data = two_ranks().to_bytes()
    reasons = {
        "format": [b"PK\x03\x04", b"no snapshot, however long it is.....", data + b"."],
        "truncated": [b"", data[:5], data[: HEAD - 1], data[:HEAD], data[: HEAD + 9], data[:-1]],
        "version": [changed(data, 8, b"\x01"), changed(data, 8, b"\x04")],
        "checksum": [flipped(data, -1), flipped(data, HEAD - 1), changed(data, HEAD, b"\x05")],
    }
    section_length = HEAD + 1 + 4 + 8 + 4
    reasons["truncated"].append(changed(data, section_length, b"\xff" * 7))  # of exabytes
    reasons["checksum"].append(changed(data, HEAD + 1, b"\xff" * 4))  # as long a name
    assert_refused(read_snapshot, reasons)


def test_a_section_is_refused_where_it_is_damaged_or_another_ranks() -> None:
    sections = [sealed(bytes([n]) * 50) for n in (1, 2)]
    data = snapshot_of(*sections)
    read = iter(SnapshotReader(data.replace(bytes([2]) * 50, bytes([3]) * 50)))
    assert next(read).section == sections[0], "its own checksum agrees"
    assert refused(partial(next, read)) == "checksum"
    swapped = data.replace(sections[0], b"?").replace(sections[1], sections[0])
    assert refused(lambda: read_snapshot(swapped.replace(b"?", sections[1]))) == "checksum"


def snapshot_of(*sections: bytes) -> bytes:
    file = io.BytesIO()
    writer = SnapshotWriter(file, seed=SEED)
    for dp_rank, section in enumerate(sections):
        writer.add(Rank("a", dp_rank), section)
    writer.finish()
    return file.getvalue()


@pytest.mark.parametrize("value", ["a", None, 5, [1], Path("a"), memoryview(bytes(8))[::2]])
def test_what_cannot_be_bytes_is_refused_before_it_is_looked_at(value: Any) -> None:
    for read in (Index.from_bytes, partial(Index().restore, A)):
        with pytest.raises(ConfigurationError, match="bytes"):
            read(value)


@pytest.mark.parametrize("value", [None, 5, [1]], ids=str)
def test_what_cannot_be_a_file_is_refused(value: Any) -> None:
    for use in (Index.load, Index().save):
        with pytest.raises(ConfigurationError, match="a path"):
            use(value)


def test_any_buffer_is_as_good_as_bytes() -> None:
    index = two_ranks()
    kinds: list[Callable[[bytes], Any]] = [bytes, bytearray, memoryview, partial(array, "B")]
    for kind in kinds:
        assert Index.from_bytes(kind(index.to_bytes())).ranks == index.ranks
        index.restore(A, kind(index.dump(A)))


def test_a_rank_that_comes_twice_is_refused() -> None:
    file = io.BytesIO()
    writer = SnapshotWriter(file, seed=SEED)
    writer.add(A, sealed(b""))
    writer._ranks.clear()
    writer.add(A, sealed(b""))
    writer._ranks.add(B)
    writer.finish()
    assert refused(lambda: read_snapshot(file.getvalue())) == "content"


def test_a_save_removes_what_killed_savers_left_and_nothing_else(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "state"
    left, written, others = (tmp_path / f".state.{end}" for end in ("abcdefgh", "ijklmnop", "txt"))
    for file in (left, written, others):
        file.write_bytes(b"half")
    with open(written) as living:  # another saver at work
        fcntl.flock(living, fcntl.LOCK_EX)
        Index().save(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, written, others])


def test_orphans_given_up_before_a_clear_leave_no_lower_bound_after_a_restore() -> None:
    index = index_of(stored(1, 2, 3), max_orphans=2)
    assert Index.load(index.to_bytes(), max_orphans=2).match(prompt(1))[A].lower_bound
    apply(index, A, AllBlocksCleared())
    assert not index.match(prompt(1))[A].lower_bound
    assert not Index.load(index.to_bytes(), max_orphans=2).match(prompt(1))[A].lower_bound
