"""The command line against live engines: in this process where it can be, else as a process."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvindex import EventStream
from kvindex.subscribe import RankBatch
from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults
from kvindex.tools.cli import output
from kvindex.wire import read_recording
from tests.live import PATIENCE, worker_of
from tests.tools.commands import PROMPT, Ran, Run, at, output_of, started

pytestmark = pytest.mark.e2e


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.json"
    path.write_text(str(PROMPT))
    return str(path)


def serve_until(ended: Callable[[], bool], engine: FakeEngine) -> None:
    """Serve ever new prompts until a command has had enough."""
    waited = threading.Event()
    for number in range(int(PATIENCE / 0.01)):
        if ended():
            return
        engine.serve(range(number * 1000, number * 1000 + 40))
        waited.wait(0.01)  # the engine's pace, not a wait for anything
    raise AssertionError("the command did not end")


# tail ------------------------------------------------------------------------------------------


def test_tail_shows_the_past_then_the_present(engine: FakeEngine, run: Run) -> None:
    engine.serve(PROMPT)
    engine.serve(PROMPT + PROMPT)
    ran = run("tail", "--limit", 2, *at(engine))
    first, second = ran.out.splitlines()
    clock, _, first = first.partition("  ")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d\d\d", clock)
    assert first == "vllm-0/0  epoch 0  seq 0  +6 GPU (96 tokens)  (replayed)"
    assert "  vllm-0/0  epoch 0  seq 1  +6 GPU (96 tokens)" in second
    assert "2 batches with 2 events, 0 losses, 0 restarts" in ran.err


def test_tail_writes_one_json_object_a_line(engine: FakeEngine, run: Run) -> None:
    engine.serve(PROMPT)
    short = ("--endpoint", engine.endpoint, "--replay-endpoint", engine.replay_endpoint)
    read = run("tail", "--json", "--limit", 1, *short).json
    assert (read["type"], read["rank"], read["seq"]) == ("RankBatch", "worker-0/0", 0)
    assert len(read["batch"]["events"][0]["block_hashes"]) == 6


def test_tail_shows_a_restart(engine: FakeEngine) -> None:
    engine.serve(PROMPT)
    with started("tail", *at(engine)) as command:
        assert "seq 0" in command.out.readline()
        engine.restart()
        engine.serve(PROMPT)
        assert "epoch 1  RESTARTED" in command.out.readline()
        assert "epoch 1  seq 0" in command.out.readline()
        assert "2 batches with 2 events, 0 losses, 1 restart" in command.end().err


def test_tail_reports_why_nothing_arrives(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PATIENCE", 1.0)
    ran = run("tail", "--endpoint", "tcp://127.0.0.1:1", "--seconds", 2)
    assert "worker-0/0: connecting: nothing listens at tcp://127.0.0.1:1" in ran.err


def test_a_reader_that_goes_away_ends_the_command_quietly(engine: FakeEngine) -> None:
    engine.serve(PROMPT)
    with started("tail", *at(engine)) as command:
        command.out.readline()
        command.out.close()  # as `| head -1` does
        serve_until(lambda: command.process.poll() is not None, engine)
        assert command.process.returncode == 141
        err = command.err.read()
        assert "Traceback" not in err
        assert "BrokenPipe" not in err
        command.process.stdout = None


# match -----------------------------------------------------------------------------------------


def test_match_prints_every_rank_and_the_best(engine: FakeEngine, prompt: str, run: Run) -> None:
    engine.serve(PROMPT)
    with FakeEngine("sglang-0", dialect="sglang-0.5.18") as other:
        other.serve(PROMPT[:40])
        header, best, second, verdict = run(
            "match", prompt, *at(other, "sglang-0"), *at(engine)
        ).out.splitlines()
    assert header.split() == ["rank", "tokens", "blocks", "on", "state", "complete"]
    assert best.split() == ["vllm-0/0", "96", "6", "6", "GPU", "live", "yes"]
    assert second.split()[:3] == ["sglang-0/0", "32", "2"]
    assert verdict == "best: vllm-0/0 holds 96 of 100 tokens"


def test_match_reads_stdin_and_writes_json(engine: FakeEngine) -> None:
    engine.serve(PROMPT)
    stdin = " ".join(map(str, PROMPT))
    answer = json.loads(output_of("match", "-", "--json", *at(engine), stdin=stdin))
    assert (answer["best"], answer["tokens"]) == ("vllm-0/0", 100)
    assert answer["ranks"]["vllm-0/0"]["tokens"] == 96
    assert answer["not_live"] == {}


def test_match_keeps_loras_and_salts_apart(engine: FakeEngine, prompt: str, run: Run) -> None:
    engine.serve(PROMPT, lora="french", salt="x")
    argv = ("match", prompt, *at(engine))
    run(*argv, "--lora", "french", "--salt", "x")
    for other in (("--lora", "french"), ("--salt", "x")):
        ran = run(*argv, *other, code=1)
        assert "no rank holds a block of 100 tokens" in ran.out
    assert run(*argv, "--explain", code=1).out.splitlines()[-1] == (
        "vllm-0/0: 0 of 100 tokens: asked with no LoRA; with LoRA 'french' and a salt (or other "
        "extra keys of the first block) it would be 96"
    )
    explained = run(*argv, "--explain", "--json", code=1).json["explanation"]["vllm-0/0"]
    assert (explained["ending"], explained["match"]["state"]) == ("prompts", "live")


def test_match_leaves_out_ranks_that_are_not_live(
    engine: FakeEngine, prompt: str, run: Run
) -> None:
    engine.serve(PROMPT)
    down = ("--worker", "down-0=tcp://127.0.0.1:1")
    argv = ("match", prompt, "--json", "--wait", 0.5, *at(engine), *down)
    ran = run(*argv)
    assert ran.json["best"] == "vllm-0/0"
    assert list(ran.json["not_live"]) == ["down-0/0"]
    assert "1 rank is not live after 0.5 s" in ran.err
    assert run(*argv, "--require-live", code=3).out == ""


def test_match_refuses_tokens_of_no_engine(engine: FakeEngine, tmp_path: Path, run: Run) -> None:
    (tmp_path / "large").write_text(f"[{2**70}]")
    assert "kvindex match: " in run("match", tmp_path / "large", *at(engine), code=2).err


# record ----------------------------------------------------------------------------------------


def test_a_recording_replays_into_the_engines_cache(
    engine: FakeEngine, tmp_path: Path, run: Run
) -> None:
    engine.serve(PROMPT)
    with EventStream([worker_of(engine)]) as stream:
        while not isinstance(stream.get(PATIENCE), RankBatch):
            pass
    # It was sent before anybody records: only the replay has it.
    name = str(tmp_path / "vllm-0")
    argv = ("record", name, "--limit", 5, "--replay", *at(engine))
    ended: list[Ran] = []
    thread = threading.Thread(target=lambda: ended.append(run(*argv)))
    thread.start()
    serve_until(lambda: not thread.is_alive(), engine)
    assert "5 live messages" in ended[0].out

    rank = run("replay", "--json", "--with-replayed", f"{name}.frames").json["ranks"]["vllm-0/0"]
    assert rank["complete"] is True
    assert rank["counters"]["live"] == 5
    assert rank["seq"] >= 5
    # `serve_until` may have served on after the replay was asked for: compare as far as it goes.
    stored = {block["block_hash"] for block in rank["resident"]}
    assert stored
    assert stored <= {name for name, _, _ in engine.truth()}
    assert len(stored) == 6 + 2 * rank["seq"]


def test_every_rank_is_recorded_to_a_file_of_its_own(tmp_path: Path, run: Run) -> None:
    with FakeEngine("a") as zero, FakeEngine("a", dp_rank=1) as one:
        zero.serve(PROMPT)
        one.serve(PROMPT[:50])
        worker = f"a={zero.endpoint},endpoint={one.endpoint}"
        worker += f",replay={zero.replay_endpoint},replay={one.replay_endpoint}"
        argv = ("record", tmp_path / "x", "--seconds", 0.1, "--replay", "--worker", worker)
        run(*argv)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["x-a-0.frames", "x-a-1.frames"]
    ranks = run("replay", "--json", "--with-replayed", *paths).json["ranks"]
    assert {name: rank["blocks"] for name, rank in ranks.items()} == {"a/0": 6, "a/1": 3}


def test_an_endpoint_without_a_name_is_the_worker_that_the_recording_is_called(
    engine: FakeEngine, tmp_path: Path, run: Run
) -> None:
    paths = [tmp_path / "here.frames", tmp_path / "there.frames"]
    for path in paths:
        run("record", path, "--seconds", 0.01, "--endpoint", engine.endpoint)
    assert list(run("replay", "--json", *paths).json["ranks"]) == ["here/0", "there/0"]


def test_a_recording_is_never_overwritten(engine: FakeEngine, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "kept.frames"
    path.write_text("precious")
    argv = ("record", path, "--seconds", 0.1, *at(engine))
    assert "exists" in run(*argv, code=2).err
    assert path.read_text() == "precious"
    run(*argv, "--force")
    assert [message.kind for message in read_recording(path)] == ["publisher"]


RECORD_FAILS: dict[str, tuple[int, str, list[str]]] = {
    "a replay that never ends": (
        1,
        "did not end within 0.2 s",
        ["--worker", "a={live},replay=tcp://127.0.0.1:1", "--replay", "--replay-timeout", "0.2"],
    ),
    "no replay endpoint": (
        2,
        "no replay endpoint is named",
        ["--replay", "--endpoint", "tcp://127.0.0.1:1"],
    ),
    "no place to bind": (2, "cannot bind to", ["--endpoint", "ipc:///no/such/x", "--bind"]),
}


@pytest.mark.parametrize("case", RECORD_FAILS)
def test_a_failed_recording_names_why(
    case: str, engine: FakeEngine, tmp_path: Path, run: Run
) -> None:
    code, reason, argv = RECORD_FAILS[case]
    argv = [argument.format(live=engine.endpoint) for argument in argv]
    assert reason in run("record", tmp_path / "x", "--seconds", 0.1, *argv, code=code).err


def test_a_recording_reports_at_once_what_it_misses(engine: FakeEngine, tmp_path: Path) -> None:
    with FaultyLink(engine.endpoint, engine.replay_endpoint) as link:
        with started("record", str(tmp_path / "x"), *at(link)) as command:
            assert "recording vllm-0/0" in command.err.readline()
            link.set_faults(Faults(live=LaneFaults(drop=0.5)))
            lines: list[str] = []
            missed = threading.Thread(target=lambda: lines.append(command.err.readline()))
            missed.start()
            serve_until(lambda: bool(lines), engine)
            missed.join()
            assert re.fullmatch(r"vllm-0/0: \d+ messages? missed by seq so far\n", lines[0])
            assert re.search(r"\d+ missed by seq", command.end().out)


def test_ctrl_c_ends_a_recording_with_its_summary(engine: FakeEngine, tmp_path: Path) -> None:
    engine.serve(PROMPT)
    with started("record", str(tmp_path / "x"), "--replay", *at(engine)) as command:
        assert "recording vllm-0/0" in command.err.readline()
        assert "2 replies" in command.end().out, "the batch and the end"
