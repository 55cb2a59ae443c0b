"""`kvindex fake-engine` and `kvindex demo`."""

from __future__ import annotations

import json
import re
import signal
from urllib.request import Request, urlopen

import pytest

import kvindex
from kvindex import Worker, connect
from kvindex.testing import FakeEngine
from tests.live import PATIENCE, until
from tests.tools.commands import PROMPT, Run, started

pytestmark = pytest.mark.e2e

ANY_PORTS = ("--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fake_engine_is_matched_by_others(number: signal.Signals) -> None:
    with started("fake-engine", *ANY_PORTS, "--rate", "50", "--seed", "3") as command:
        lines = [command.out.readline() for _ in range(3)]
        assert [line.split(":")[0] for line in lines[:2]] == ["vllm-0/0", "vllm-0/1"]
        assert "50 requests per second" in lines[2]
        ranks = [re.findall(r"tcp://[^\s,]+", line) for line in lines[:2]]
        endpoints, replays = zip(*ranks, strict=True)
        with connect([Worker("vllm-0", endpoints, replay=replays)]) as client:
            client.wait_live(PATIENCE)
            until(client.statuses, lambda all_: all(s.seq is not None for s in all_.values()))
            assert [held.tokens for held in client.match(PROMPT)] == [96, 48]
        ran = command.end(number)
        assert ran.err == ""
        assert " requests, " in ran.out.splitlines()[-1]


def test_a_fake_engine_ends_by_itself_and_serves_the_same_for_a_seed(run: Run) -> None:
    argv = ["fake-engine", *ANY_PORTS, "--dp-size", 1, "--name", "engine", "--rate", 0.1]
    ends = []
    for seed in (1, 1, 2):
        first, *_, last = run(*argv, "--seconds", 0.5, "--seed", seed).out.splitlines()
        assert first.startswith("engine/0: events at tcp://127.0.0.1:")
        ends.append(last)
    assert ends[0].startswith("2 requests, 0% of their tokens cached; blocks held: ")
    assert ends[0] == ends[1] != ends[2]


def test_a_fake_engine_without_requests_of_its_own_serves_what_it_is_sent() -> None:
    argv = (*ANY_PORTS, "--dp-size", "1", "--rate", "0", "--http", "0")
    with started("fake-engine", *argv) as command:
        lines = [command.out.readline() for _ in range(3)]
        assert lines[2] == "no requests per second of its own; Ctrl-C ends it\n"
        url = lines[1].split()[-1]
        prompt = {"model": "fake-model", "prompt": list(range(100)), "max_tokens": 1}
        request = Request(f"{url}/v1/completions", json.dumps(prompt).encode())
        request.add_header("content-type", "application/json")
        cached = []
        for _ in range(2):
            with urlopen(request, timeout=PATIENCE) as answer:
                usage = json.load(answer)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 96]


def test_fake_engines_serve_one_model_whatever_their_names() -> None:
    models = []
    for argv in (("--name", "a"), ("--name", "b"), ("--name", "c", "--model", "llama")):
        with started("fake-engine", *ANY_PORTS, "--dp-size", "1", "--http", "0", *argv) as command:
            url = [command.out.readline() for _ in range(2)][1].split()[-1]
            with urlopen(f"{url}/v1/models", timeout=PATIENCE) as answer:
                models.append(json.load(answer)["data"][0]["id"])
    assert models == ["fake-model", "fake-model", "llama"]


def test_a_fake_engine_whose_port_is_taken_exits_2(run: Run, engine: FakeEngine) -> None:
    assert "kvindex fake-engine: " in run("fake-engine", "--endpoint", engine.endpoint, code=2).err


# demo ------------------------------------------------------------------------------------------


def test_the_demo_repairs_all_and_shows_what_a_router_gains(run: Run) -> None:
    out = run("demo", "--seconds", 2, "--seed", 5).out
    assert out.startswith(f"kvindex {kvindex.__version__}, {kvindex.BACKEND} index\n")
    for line in (
        "sglang-0/1: the engine is restarted",
        "sglang-0/1: restart noticed",
        "vllm-0/1: disconnected",
        "vllm-0/1: connected again",
        "repaired by replay",
        "leaves 49% less to compute",  # by the seed, whatever the machine does
        "Result: every rank's index equals its engine's cache",
    ):
        assert line in out
    assert out.count("  equal\n") == 4
    assert out.count("<- send it here") == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out, "no colour off a terminal"


def test_the_demo_fails_when_an_index_differs(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(FakeEngine, "truth", lambda self: {(1, "GPU", None): 1})
    out = run("demo", "--seconds", 0.2, code=1).out
    assert out.count("DIFFERENT") == 4
    assert "NOT equal" in out


def test_ctrl_c_ends_the_demo_without_a_traceback() -> None:
    with started("demo") as command:
        assert any("live:" in line for line in command.out)
        command.end(code=130)
