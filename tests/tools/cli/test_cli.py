"""The command line against live engines: in this process where it can be, else as a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvindex import EventStream
from kvindex.subscribe import RankBatch
from kvindex.testing import FakeEngine, Faults, FaultyLink, LaneFaults
from kvindex.tools.cli import main, output
from tests.children import ended_after
from tests.live import PATIENCE, worker_of

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
PROMPT = list(range(100))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine("vllm-0") as made:
        yield made


def address(engine: FakeEngine) -> str:
    return f"{engine.worker}={engine.endpoint},replay={engine.replay_endpoint}"


def prompt_file(tmp_path: Path, tokens: list[int] = PROMPT) -> str:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(tokens))
    return str(path)


@contextlib.contextmanager
def started(*argv: str, code: Sequence[str] = ("-m", "kvindex")) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own, ended by the test's end."""
    process = subprocess.Popen(
        [sys.executable, *code, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    with ended_after(process):
        yield process


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C and return what the process still wrote."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    return out, err


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


def test_tail_shows_the_past_then_the_present(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve(PROMPT)
    engine.serve(PROMPT + PROMPT)
    assert main(["tail", "--limit", "2", "--worker", address(engine)]) == 0
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    clock, _, first = first.partition("  ")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d\d\d", clock)
    assert first == "vllm-0/0  epoch 0  seq 0  +6 GPU (96 tokens)  (replayed)"
    assert "  vllm-0/0  epoch 0  seq 1  +6 GPU (96 tokens)" in second
    assert "2 batches with 2 events, 0 losses, 0 restarts" in printed.err


def test_tail_writes_one_json_object_a_line(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve(PROMPT)
    short = ["--endpoint", engine.endpoint, "--replay-endpoint", str(engine.replay_endpoint)]
    assert main(["tail", "--json", "--limit", "1", *short]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["type"], read["rank"], read["seq"]) == ("RankBatch", "worker-0/0", 0)
    assert len(read["batch"]["events"][0]["block_hashes"]) == 6


def test_tail_shows_a_restart(engine: FakeEngine) -> None:
    engine.serve(PROMPT)
    with started("tail", "--worker", address(engine)) as process:
        assert process.stdout is not None
        assert "seq 0" in process.stdout.readline()
        engine.restart()
        engine.serve(PROMPT)
        assert "epoch 1  RESTARTED" in process.stdout.readline()
        assert "epoch 1  seq 0" in process.stdout.readline()
        _, err = interrupt(process)
        assert process.returncode == 0
        assert "2 batches with 2 events, 0 losses, 1 restart" in err


def test_tail_says_why_nothing_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PATIENCE", 1.0)
    argv = ["tail", "--endpoint", "tcp://127.0.0.1:1", "--seconds", "2"]
    assert main(argv) == 0
    assert "worker-0/0: connecting: nothing listens at tcp://127.0.0.1:1" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_quietly(engine: FakeEngine) -> None:
    engine.serve(PROMPT)
    with started("tail", "--worker", address(engine)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        serve_until(lambda: process.poll() is not None, engine)
        assert process.returncode == 141
        assert process.stderr is not None
        err = process.stderr.read()
        assert "Traceback" not in err
        assert "BrokenPipe" not in err
        process.stdout = None


# match -----------------------------------------------------------------------------------------


def test_match_prints_every_rank_and_the_best(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve(PROMPT)
    with FakeEngine("sglang-0", dialect="sglang-0.5.18") as other:
        other.serve(PROMPT[:40])
        both = ["--worker", address(other), "--worker", address(engine)]
        assert main(["match", prompt_file(tmp_path), *both]) == 0
    header, best, second, verdict = capsys.readouterr().out.splitlines()
    assert header.split() == ["rank", "tokens", "blocks", "on", "state", "complete"]
    assert best.split() == ["vllm-0/0", "96", "6", "6", "GPU", "live", "yes"]
    assert second.split()[:3] == ["sglang-0/0", "32", "2"]
    assert verdict == "best: vllm-0/0 holds 96 of 100 tokens"


def test_match_reads_stdin_and_writes_json(engine: FakeEngine) -> None:
    engine.serve(PROMPT)
    command = [sys.executable, "-m", "kvindex", "match", "-", "--json", "--worker", address(engine)]
    ended = subprocess.run(
        command,
        input=" ".join(map(str, PROMPT)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    answer = json.loads(ended.stdout)
    assert (answer["best"], answer["tokens"]) == ("vllm-0/0", 100)
    assert answer["ranks"]["vllm-0/0"]["tokens"] == 96
    assert answer["not_live"] == {}


def test_match_keeps_loras_and_salts_apart(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve(PROMPT, lora="french", salt="x")
    argv = ["match", prompt_file(tmp_path), "--worker", address(engine)]
    assert main([*argv, "--lora", "french", "--salt", "x"]) == 0
    assert main([*argv, "--lora", "french"]) == 1
    assert main([*argv, "--salt", "x"]) == 1
    assert "no rank holds a block of 100 tokens" in capsys.readouterr().out
    assert main([*argv, "--explain"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "vllm-0/0: 0 of 100 tokens: asked with no LoRA; with LoRA 'french' and a salt (or other "
        "extra keys of the first block) it would be 96"
    )
    assert main([*argv, "--explain", "--json"]) == 1
    explained = json.loads(capsys.readouterr().out)["explanation"]["vllm-0/0"]
    assert (explained["ending"], explained["match"]["state"]) == ("prompts", "live")


def test_match_goes_on_without_the_ranks_that_are_not_live(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve(PROMPT)
    argv = ["match", prompt_file(tmp_path), "--json", "--wait", "0.5", "--worker", address(engine)]
    argv += ["--worker", "down-0=tcp://127.0.0.1:1"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    answer: dict[str, Any] = json.loads(printed.out)
    assert answer["best"] == "vllm-0/0"
    assert list(answer["not_live"]) == ["down-0/0"]
    assert "1 rank is not live after 0.5 s" in printed.err
    assert main([*argv, "--require-live"]) == 3
    assert capsys.readouterr().out == ""


def test_match_refuses_tokens_that_no_engine_has(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["match", prompt_file(tmp_path, [2**70]), "--worker", address(engine)]
    assert main(argv) == 2
    assert "kvindex match: " in capsys.readouterr().err


# record ----------------------------------------------------------------------------------------


def in_thread(argv: list[str]) -> tuple[threading.Thread, list[int]]:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(main(argv)))
    thread.start()
    return thread, codes


def test_what_is_recorded_replays_into_what_the_engine_holds(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.serve(PROMPT)
    with EventStream([worker_of(engine)]) as stream:
        while not isinstance(stream.get(PATIENCE), RankBatch):
            pass
    # It was sent before anybody records: only the replay has it.
    name = str(tmp_path / "vllm-0")
    argv = ["record", name, "--limit", "5", "--replay", "--worker", address(engine)]
    thread, codes = in_thread(argv)
    serve_until(lambda: not thread.is_alive(), engine)
    assert codes == [0]
    assert "5 live messages" in capsys.readouterr().out

    assert main(["replay", "--json", "--with-replayed", f"{name}.frames"]) == 0
    rank = json.loads(capsys.readouterr().out)["ranks"]["vllm-0/0"]
    assert rank["complete"] is True
    assert rank["counters"]["live"] == 5
    assert rank["seq"] >= 5
    # `serve_until` may have served on after the replay was asked for: compare as far as it goes.
    stored = {block["block_hash"] for block in rank["resident"]}
    assert stored
    assert stored <= {name for name, _, _ in engine.truth()}
    assert len(stored) == 6 + 2 * rank["seq"]


def test_every_rank_is_recorded_to_a_file_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeEngine("a") as one, FakeEngine("a", dp_rank=1) as two:
        one.serve(PROMPT)
        two.serve(PROMPT[:50])
        worker = f"a={one.endpoint},endpoint={two.endpoint},replay={one.replay_endpoint}"
        argv = ["record", str(tmp_path / "x"), "--seconds", "0.1", "--replay"]
        assert main([*argv, "--worker", f"{worker},replay={two.replay_endpoint}"]) == 0
    paths = sorted(path.name for path in tmp_path.iterdir())
    assert paths == ["x-a-0.frames", "x-a-1.frames"]
    capsys.readouterr()
    argv = ["replay", "--json", "--with-replayed", *(str(tmp_path / name) for name in paths)]
    assert main(argv) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert {name: rank["blocks"] for name, rank in ranks.items()} == {"x-a-0/0": 6, "x-a-1/1": 3}


def test_a_recording_is_not_overwritten_unasked(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.frames"
    path.write_text("precious")
    argv = ["record", str(path), "--seconds", "0.1", "--worker", address(engine)]
    assert main(argv) == 2
    assert "exists" in capsys.readouterr().err
    assert path.read_text() == "precious"
    assert main([*argv, "--force"]) == 0
    assert path.read_bytes() == b""


def test_a_replay_that_never_ends_is_said_and_exits_1(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["record", str(tmp_path / "x"), "--seconds", "0.1", "--replay"]
    argv += ["--replay-timeout", "0.2"]
    assert main([*argv, "--worker", f"a={engine.endpoint},replay=tcp://127.0.0.1:1"]) == 1
    assert "did not end within 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--replay", "--endpoint", "tcp://127.0.0.1:1"], "no engine has a replay endpoint"),
        (["--endpoint", "ipc:///no/such/directory/x", "--bind"], "cannot bind to"),
    ],
)
def test_a_recording_that_cannot_work_exits_2(
    argv: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(tmp_path / "x"), *argv]) == 2
    assert said in capsys.readouterr().err
    assert main(["record", str(tmp_path / "no" / "x"), "--endpoint", "tcp://127.0.0.1:1"]) == 2


def test_a_recording_says_at_once_what_it_misses(engine: FakeEngine, tmp_path: Path) -> None:
    with FaultyLink(engine.endpoint, engine.replay_endpoint) as link:
        argv = ["record", str(tmp_path / "x"), "--worker", f"vllm-0={link.endpoint}"]
        with started(*argv) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            said = process.stderr
            assert "recording vllm-0/0" in said.readline()
            link.set_faults(Faults(live=LaneFaults(drop=0.5)))
            missed = threading.Thread(target=lambda: lines.append(said.readline()))
            lines: list[str] = []
            missed.start()
            serve_until(lambda: bool(lines), engine)
            missed.join()
            assert re.fullmatch(r"vllm-0/0: \d+ messages? missed by seq so far\n", lines[0])
            out, _ = interrupt(process)
            assert re.search(r"\d+ missed by seq", out)


def test_ctrl_c_ends_a_recording_with_its_summary(engine: FakeEngine, tmp_path: Path) -> None:
    engine.serve(PROMPT)
    argv = ["record", str(tmp_path / "x"), "--replay", "--worker", address(engine)]
    with started(*argv) as process:
        assert process.stderr is not None
        assert "recording vllm-0/0" in process.stderr.readline()
        out, _ = interrupt(process)
        assert process.returncode == 0
        assert "2 replies" in out, "the batch and the end"
