"""The frame around every command: help, exit codes, Ctrl-C, and what is written how."""

from __future__ import annotations

import argparse
import io
import json
import logging
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from kvindex import BACKEND, BlockRemoved, BlockStored, DecodeError, EventBatch, Rank, __version__
from kvindex.subscribe import RankBatch, RankLost, RankRestarted, StreamItem
from kvindex.tools.cli import fanout, record, replay
from kvindex.tools.cli.output import (
    Progress,
    json_line,
    painted,
    plain,
    printable,
    table,
    version_text,
)
from kvindex.tools.cli.record import describe, time_of
from kvindex.wire import AllBlocksCleared, Event
from tests.tools.commands import Run

pytestmark = pytest.mark.unit

COMMANDS = (
    *("demo", "fake-engine", "tail", "match", "record", "replay", "audit", "fanout", "relay"),
    *("serve", "gateway", "epp", "status", "top", "doctor"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_exit_codes(command: str, run: Run) -> None:
    ran = run(command, "--help")
    assert f"usage: kvindex {command}" in ran.out
    assert "exit" in ran.out.lower()


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(
    "httptools uvloop prometheus_client grpc cryptography rich nats tokenizers jinja2".split()
))
from kvindex.tools.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["serve", "gateway", "epp", "relay", "top"])
def test_the_help_needs_no_extra_package(command: str) -> None:
    argv = [sys.executable, "-c", WITHOUT_EXTRAS, command, "--help"]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert f"usage: kvindex {command}" in ran.stdout


def test_the_help_lists_every_command(run: Run) -> None:
    out = run("--help").out
    assert all(f"\n    {command} " in out for command in COMMANDS)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (DecodeError("broken"), 1), (OSError("no"), 1)]
)
def test_a_command_that_is_ended_leaves_a_code_and_no_traceback(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(replay, "run_replay", fail)
    ran = run("replay", "x", code=code)
    assert ran.err.startswith("kvindex")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "argv", "shown"),
    [
        (replay, ["replay", "x"], ""),
        (replay, ["-v", "replay", "x"], "WARNING kvindex: lost\nINFO kvindex: joined\n"),
        (replay, ["replay", "-v", "x"], "WARNING kvindex: lost\nINFO kvindex: joined\n"),
        (record, ["tail"], "WARNING kvindex: lost\n"),
        (record, ["record", "x"], "WARNING kvindex: lost\n"),
        (fanout, ["fanout", "x"], "WARNING kvindex: lost\n"),
    ],
)
def test_the_log_is_shown_when_asked_for_and_warnings_of_long_running_commands_unasked(
    module: ModuleType, argv: list[str], shown: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    logger = logging.getLogger("kvindex")

    def log(arguments: argparse.Namespace) -> int:
        logger.warning("lost")
        logger.info("joined")
        return 0

    (command,) = {"fanout", "record", "replay", "tail"}.intersection(argv)
    monkeypatch.setattr(module, f"run_{command}", log)
    before = list(logger.handlers)
    assert run(*argv) == ("", shown)
    assert logger.handlers == before


def test_a_table_aligns_numbers_right_and_words_left() -> None:
    lines = table(("rank", "n", "state"), [("a/0", 5, "live"), ("long/0", 123, "-")]).splitlines()
    assert lines == ["rank      n  state", "a/0       5  live", "long/0  123  -"]
    assert table(("rank", "n"), []) == "rank  n"
    assert table(("a", "b", "c"), [(None, True, 0.25)]).splitlines()[1] == "-  yes  0.2"


def test_json_names_ranks_and_writes_bytes_in_hex() -> None:
    stored = BlockStored(block_hashes=[b"\x01\xff", 7], token_ids=[1, 2], block_size=1)
    item = RankBatch(Rank("a", 1), 0, 4, EventBatch(1.5, [stored, AllBlocksCleared()]), True)
    read = json.loads(json_line(item))
    first, second = read["batch"]["events"]
    assert (read["type"], read["rank"], read["seq"]) == ("RankBatch", "a/1", 4)
    assert read["replayed"] is True
    assert (first["type"], second["type"]) == ("BlockStored", "AllBlocksCleared")
    assert first["block_hashes"] == ["01ff", 7]
    assert plain({1: (Rank("a"), None)}) == {"1": ["a/0", None]}


def batch(
    *events: Event, ts: float = 0.0, replayed: bool = False, **fields: Any
) -> RankBatch[EventBatch]:
    return RankBatch(Rank("a"), 2, 9, EventBatch(ts, list(events), **fields), replayed)


STORED = BlockStored(block_hashes=[1, 2], token_ids=[0] * 8, block_size=4, lora_name="french")
REMOVED = BlockRemoved(block_hashes=[1], medium="CPU")
ITEMS: list[tuple[StreamItem, str]] = [
    (
        batch(STORED, REMOVED, AllBlocksCleared(), skipped=("Beat",), replayed=True),
        "a/0  epoch 2  seq 9  +2 GPU (8 tokens) (LoRA french), -1 CPU, all cleared, 1 unknown"
        "  (replayed)",
    ),
    (batch(*[REMOVED] * 10), "and 4 more events"),
    (batch(), "no events"),
    (RankLost(Rank("a"), 0, "evicted", 5, None, False), "(evicted): kept, flagged incomplete"),
    (RankLost(Rank("a"), 0, "evicted", 5, None, True), "what the rank held is to be dropped"),
    (RankRestarted(Rank("a"), 3, "seq_fell_back"), "(seq_fell_back): its cache is empty"),
]


@pytest.mark.parametrize(("item", "end"), ITEMS)
def test_an_item_is_described_in_one_line(item: StreamItem, end: str) -> None:
    assert describe(item).endswith(end)


def test_losses_and_restarts_stand_out() -> None:
    lost, restarted = ITEMS[3][0], ITEMS[5][0]
    assert describe(lost).startswith("a/0  epoch 0  LOST seq 5..?")
    assert describe(restarted).startswith("a/0  epoch 3  RESTARTED")


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


@pytest.mark.parametrize(
    ("tty", "environment", "coloured"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    tty: bool, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", Terminal(tty=tty))
    assert painted("gap", "red") == ("\x1b[31mgap\x1b[0m" if coloured else "gap")
    assert painted("gap", None) == "gap"


def test_the_version_names_the_index_that_runs(run: Run) -> None:
    assert run("--version").out.startswith(f"kvindex {__version__}, {BACKEND} index")


def test_the_version_explains_a_fallback_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVINDEX_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "kvindex.wire._native", None)
    assert "index, more than 100 times slower than the native one: " in version_text()


@pytest.mark.parametrize("tty", [True, False])
def test_progress_is_one_line_that_is_wiped(tty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(tty=tty)
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress()
    progress.show("12 %")
    progress.show("13 %")  # within a tenth of a second: not shown
    progress.clear()
    assert terminal.getvalue() == ("\r12 %\r    \r" if tty else "")


def test_where_a_shell_has_closed_the_outputs_nothing_fails() -> None:
    script = 'exec >&- 2>&-; exec "$0" -m kvindex replay "$1"'
    argv = ["sh", "-c", script, sys.executable, "/dev/null"]
    assert subprocess.run(argv, timeout=60, check=False).returncode == 0


def test_a_time_that_is_none_is_shown_as_none() -> None:
    for ts in (float("nan"), float("inf"), -1e300, 1e300):
        assert time_of(batch(ts=ts)) == "--:--:--.---"
