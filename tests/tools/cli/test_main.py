"""The frame around every command: help, exit codes, Ctrl-C, and what is written how."""

from __future__ import annotations

import argparse
import io
import json
import logging
import subprocess
import sys

import pytest

from kvindex import BACKEND, BlockRemoved, BlockStored, DecodeError, EventBatch, Rank, __version__
from kvindex.subscribe import RankBatch, RankLost, RankRestarted
from kvindex.tools.cli import fanout, main, record, replay, tail
from kvindex.tools.cli.output import (
    Progress,
    json_line,
    painted,
    plain,
    printable,
    table,
    version_text,
)
from kvindex.tools.cli.tail import describe, time_of
from kvindex.wire import AllBlocksCleared, Event

pytestmark = pytest.mark.unit

COMMANDS = (
    *("demo", "fake-engine", "tail", "match", "record", "replay"),
    *("audit", "fanout", "serve", "status", "top", "doctor"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: kvindex {command}" in out
    assert "exit" in out.lower()


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n    {command} " in out for command in COMMANDS)


@pytest.mark.parametrize("argv", [[], ["serve-tea"], ["demo", "--seconds", "0"], ["match"]])
def test_arguments_that_cannot_be_parsed_exit_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: kvindex" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (DecodeError("broken"), 1), (OSError("no"), 1)]
)
def test_a_command_that_is_ended_leaves_a_code_and_no_traceback(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(replay, "run", run)
    assert main(["replay", "x"]) == code
    err = capsys.readouterr().err
    assert err.startswith("kvindex")
    assert err.count("\n") == 1


def test_the_library_logs_to_stderr_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        logging.getLogger("kvindex.subscribe").info("joined")
        return 0

    monkeypatch.setattr(replay, "run", run)
    before = list(logging.getLogger("kvindex").handlers)
    assert main(["replay", "x"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["-v", "replay", "x"]) == 0
    assert "joined" in capsys.readouterr().err
    assert main(["replay", "-v", "x"]) == 0
    assert "joined" in capsys.readouterr().err
    assert logging.getLogger("kvindex").handlers == before


def test_a_table_aligns_numbers_right_and_words_left() -> None:
    lines = table(("rank", "n", "state"), [("a/0", 5, "live"), ("long/0", 123, "-")]).splitlines()
    assert lines == ["rank      n  state", "a/0       5  live", "long/0  123  -"]
    assert table(("rank", "n"), []) == "rank  n"


def test_json_names_ranks_and_writes_bytes_in_hex() -> None:
    stored = BlockStored(block_hashes=[b"\x01\xff", 7], token_ids=[1, 2], block_size=1)
    item = RankBatch(Rank("a", 1), 0, 4, EventBatch(1.5, [stored, AllBlocksCleared()]), True)
    read = json.loads(json_line(item))
    assert (read["type"], read["rank"], read["seq"], read["replayed"]) == (
        "RankBatch",
        "a/1",
        4,
        True,
    )
    assert [event["type"] for event in read["batch"]["events"]] == [
        "BlockStored",
        "AllBlocksCleared",
    ]
    assert read["batch"]["events"][0]["block_hashes"] == ["01ff", 7]
    assert plain({1: (Rank("a"), None)}) == {"1": ["a/0", None]}


def test_a_batch_is_told_in_one_line() -> None:
    events: list[Event] = [
        BlockStored(block_hashes=[1, 2], token_ids=[0] * 8, block_size=4, lora_name="french"),
        BlockRemoved(block_hashes=[1], medium="CPU"),
        AllBlocksCleared(),
    ]
    line = describe(RankBatch(Rank("a"), 2, 9, EventBatch(0.0, events, skipped=("Beat",)), True))
    assert line == (
        "a/0  epoch 2  seq 9  +2 GPU (8 tokens) (LoRA french), -1 CPU, all cleared, 1 unknown"
        "  (replayed)"
    )


def test_a_batch_of_many_events_is_cut_short() -> None:
    events: list[Event] = [BlockRemoved(block_hashes=[n]) for n in range(10)]
    line = describe(RankBatch(Rank("a"), 0, 0, EventBatch(0.0, events), False))
    assert line.endswith("and 4 more events")
    assert describe(RankBatch(Rank("a"), 0, 0, EventBatch(0.0, []), False)).endswith("no events")


def test_losses_and_restarts_stand_out() -> None:
    assert "LOST seq 5..? (evicted): kept" in describe(
        RankLost(Rank("a"), 0, "evicted", 5, None, False)
    )
    assert "epoch 3  RESTARTED (seq_fell_back)" in describe(
        RankRestarted(Rank("a"), 3, "seq_fell_back")
    )


def test_names_from_the_network_cannot_steer_the_terminal() -> None:
    assert printable("GPU, café") == "GPU, café"
    assert printable("a\x1b[2J\nb\x9b") == r"a\x1b[2J\nb\x9b"
    assert "\x1b" not in table(("on",), [("\x1b[31mGPU",)])
    assert "\x9b" not in json_line({"medium": "\x9b31m"})


class Terminal(io.StringIO):
    def __init__(self, *, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Terminal(tty=True))
    assert painted("gap", "red") == "\x1b[31mgap\x1b[0m"
    assert painted("gap", None) == "gap"
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted("gap", "red") == "gap"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert painted("gap", "red") == "gap"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", Terminal(tty=False))
    assert painted("gap", "red") == "gap"


def test_the_version_names_the_index_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"kvindex {__version__}, {BACKEND} index")


def test_the_version_explains_a_fallback_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVINDEX_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "kvindex.wire._native", None)
    assert "index, more than 100 times slower than the native one: " in version_text()


def test_progress_is_one_line_that_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(tty=True)
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress()
    progress.show("12 %")
    progress.show("13 %")  # within a tenth of a second: not shown
    progress.clear()
    assert terminal.getvalue() == "\r12 %\r    \r"


def test_progress_is_silent_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Terminal(tty=False)
    monkeypatch.setattr("sys.stderr", pipe)
    progress = Progress()
    progress.show("12 %")
    progress.clear()
    assert pipe.getvalue() == ""


def test_where_a_shell_has_closed_the_outputs_nothing_fails() -> None:
    script = 'exec >&- 2>&-; exec "$0" -m kvindex replay "$1"'
    argv = ["sh", "-c", script, sys.executable, "/dev/null"]
    assert subprocess.run(argv, timeout=60, check=False).returncode == 0


def test_a_long_running_command_shows_warnings_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        for log in (logging.getLogger("kvindex").warning, logging.getLogger("kvindex").info):
            log("lost")
        return 0

    engine = ["--endpoint", "tcp://127.0.0.1:1"]
    for module, argv in ((tail, ["tail"]), (record, ["record", "x"]), (fanout, ["fanout", "x"])):
        monkeypatch.setattr(module, "run", run)
        assert main([*argv, *engine]) == 0
        assert capsys.readouterr().err == "WARNING kvindex: lost\n"


def test_a_time_that_is_none_is_shown_as_none() -> None:
    for ts in (float("nan"), float("inf"), -1e300, 1e300):
        item = RankBatch(Rank("a"), 0, 0, EventBatch(ts, []), False)
        assert time_of(item) == "--:--:--.---"


def test_one_engine_under_two_names_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = "--worker=a=tcp://h:5557,dp=2", "--worker=b=tcp://h:5558"
    assert main(["tail", one, two]) == 2
    assert "the workers 'a' and 'b' are both at tcp://h:5558" in capsys.readouterr().err


def test_an_argument_that_is_refused_is_named_as_it_is_written_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["tail", "--endpoint", "tcp://*:5557"]) == 2
    assert "give its host, or --bind" in capsys.readouterr().err
