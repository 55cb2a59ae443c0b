"""What is kept aside of a saved file: restored once, dropped with a reason, never answered from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvindex import Index, Rank
from kvindex.client.saved_state import SavedState, read_saved
from kvindex.index.snapshot import SnapshotRecord, SnapshotWriter
from kvindex.testing import ManualClock
from kvindex.wire.errors import ConfigurationError, SnapshotError
from tests.client.conftest import store

pytestmark = pytest.mark.unit

A0, A1, B = Rank("a", 0), Rank("a", 1), Rank("b", 0)
SEED = 7


def records_of(*ranks: Rank, cursor: bytes | None = b"cursor") -> list[SnapshotRecord]:
    index = Index(seed=SEED)
    for rank in ranks:
        store(index, rank, blocks=2)
    return [SnapshotRecord(rank, index.dump(rank), cursor) for rank in ranks]


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
