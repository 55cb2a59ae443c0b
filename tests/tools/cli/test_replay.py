"""`kvindex replay`: recorded frames into an index, whatever is wrong with the recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvindex import AllBlocksCleared, EventBatch
from kvindex.wire import (
    RecordingWriter,
    encode_batch,
    live_frames,
    read_recording,
    replay_end,
    replay_frames,
)
from kvindex.wire.quirks import fold_hash
from tests.index import index_events
from tests.tools.commands import Run

pytestmark = pytest.mark.unit

CAPTURES = Path(__file__).parents[2] / "data" / "captures"


def stored(number: int, *, ts: float | None = None, dp_rank: int | None = 0) -> bytes:
    """A batch that stores block `number` of one prompt, after the block before it."""
    event = index_events.stored(number)
    return encode_batch(EventBatch(float(number) if ts is None else ts, [event], dp_rank))


class Recording:
    """A recording under construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._writer = RecordingWriter(self._file)

    def add(self, *records: Any) -> Recording:
        """Add live batches by number, or (number, payload); replies by a list of numbers."""
        for record in records:
            if isinstance(record, list):
                for seq in record:
                    frames = replay_frames(b"", b"", seq, stored(seq), with_topic=True)
                    self._writer.write("replay", frames[1:])
                self._writer.write("replay", replay_end(b"", with_topic=True)[1:])
            else:
                seq, payload = record if isinstance(record, tuple) else (record, stored(record))
                self._writer.write("live", live_frames(b"", seq, payload))
        return self

    def of(self, *frames: bytes) -> Recording:
        """Say whose messages follow."""
        self._writer.write("publisher", frames)
        return self

    def raw(self, frames: list[bytes]) -> Recording:
        self._writer.write("live", frames)
        return self

    def saved(self) -> str:
        self._file.close()
        return str(self.path)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "vllm-0.frames")


@pytest.fixture
def report(run: Run) -> Any:
    return lambda *argv: run("replay", "--json", *argv).json


def rank_of(report: Any) -> Any:
    (rank,) = report["ranks"].values()
    return rank


def blocks(report: Any) -> list[int]:
    return [block["block_hash"] - 100 for block in rank_of(report)["resident"]]


def test_batches_in_order_are_all_applied(recording: Recording, report: Any) -> None:
    read = report(recording.add(0, 1, 2).saved())
    assert blocks(read) == [0, 1, 2]
    assert list(read["ranks"]) == ["vllm-0/0"]
    rank = rank_of(read)
    assert (rank["seq"], rank["blocks"], rank["complete"]) == (2, 3, True)
    assert rank["resident"][1] == {
        "block_hash": 101,
        "depth": 1,
        "medium": "GPU",
        "group_idx": 0,
        "copies": 1,
        "block_size": 4,
        "lora": None,
    }


BAD = b"\xc1"  # no batch
FILL = ["--with-replayed"]
LOST: dict[str, Any] = {"complete": False}
RECORDINGS: dict[str, tuple[list[Any], list[str], list[int], dict[str, Any]]] = {
    "a batch that comes twice is applied once": ([0, 1, 1, 0, 2], [], [0, 1, 2], {"duplicates": 2}),
    "a gap drops what the rank held": (
        [0, 1, (4, stored(0, ts=4.0))],
        [],
        [0],
        {"gaps": 1, "lost": 2, "resets": 1, **LOST},
    ),
    "a gap keeps what the rank held if asked": (
        [0, 1, (4, stored(2))],
        ["--on-loss", "keep"],
        [0, 1, 2],
        {"resets": 0, **LOST},
    ),
    "joining late is partial but no loss": (
        [(5, stored(0)), (6, stored(1))],
        [],
        [0, 1],
        {"lost": 0, **LOST},
    ),
    "replies are left alone unless asked for": (
        [1, [0, 1, 2]],
        [],
        [],
        {"filled": 0, "replies": 4},
    ),
    "replies fill gaps and both ends": (
        [1, 3, [0, 1, 2, 3, 4, 5]],
        FILL,
        [0, 1, 2, 3, 4, 5],
        {"filled": 4, "gaps": 0, "duplicates": 0, "seq": 5, "complete": True},
    ),
    "replies alone can be applied": ([[0, 1, 2]], FILL, [0, 1, 2], {"complete": True}),
    "a hole in the replies is a loss too": ([0, [1, 3]], FILL, [], {"lost": 1, **LOST}),
    "an undecodable batch is counted and the file goes on": (
        [0, (1, BAD), (2, stored(0, ts=2.0))],
        [],
        [0],
        {"undecodable": 1, "lost": 1},
    ),
    "an undecodable batch is taken from the replies": (
        [0, (1, BAD), 2, [0, 1, 2]],
        FILL,
        [0, 1, 2],
        {},
    ),
    "an undecodable last batch is a loss": ([0, (1, BAD)], [], [], {"lost": 1, **LOST}),
    "a restart leaves only what came after it": (
        [0, 1, 2, (0, stored(0, ts=9.0)), (1, stored(1, ts=10.0))],
        [],
        [0, 1],
        {"epoch": 1, "seq": 1, "complete": True, "duplicates": 0},
    ),
    "replies of the old process do not fill the gaps of the new one": (
        [0, 1, [0, 1, 2], (0, stored(0, ts=20.0)), (3, stored(0, ts=23.0))],
        FILL,
        [0],
        {"filled": 0, "lost": 2},
    ),
    "an empty recording holds nothing": ([], FILL, [], {"seq": None, **LOST}),
    "clear events empty the rank": (
        [0, (1, encode_batch(EventBatch(1.0, [AllBlocksCleared()], 0)))],
        [],
        [],
        {},
    ),
}


@pytest.mark.parametrize("promise", RECORDINGS)
def test_what_a_recording_leaves(promise: str, recording: Recording, report: Any) -> None:
    records, argv, resident, expected = RECORDINGS[promise]
    read = report(*argv, recording.add(*records).saved())
    assert blocks(read) == resident
    assert all(block["copies"] == 1 for block in rank_of(read)["resident"])
    rank = {**rank_of(read), **rank_of(read)["counters"]}
    assert {name: rank[name] for name in expected} == expected


def test_messages_of_another_shape_are_counted(recording: Recording, report: Any) -> None:
    read = report(recording.add(0).raw([b"", b"short", b"x"]).raw([b"one"]).add(1).saved())
    assert rank_of(read)["counters"]["bad_frames"] == 2
    assert blocks(read) == [0, 1]


def test_the_dp_rank_is_the_batches_own(recording: Recording, report: Any) -> None:
    read = report(recording.add((0, stored(0, dp_rank=3))).saved())
    assert list(read["ranks"]) == ["vllm-0/3"]
    assert read["files"][0]["ranks"] == ["vllm-0/3"]


def test_several_files_are_several_ranks(tmp_path: Path, report: Any) -> None:
    paths = [Recording(tmp_path / f"{name}.frames").add(0).saved() for name in "ab"]
    assert list(report(*paths)["ranks"]) == ["a/0", "b/0"]


def test_the_table_shows_what_was_noted(recording: Recording, run: Run) -> None:
    header, line = run("replay", recording.add(0, 0, 3).saved()).out.splitlines()
    assert header.split()[:5] == ["rank", "blocks", "orphans", "last", "seq"]
    assert header.split()[5:] == ["applied", "complete", "noted"]
    assert line.split("  ", 1)[0] == "vllm-0/0"
    assert "1 gaps, 2 lost, 1 resets, 1 duplicates" in line
    assert " 1 " in line, "the batch after the gap waits for its parent: an orphan"


def test_a_prompt_is_matched_by_recordings(
    recording: Recording, tmp_path: Path, run: Run, report: Any
) -> None:
    path = recording.add(0, 1).saved()
    prompt = tmp_path / "prompt"
    prompt.write_text(" ".join(map(str, index_events.prompt(3)[:11])))
    out = run("replay", path, "--probe", prompt).out
    assert "best: vllm-0/0 holds 8 of 11 tokens" in out
    assert "upper bound" not in out
    assert "lower bound" not in out
    line = "upper bounds, the engine's own hit may be shorter: vllm-0/0\n"
    assert line in run("replay", path, "--probe", prompt, "--upper-bound").out
    assert report(path, "--probe", prompt)["probe"]["vllm-0/0"]["tokens"] == 8
    later = Recording(tmp_path / "late.frames").add(2).saved()  # its parent was never stored
    line = "lower bounds, the engine's own hit may be longer: late/0\n"
    assert line in run("replay", later, "--probe", prompt).out


def test_a_cut_off_file_exits_1_with_the_byte_and_its_part(recording: Recording, run: Run) -> None:
    path = Path(recording.add(0, 1).saved())
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    ran = run("replay", "--json", path, code=1)
    assert f"byte {len(whole) - 3}" in ran.err
    assert blocks(ran.json) == [0]
    assert "cut off" in ran.json["files"][0]["error"]


@pytest.mark.parametrize("argv", [[], ["--with-replayed"]])
def test_a_file_of_another_kind_exits_1_at_its_byte(
    argv: list[str], tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    ran = run("replay", *argv, path, code=1)
    assert ran.out == ""
    assert ran.err.startswith(f"kvindex replay: {path}: ")
    assert "recording, byte 1" in ran.err


@pytest.mark.parametrize(("name", "reason"), [("", "directory"), ("x.frames", "x.frames")])
def test_a_path_that_is_no_file_exits_2(name: str, reason: str, tmp_path: Path, run: Run) -> None:
    assert reason in run("replay", tmp_path / name, code=2).err


def test_two_files_of_one_name_exit_2(tmp_path: Path, run: Run) -> None:
    (tmp_path / "other").mkdir()
    paths = [Recording(p / "a.frames").add(0).saved() for p in (tmp_path, tmp_path / "other")]
    assert "both be the worker 'a'" in run("replay", *paths, code=2).err


@pytest.mark.parametrize(
    ("named", "ranks"),
    [
        ((None, None), ["v-0/0", "v-0/1"]),  # by their ports
        ((1, 0), ["v-0/1", "v-0/0"]),  # ports that were exchanged
        ((3, None), ["v-0/3", "v-0/1"]),
        ((0, 0), ["v-0/0", "v-0/1"]),  # never one rank of two caches
    ],
)
def test_recordings_that_say_their_rank_are_named_as_a_subscription_names_them(
    named: tuple[int | None, ...], ranks: list[str], tmp_path: Path, report: Any
) -> None:
    paths = [
        Recording(tmp_path / f"{port}.frames")
        .of(b"v-0", b"%d" % port)
        .raw([b"no batch"])
        .add((0, stored(0, dp_rank=dp_rank)))
        .saved()
        for port, dp_rank in enumerate(named)
    ]
    assert [file["ranks"] for file in report(*paths)["files"]] == [[rank] for rank in ranks]


def test_two_recordings_of_one_rank_exit_2(tmp_path: Path, run: Run) -> None:
    names = (tmp_path / "monday.frames", tmp_path / "tuesday.frames")
    paths = [Recording(name).of(b"a", b"0").add(0).saved() for name in names]
    assert "both hold 'a/0'" in run("replay", *paths, code=2).err
    other = Recording(tmp_path / "a.frames").add(0).saved()  # perhaps that rank: it does not say
    assert "both be the worker 'a'" in run("replay", paths[0], other, code=2).err


@pytest.mark.parametrize("frames", [(), (b"a",), (b"a", b"x"), (b"\xff", b"0")])
def test_a_record_that_names_no_rank_exits_2(
    frames: tuple[bytes, ...], recording: Recording, run: Run
) -> None:
    assert "names no rank" in run("replay", recording.of(*frames).add(0).saved(), code=2).err


@pytest.mark.parametrize("name", ["vllm-0.9.2", "vllm-0.33.0-bytes", "sglang-0.5.23"])
def test_a_real_engines_recording_gives_what_its_cache_held(name: str, report: Any) -> None:
    read = report(str(CAPTURES / f"{name}.frames"))
    held = {(b["block_hash"], b["depth"]): b["copies"] for b in rank_of(read)["resident"]}
    truth = json.loads((CAPTURES / f"{name}.json").read_text())
    if truth["engine"] == "vllm":
        expected = {(fold_hash(b["hash"]), b["depth"]): b["copies"] for b in truth["cached"]}
        assert held == expected
    assert len(held) == len(truth["cached"])
    assert rank_of(read)["complete"] is True


def test_dropping_live_records_is_healed_by_the_replies(tmp_path: Path, report: Any) -> None:
    source = CAPTURES / "vllm-0.33.0.frames"
    whole = rank_of(report(str(source)))
    path = tmp_path / "holed.frames"
    with path.open("wb") as file:
        writer = RecordingWriter(file)
        for number, message in enumerate(read_recording(source)):
            if message.kind == "replay" or number % 7:
                writer.write(message.kind, message.frames)
    healed = rank_of(report("--with-replayed", str(path)))
    assert healed["resident"] == whole["resident"]
    assert healed["complete"] is True
    assert healed["counters"]["filled"] > 30
    assert rank_of(report(str(path)))["resident"] != whole["resident"]


def test_replies_that_could_fill_a_gap_are_hinted_at(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "a.frames"
    Recording(path).add(2, [0, 1]).saved()
    hint = f"{path}: it has 3 replay replies, too: --with-replayed fills"
    assert hint in run("replay", path).err
    assert run("replay", "--with-replayed", path).err == ""
    Recording(path).add(0, 1, [0, 1]).saved()
    assert run("replay", path).err == ""
