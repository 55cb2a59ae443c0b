"""What the command line accepts, and how it refuses the rest."""

from __future__ import annotations

import argparse
import io
import re
from argparse import HelpFormatter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvindex import CacheSettings, ConfigurationError, GroupSpec, Worker
from kvindex.tools.cli.arguments import (
    add_cache_options,
    count,
    parse_tokens,
    read_tokens,
    seconds,
    settings_of,
    settings_options,
)
from kvindex.tools.cli.engines import add_engine_options, parse_worker, workers_of
from kvindex.tools.cli.record import file_names
from tests.tools.commands import Run

pytestmark = pytest.mark.unit


def workers(*argv: str) -> list[Worker]:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return workers_of(parser.parse_args(argv))


WORKERS = {
    "a=tcp://h:5557": Worker("a", "tcp://h:5557"),
    "a=tcp://h:5557,replay=tcp://h:5657,dp=2,topic=kv@a,bind": Worker(
        "a", "tcp://h:5557", replay="tcp://h:5657", dp_size=2, topic="kv@a", bind=True
    ),
    "a=tcp://h:1,endpoint=tcp://i:2,replay=tcp://h:3,replay=tcp://i:4": Worker(
        "a", ["tcp://h:1", "tcp://i:2"], replay=["tcp://h:3", "tcp://i:4"]
    ),
}


@pytest.mark.parametrize("text", WORKERS)
def test_a_worker_has_a_name_an_endpoint_and_further_options(text: str) -> None:
    assert parse_worker(text) == WORKERS[text]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tcp://h:5557", "expected NAME=ENDPOINT"),
        ("a=", "expected NAME=ENDPOINT"),
        ("=tcp://h:5557", "expected NAME=ENDPOINT"),
        ("a=h:5557", "expected tcp://HOST:PORT"),
        ("a=tcp://h:5557,dp=two", "dp=two is no number"),
        ("a=tcp://h:5557,dp=0", "dp_size must be 1"),
        ("a=tcp://h:5557,dp=1,dp=2", "dp= is given twice"),
        ("a=tcp://h:5557,replay", "'replay' is none of"),
        ("a=tcp://h:5557,replay=", "'replay=' is none of"),
        ("a=tcp://h:5557,bind=yes", "'bind=yes' is none of"),
        ("a=tcp://h:5557,port=1", "'port=1' is none of"),
        ("a=tcp://h:1,replay=tcp://h:2,replay=tcp://h:3", "replay lists 2"),
    ],
)
def test_a_bad_worker_is_refused_with_its_text_and_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match="--worker") as refused:
        parse_worker(text)
    assert reason in str(refused.value)
    assert text in str(refused.value)


def test_the_short_form_names_one_worker() -> None:
    assert workers("--endpoint", "tcp://h:1") == [Worker("worker-0", "tcp://h:1")]
    full = ["--replay-endpoint", "tcp://h:9", "--dp-size", "2", "--topic", "kv", "--name", "a"]
    assert workers("--endpoint", "tcp://h:1", *full, "--bind") == [
        Worker("a", "tcp://h:1", replay="tcp://h:9", dp_size=2, topic="kv", bind=True)
    ]


def test_both_forms_add_up() -> None:
    argv = ("--worker", "a=tcp://h:1", "--worker", "b=tcp://h:2", "--endpoint", "tcp://h:3")
    assert [worker.name for worker in workers(*argv)] == ["a", "b", "worker-0"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "usage: kvindex"),
        ("serve-tea", "usage: kvindex"),
        ("demo --seconds 0", "usage: kvindex"),
        ("match", "usage: kvindex"),
        ("tail", "no engine named"),
        ("tail --worker a=tcp://h:1 --worker a=tcp://h:2", "two workers are called 'a'"),
        ("tail --worker a=tcp://h:1 --dp-size 2", "--dp-size belongs to --endpoint"),
        ("tail --replay-endpoint tcp://h:1", "--replay-endpoint belongs to --endpoint"),
        ("tail --bind", "--bind belongs to --endpoint"),
        ("tail --endpoint nowhere", "expected tcp://HOST:PORT"),
        ("tail --endpoint tcp://*:5557", "give its host, or --bind"),
        (
            "tail --worker a=tcp://h:5557,dp=2 --worker b=tcp://h:5558",
            "the workers 'a' and 'b' are both at tcp://h:5558",
        ),
        ("tail --engine engine:8000", "write http://HOST:PORT"),
        ("tail --engine http://h:1 --engine http://h:1", "is given twice"),
        # Only what matches has settings of caches.
        ("tail --endpoint tcp://h:1 --eagle", "unrecognized arguments: --eagle"),
        ("record frames --endpoint tcp://h:1 --eagle", "unrecognized arguments: --eagle"),
        ("record /no/such/x --endpoint tcp://127.0.0.1:1", "cannot write /no/such/x.frames"),
        ("audit", "no engine named"),
        ("audit no-such-file", "cannot read"),
        ("audit FILE --endpoint tcp://127.0.0.1:1", "not both"),
        ("audit FILE --html /no/such/directory/x.html", "no such directory"),
        ("doctor", "name an engine"),
        ("doctor vllm-0", "'vllm-0': expected http://HOST:PORT, tcp://HOST:PORT, or NAME="),
        ("doctor http://", "names no host"),
        ("doctor http://h:1 --engine http://h:2", "--engine belongs to one TARGET"),
        ("doctor http://h:1 --prompt @/nowhere", "cannot read a prompt"),
        ("doctor http://h:1 --seconds 9999", "up to 3600 s"),
        ("doctor https://h:1 --cacert /nowhere", "--cacert /nowhere: "),
        *(
            (f"fake-engine --rate={rate}", "is not a number of requests per second, from 0")
            for rate in ("-1", "x", "inf", "nan")
        ),
    ],
)
def test_a_command_that_cannot_work_exits_2_with_why(line: str, reason: str, run: Run) -> None:
    assert reason in run(*line.replace("FILE", __file__).split(), code=2).err


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", "1 2 3", "1,2,3", " 1, 2\n3\n", "[1,\n2,3]\n", "1\t2\r\n3"]
)
def test_tokens_are_a_json_list_or_separated_numbers(text: str) -> None:
    assert parse_tokens(text) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no tokens"),
        ("[]", "no tokens"),
        ("1 two 3", "item 1 is 'two'"),
        ("[1, 2.5]", "item 1 is '2.5'"),
        ("[true]", "item 0 is 'True'"),
        ("[null]", "item 0 is 'None'"),
        ("[[1]]", "item 0 is '[1]'"),
        ("3 -1", "item 1 is -1"),
        ("9223372036854775808", "0 to 2**63 - 1"),
        ("[1, 2", "no JSON list"),
        ("[" * 100_000, "no JSON list"),
    ],
)
def test_bad_tokens_are_refused_with_their_position(text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_tokens(text)
    assert reason in str(refused.value)


def test_tokens_are_in_a_file_or_on_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.json"
    path.write_text("[7, 8]")
    assert read_tokens(str(path)) == [7, 8]
    monkeypatch.setattr("sys.stdin", io.StringIO("9 10"))
    assert read_tokens("-") == [9, 10]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read tokens from .*prompt"),
        (b"\xff\xfe\x00", "cannot read tokens from .*prompt"),
        (b"hello", "prompt: item 0"),
    ],
)
def test_an_unreadable_token_file_is_named(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=reason):
        read_tokens(str(path))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (seconds, ("1.5", 1.5), ["0", "-1", "nan", "inf", "soon", ""]),
        (count, ("3", 3), ["0", "-1", "1.5", "²", "many", ""]),
    ],
)
def test_numbers_are_above_zero(
    kind: Callable[[str], float], good: tuple[str, float], bad: list[str]
) -> None:
    assert kind(good[0]) == good[1]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
            kind(text)


@pytest.mark.parametrize(
    ("output", "workers", "names"),
    [
        ("x", [Worker("a", "tcp://h:1")], ["x.frames"]),
        ("x.frames", [Worker("a", "tcp://h:1")], ["x.frames"]),
        (
            "x.frames",
            [Worker("a", "tcp://h:1", dp_size=2), Worker("kv/b", "tcp://i:1")],
            ["x-a-0.frames", "x-a-1.frames", "x-kv_b-0.frames"],
        ),
    ],
)
def test_recordings_of_several_ranks_are_named_by_worker_and_rank(
    output: str, workers: list[Worker], names: list[str]
) -> None:
    assert [str(path) for *_, path in file_names(output, workers)] == names


def test_two_ranks_never_share_a_recording() -> None:
    clash = [Worker("a/b", "tcp://h:1"), Worker("a_b", "tcp://h:2")]
    with pytest.raises(ConfigurationError, match="same file name"):
        file_names("x", clash)


def test_cache_settings_are_given_to_each_worker() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_cache_options(parser)
    text = "--worker a=tcp://h:1 --endpoint tcp://h:2 --eagle --upper-bound"
    text += " --group 1=sliding_window:64 --report-mode full --resets-connector --removals last"
    text += " --offload-chunk 64"
    arguments = parser.parse_args(text.split())
    expected = CacheSettings(
        groups={1: GroupSpec("sliding_window", 64)},
        removals="last",
        report_mode="full",
        eagle=True,
        offload_chunk=64,
        upper_bound=True,
        resets_connector=True,
    )
    assert [worker.cache for worker in workers_of(arguments)] == [expected] * 2


class Settings(msgspec.Struct, kw_only=True):
    """Settings of a command.

    Attributes:
        port: where it listens.
        body_bytes: of a body, 100 % of
            it.
        within: seconds to wait for.
        plain: as it is.
        hosts: that are known.
        limit: of what nobody sees.

    Raises:
        ValueError: never.
    """

    port: int = 8090
    body_bytes: int = 8 << 20
    within: float | None = None
    plain: bool = False
    hosts: tuple[str, ...] = ()
    mode: str = "auto"
    limit: int | None = 1_000


def test_options_of_settings_have_their_types_defaults_and_meanings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser(formatter_class=lambda prog: HelpFormatter(prog, width=200))
    forms = ("--port PORT", "--max-body BYTES=body_bytes", "--within S", "--plain", "--mode")
    modes = {"mode": ("auto", "off")}
    settings_options(parser, Settings(), *forms, "--host NAME=hosts", choices=modes)
    assert settings_of(parser.parse_args([]), Settings) == {}
    line = "--port 0 --max-body 7 --within 1.5 --plain --host a --host b --mode off"
    assert settings_of(parser.parse_args(line.split()), Settings) == {
        "port": 0,
        "body_bytes": 7,
        "within": 1.5,
        "plain": True,
        "hosts": ("a", "b"),
        "mode": "off",
    }
    help_ = parser.format_help()
    for line in (
        "--port PORT where it listens (default: 8090)",
        "--max-body BYTES of a body, 100 % of it (default: 8 MiB)",
        "--within S seconds to wait for",
        "--host NAME that are known; repeatable",
        "--mode {auto,off} (default: auto)",
    ):
        assert f"\n{line}\n" in re.sub(r"  +", " ", help_).replace("\n ", "\n")
    for argv in (["--port", "65536"], ["--max-body", "0"], ["--within", "inf"], ["--mode", "on"]):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
    assert "limit" not in help_ + capsys.readouterr().out
