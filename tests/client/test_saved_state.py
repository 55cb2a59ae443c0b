"""What is kept aside of a saved file: restored once, dropped with a reason, never answered from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvindex import BlockStored, EventBatch, Index, Rank
from kvindex.client.saved_state import SavedState, read_saved
from kvindex.index.snapshot import SnapshotReader, SnapshotRecord, SnapshotWriter
from kvindex.testing import ManualClock
from kvindex.wire.errors import ConfigurationError, SnapshotError

pytestmark = pytest.mark.unit

A0, A1, B = Rank("a", 0), Rank("a", 1), Rank("b", 0)
SEED = 7


def filled(*ranks: Rank, blocks: int = 2) -> Index:
    index = Index(seed=SEED)
    for rank in ranks:
        stored = BlockStored(
            block_hashes=list(range(1, blocks + 1)), token_ids=list(range(4 * blocks)), block_size=4
        )
        index.apply(rank, EventBatch(ts=0.0, events=[stored]))
    return index


def records_of(
    *ranks: Rank, cursor: bytes | None = b"cursor", blocks: int = 2
) -> list[SnapshotRecord]:
    index = filled(*ranks, blocks=blocks)
    return [SnapshotRecord(rank, index.dump(rank), cursor) for rank in ranks]


class Kept:
    """A state kept aside, and what it restored and filled."""

    def __init__(self, *records: SnapshotRecord, max_blocks: int | None = None) -> None:
        self.clock = ManualClock(100.0)
        self.index = Index(seed=SEED, max_blocks=max_blocks)
        self.restored: list[tuple[Rank, bytes]] = []
        self.state = SavedState(
            self.index, list(records), 60.0, self.clock, lambda *args: self.restored.append(args)
        )

    def counts(self) -> tuple[int, int, dict[str, int]]:
        counts = self.state.statistics()
        return counts["aside"], counts["restored"], counts["dropped"]


def test_cursors_are_those_of_one_worker_and_asking_uses_nothing_up() -> None:
    kept = Kept(*records_of(A0, A1), *records_of(B, cursor=b"b"))
    for _ in range(2):
        assert kept.state.cursors("a") == {0: b"cursor", 1: b"cursor"}
        assert kept.state.cursors("b") == {0: b"b"}
        assert kept.state.cursors("c") == {}
    assert kept.index.ranks == ()
    assert kept.counts() == (3, 0, {})


def test_each_rank_is_restored_once_and_reported() -> None:
    records = records_of(A0, A1, B)
    kept = Kept(*records)
    assert kept.state.statistics()["aside_bytes"] == sum(len(r.section) for r in records)
    assert kept.state.restore("a", {A0: "", A1: ""}) == {A0: "", A1: ""}
    assert set(kept.index.ranks) == {A0, A1}
    assert kept.index.match(list(range(8)))[A0].blocks == 2
    assert kept.restored == [(A0, records[0].section), (A1, records[1].section)]
    kept.index.remove(A0)
    assert kept.state.restore("a", {}) == {}
    assert kept.state.cursors("a") == {}
    assert set(kept.index.ranks) == {A1}
    assert kept.counts() == (1, 2, {})
    assert kept.state.records() == [records[2]]
    assert kept.state.statistics()["aside_bytes"] == len(records[2].section)


DAMAGED = records_of(A0)[0]._replace(section=b"damaged" * 20)


@pytest.mark.parametrize(
    ("record", "max_blocks", "refused", "reason"),
    [
        (records_of(A0)[0], None, "unreadable_cursor", "unreadable_cursor"),
        (DAMAGED, None, "", "format"),
        (records_of(A0, blocks=3)[0], 2, "", "room"),
        (records_of(A0, cursor=None)[0], None, "no_cursor", "no_cursor"),
    ],
    ids=["unreadable_cursor", "format", "room", "no_cursor"],
)
def test_a_rank_that_cannot_be_restored_is_dropped_with_its_reason_and_no_other(
    record: SnapshotRecord, max_blocks: int | None, refused: str, reason: str
) -> None:
    kept = Kept(record, *records_of(A1), max_blocks=max_blocks)
    failed = {} if refused else {A0: reason}
    assert kept.state.restore("a", {A0: refused}) == failed
    assert list(kept.index.ranks) == []
    assert kept.state.cursors("a") == {1: b"cursor"}  # waits for its publisher
    assert kept.state.restore("a", {A1: ""}) == {A1: ""}
    assert list(kept.index.ranks) == [A1]
    assert [rank for rank, _ in kept.restored] == [A1]
    assert kept.counts() == (0, 1, {reason: 1})


def test_everything_goes_when_the_time_is_over() -> None:
    kept = Kept(*records_of(A0, B), *records_of(A1, cursor=None))
    for _ in range(2):
        assert kept.state.cursors("a") == {0: b"cursor", 1: None}
    kept.clock.advance(59.0)
    kept.state.expire()
    assert kept.counts() == (2, 0, {"no_cursor": 1})
    kept.clock.advance(1.0)
    kept.state.expire()
    kept.state.expire()
    assert kept.counts() == (0, 0, {"no_cursor": 1, "expired": 2})
    assert kept.state.records() == []
    assert kept.state.cursors("a") == {}
    assert kept.state.restore("a", {}) == {}


def test_for_ever_is_a_time() -> None:
    clock = ManualClock()
    state = SavedState(Index(seed=SEED), records_of(A0), float("inf"), clock, None)
    clock.advance(1e9)
    state.expire()
    assert state.statistics()["aside"] == 1


@pytest.mark.parametrize("within", [0.0, -1.0, float("nan")])
def test_a_time_that_cannot_be_is_refused(within: float) -> None:
    with pytest.raises(ConfigurationError, match="resume_within"):
        SavedState(Index(), [], within, ManualClock(), lambda *args: None)


# The file -----------------------------------------------------------------------------------------


def written(path: Path, *records: SnapshotRecord) -> Path:
    with path.open("wb") as file:
        writer = SnapshotWriter(file, seed=SEED)
        for record in records:
            writer.add(*record)
        writer.finish()
    return path


def test_no_file_is_a_first_start(tmp_path: Path) -> None:
    index = Index()
    assert read_saved(tmp_path / "none", index) == (index, [])
    assert read_saved(tmp_path / "none", None) == (None, [])


@pytest.mark.parametrize("path", [b"file", 5, {}], ids=str)
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="resume must be the path"):
        read_saved(path, None)


def test_a_new_index_has_the_seed_of_the_file_and_an_index_of_another_seed_is_refused(
    tmp_path: Path,
) -> None:
    records = records_of(A0, B)
    path = written(tmp_path / "file", *records)
    index, restored = read_saved(path, None)
    assert index is not None
    assert index.seed == SEED
    assert index.ranks == ()
    assert restored == records
    assert read_saved(path, Index(seed=SEED))[1] == records
    with pytest.raises(SnapshotError, match="seed") as refused:
        read_saved(path, Index(seed=SEED + 1))
    assert refused.value.reason == "backend"


def test_a_file_without_cursors_is_warned_of_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_saved(written(tmp_path / "whole", *records_of(A0, B)), None)
    read_saved(written(tmp_path / "empty"), None)
    assert not caplog.records
    path = written(tmp_path / "file", *records_of(A0, A1, cursor=None), *records_of(B))
    read_saved(path, None)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(path) in warning
    assert "2 of the 3 ranks" in warning
    assert "Client.save" in warning


@pytest.mark.parametrize("damage", ["noise", "cut off"])
def test_a_damaged_file_is_refused_with_its_path_before_anything_is_restored(
    tmp_path: Path, damage: str
) -> None:
    path = written(tmp_path / "file", *records_of(A0, B))
    path.write_bytes(b"noise" * 20 if damage == "noise" else path.read_bytes()[:-1])
    index = Index(seed=SEED)
    with pytest.raises(SnapshotError, match=re.escape(str(path))) as refused:
        read_saved(path, index)
    assert refused.value.reason == {"noise": "format", "cut off": "truncated"}[damage]
    assert index.ranks == ()


def test_records_survive_being_written_again(tmp_path: Path) -> None:
    path = written(tmp_path / "file", *Kept(*records_of(B, A0)).state.records())
    with SnapshotReader(path) as reader:
        assert [record.rank for record in reader] == [A0, B]
