"""`kvindex doctor`: targets in every form, what is printed, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvindex.testing import FakeEngine, HttpEngine, HttpOptions
from kvindex.tools.doctor import CAUSES
from tests.tools.commands import Run, at

pytestmark = pytest.mark.e2e

Examined = Callable[..., Any]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine("vllm-0", block_size=4, num_blocks=2_000) as engine:
        yield engine


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[HttpEngine]:
    with HttpEngine(engine) as server:
        yield server


@pytest.fixture
def examined(run: Run) -> Examined:
    """The report of an examination, which ends with this exit code."""
    return lambda *argv, code=0: run("doctor", "--json", "--seconds", 0.05, *argv, code=code).json


def test_a_target_has_every_form(
    engine: FakeEngine, server: HttpEngine, examined: Examined
) -> None:
    worker = at(engine, "a")[1]
    report = examined("--passive", server.url, worker)
    assert report["exit_code"] == 0
    assert [target["name"] for target in report["targets"]] == [server.url[7:], "a"]
    assert report["targets"][1]["ranks"] == {"0": engine.endpoint}

    report = examined(engine.endpoint, code=1)
    assert [finding["id"] for finding in report["findings"]] == ["replay-not-named"]
    assert report["targets"][0]["name"] == engine.endpoint.removeprefix("tcp://")

    report = examined(worker, "--engine", server.url, "--seconds", "10")
    assert [target["name"] for target in report["targets"]] == ["a"]
    assert report["targets"][0]["test"]["outcome"] == "all-well"
    examined("--engine", server.url, "--seconds", "10")


def test_findings_are_printed_with_evidence_and_remedy(engine: FakeEngine, run: Run) -> None:
    with HttpEngine(engine, options=HttpOptions(reads_cache=False)) as server:
        ran = run("doctor", server.url, code=1)
    first, seen, remedy, more, last = ran.out.splitlines()
    assert first.startswith("ERROR 127.0.0.1:")
    assert first.endswith("[engine-never-hits]")
    assert "predicted=16" in seen
    assert "--mamba-cache-mode" in remedy
    assert more.endswith("docs/doctor.md#the-test-prompt")
    assert last.endswith(": 1 error")


def test_what_the_headline_says_is_not_printed_once_more(
    engine: FakeEngine, server: HttpEngine, run: Run
) -> None:
    worker = f"{at(engine, 'a')[1]},dp=2"
    ran = run("doctor", "--passive", worker, "--engine", server.url, code=1)
    first, *rest = ran.out.splitlines()
    assert "the engine has the ranks [0], you gave [0, 1]" in first
    assert not [line for line in rest if "[0, 1]" in line]


def test_no_remedy_sends_back_to_the_reason() -> None:
    assert not [kind for kind, cause in CAUSES.items() if "as the reason says" in cause.remedy]


def test_an_engine_that_is_away_ends_with_2(examined: Examined) -> None:
    assert examined("http://127.0.0.1:1", code=2)["exit_code"] == 2


def test_an_api_key_comes_from_the_environment_or_a_file(
    engine: FakeEngine, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("k\n")
    with HttpEngine(engine, options=HttpOptions(api_key="k")) as server:
        argv = ("doctor", "--passive", "--seconds", 0.05, server.url)
        run(*argv, code=2)
        run(*argv, "--api-key-file", tmp_path / "key")
        run(*argv, "--api-key-file", tmp_path / "nothing", code=2)
        monkeypatch.setenv("KVINDEX_API_KEY", "k")
        run(*argv)


@pytest.mark.parametrize("form", ["text", "tokens", "request"])
def test_a_prompt_is_read_from_a_file_in_every_form(
    form: str, engine: FakeEngine, server: HttpEngine, tmp_path: Path, examined: Examined
) -> None:
    text = "Tell me of ships, please."
    tokens = [256, *text.encode()]
    engine.serve(tokens)
    held = {"text": text, "tokens": json.dumps(tokens), "request": json.dumps({"prompt": text})}
    (tmp_path / "prompt").write_text(held[form])
    report = examined("--passive", server.url, "--prompt", f"@{tmp_path / 'prompt'}")
    assert report["findings"] == []
    assert "24 of 26 tokens" in report["notes"][0]


def test_the_routers_tokens_are_compared(
    server: HttpEngine, tmp_path: Path, examined: Examined
) -> None:
    (tmp_path / "ids.json").write_text("[1, 2, 3, 4, 5, 6]")
    argv = ("--passive", server.url, "--prompt", "ships", "--tokens", str(tmp_path / "ids.json"))
    report = examined(*argv, code=1)
    assert report["findings"][0]["id"] == "tokens-differ"
    assert report["findings"][0]["evidence"]["position"] == 0


def test_names_from_the_network_cannot_steer_a_terminal(run: Run) -> None:
    with FakeEngine(topic="kv@pod@\x1b[2Jm") as engine, HttpEngine(engine) as server:
        ran = run("doctor", at(engine)[1], "--engine", server.url, code=1)
    assert "topic-names-another" in ran.out
    assert "\x1b" not in ran.out
