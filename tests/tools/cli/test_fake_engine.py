"""`kvindex fake-engine` and `kvindex demo`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

import kvindex
from kvindex.testing import FakeEngine
from kvindex.testing.ports import reserve_port
from kvindex.tools.cli import main
from tests.live import PATIENCE
from tests.tools.cli.test_cli import ROOT, interrupt, started

pytestmark = pytest.mark.e2e

ANY_PORTS = ("--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0")
SNIPPET = """
import sys
from kvindex import Worker, connect

with connect([Worker("vllm-0", sys.argv[1], replay=sys.argv[2], dp_size=2)]) as client:
    client.wait_live(timeout=120.0)
    client.wait_for(lambda found: all(one.seq is not None for one in found.values()), 120.0)
    match = client.match(list(range(100)))
    print(match.best.rank, match.best.tokens, [found.tokens for found in match])
"""


@pytest.fixture
def two_ports() -> Iterator[tuple[str, str]]:
    """Endpoints of rank 0 at which, and one port above, nobody listens."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            ports = []
            for _ in range(2):
                holder, port = reserve_port()
                stack.enter_context(holder)
                above = stack.enter_context(socket.socket())
                above.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    above.bind(("127.0.0.1", port + 1))
                    ports.append(port)
            if len(ports) == 2:
                break
        yield f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}"


@pytest.mark.parametrize("ends_it", [signal.SIGINT, signal.SIGTERM])
def test_a_fake_engine_in_one_terminal_is_matched_in_another(
    ends_it: signal.Signals, two_ports: tuple[str, str]
) -> None:
    live, replay = two_ports
    argv = ("--endpoint", live, "--replay-endpoint", replay, "--rate", "50", "--seed", "3")
    with started("fake-engine", *argv) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[0] == f"vllm-0/0: events at {live}, replay at {replay}\n"
        assert lines[1].startswith("vllm-0/1: events at ")
        assert "50 requests per second" in lines[2]
        asked = subprocess.run(
            [sys.executable, "-c", SNIPPET, live, replay],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
        )
        assert asked.stdout == "vllm-0/0 96 [96, 48]\n"
        process.send_signal(ends_it)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (0, "")
        assert " requests, " in out.splitlines()[-1]


def test_a_fake_engine_ends_by_itself_and_serves_the_same_for_a_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["fake-engine", *ANY_PORTS, "--dp-size", "1", "--name", "engine", "--rate", "0.1"]
    ends = []
    for seed in ("1", "1", "2"):
        assert main([*argv, "--seconds", "0.5", "--seed", seed]) == 0
        first, *_, last = capsys.readouterr().out.splitlines()
        assert first.startswith("engine/0: events at tcp://127.0.0.1:")
        ends.append(last)
    assert ends[0].startswith("2 requests, 0% of their tokens cached; blocks held: ")
    assert ends[0] == ends[1] != ends[2]


def test_a_fake_engine_without_requests_of_its_own_serves_what_it_is_sent() -> None:
    argv = (*ANY_PORTS, "--dp-size", "1", "--name", "vllm-2", "--rate", "0", "--http", "0")
    with started("fake-engine", *argv) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[2] == "no requests per second of its own; Ctrl-C ends it\n"
        url = lines[1].split()[-1]
        prompt = {"model": "fake-model", "prompt": list(range(100)), "max_tokens": 1}
        request = Request(f"{url}/v1/completions", json.dumps(prompt).encode())
        cached = []
        for _ in range(2):
            with urlopen(request, timeout=PATIENCE) as answer:
                usage = json.load(answer)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 96]


def test_fake_engines_serve_one_model_whatever_their_names() -> None:
    models = []
    for argv in (("--name", "a"), ("--name", "b"), ("--name", "c", "--model", "llama")):
        with started("fake-engine", *ANY_PORTS, "--dp-size", "1", "--http", "0", *argv) as process:
            assert process.stdout is not None
            url = [process.stdout.readline() for _ in range(2)][1].split()[-1]
            with urlopen(f"{url}/v1/models", timeout=PATIENCE) as answer:
                models.append(json.load(answer)["data"][0]["id"])
    assert models == ["fake-model", "fake-model", "llama"]


@pytest.mark.parametrize("rate", ["-1", "x", "inf", "nan"])
def test_a_rate_that_is_none_names_its_unit(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fake-engine", f"--rate={rate}"])
    assert "is not a number of requests per second, from 0" in capsys.readouterr().err


def test_a_fake_engine_whose_port_is_taken_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeEngine("vllm-0") as engine:
        assert main(["fake-engine", "--endpoint", engine.endpoint]) == 2
    assert "kvindex fake-engine: " in capsys.readouterr().err


# demo ------------------------------------------------------------------------------------------


def test_the_demo_repairs_all_and_shows_what_a_router_gains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--seconds", "2", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"kvindex {kvindex.__version__}, {kvindex.BACKEND} index\n")
    assert "sglang-0/1: the engine is restarted" in out
    assert "sglang-0/1: restart noticed" in out
    assert "vllm-0/1: disconnected" in out
    assert "vllm-0/1: connected again" in out
    assert "repaired by replay" in out
    assert out.count("  equal\n") == 4
    assert out.count("<- send it here") == 1
    assert "leaves 49% less to compute" in out, "the seed says it, whatever the machine does"
    assert "Result: every rank's index equals its engine's cache" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out, "no colour off a terminal"


def test_the_demo_fails_when_an_index_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeEngine, "truth", lambda self: {(1, "GPU", None): 1})
    assert main(["demo", "--seconds", "0.2"]) == 1
    out = capsys.readouterr().out
    assert out.count("DIFFERENT") == 4
    assert "NOT equal" in out


def test_ctrl_c_ends_the_demo_without_a_traceback() -> None:
    with started("demo") as process:
        assert process.stdout is not None
        assert any("live:" in line for line in process.stdout)
        interrupt(process)
        assert process.returncode == 130
