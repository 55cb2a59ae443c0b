"""Every `kvindex …` command of the README and of the site runs, in the order of its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvindex.testing import FakeEngine, HttpEngine
from tests.children import ended_after
from tests.docs.pages import PAGES, ROOT, Fence, fences_in, name_of
from tests.live import PATIENCE
from tests.native_ring import MISSING

pytestmark = pytest.mark.e2e

PROMPT = list(range(100))
# Not run here: installations and builds (.ci/run does those), engines that need a GPU,
# benchmarks that take minutes (`--smoke` is in .ci/run), and what runs at night.
ELSEWHERE = (
    *("pip ", "git ", "cmake ", "vllm ", "python -m ", "KVINDEX_STRICT_BUILD=1 pip "),
    *(".ci/run ", ".ci/whole ", "HYPOTHESIS_PROFILE=nightly ", "CXX=clang++ ", "mkdir "),
)
# These run until they are interrupted; what they print first (on stderr: {…}) says that they work.
UNTIL_INTERRUPTED = {
    "fake-engine": "events at",
    "fanout": "listening at",
    "audit --minutes": "the window is open",
    "serve": "the page: ",
    "gateway": "serves fake-model",
}
HTTP = "http://127.0.0.1:8000"  # of the first engine
GATEWAY = "http://127.0.0.1:8080"  # where `kvindex gateway` listens by default
SERVED = "http://127.0.0.1:8090"  # where `kvindex serve` listens by default
ENGINE = r"vllm-0=tcp://127\.0\.0\.1:5557,replay=tcp://127\.0\.0\.1:5657"


def commands(page: Path) -> list[str]:
    found: list[str] = []
    for fence in fences_in(page, "sh"):
        found += one_by_one(fence)
    return found


def one_by_one(fence: Fence) -> list[str]:
    """Return the commands of a fence, each as one line; a quote may hold line breaks."""
    joined = re.sub(r"\\\n\s*", "", fence.text)
    joined = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), joined)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


RUN_HERE = {
    page: [line for line in commands(page) if line.startswith(("kvindex ", "echo ", "curl "))]
    for page in PAGES
}


class Shell:
    """A folder in which the commands of one page are run, against fake engines."""

    def __init__(self, folder: Path, engines: list[FakeEngine]) -> None:
        self.folder = folder
        self.engines = engines
        self.http = HttpEngine(engines)
        self.urls = {HTTP: self.http.url, GATEWAY: GATEWAY, SERVED: SERVED}  # by those of the page
        self.running: list[subprocess.Popen[str]] = []
        self.stack = ExitStack()  # ends them
        shim = folder / "bin" / "kvindex"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvindex "$@"\n')
        shim.chmod(0o700)
        (folder / "tokens.json").write_text(json.dumps(PROMPT))
        self.environment = {
            **os.environ,
            "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def run(self, line: str) -> None:
        line = self._at_our_engines(line)
        for command, shows in UNTIL_INTERRUPTED.items():
            if line.startswith(f"kvindex {command}"):
                self._start(line, shows, live=command == "fanout")
                return
        ended = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
        assert ended.stdout or " record " in line or ">" in line, f"{line} printed nothing"

    def _at_our_engines(self, line: str) -> str:
        first = self.engines[0]
        every = ",".join(
            f"{'' if number else 'vllm-0='}{'endpoint=' if number else ''}{engine.endpoint},"
            f"replay={engine.replay_endpoint}"
            for number, engine in enumerate(self.engines)
        )
        line = re.sub(ENGINE + ",dp=2", every, line)
        line = re.sub(ENGINE, f"vllm-0={first.endpoint},replay={first.replay_endpoint}", line)
        line = line.replace("tcp://127.0.0.1:5557", first.endpoint)
        line = line.replace("tcp://127.0.0.1:5657", str(first.replay_endpoint))
        for url, ours in self.urls.items():
            line = line.replace(url, ours).replace(url.partition("//")[2], ours.partition("//")[2])
        line = line.replace("/run/router/", f"{self.folder}/")
        line = re.sub("^curl (-sN?) ", r"curl \1 --fail-with-body ", line)
        if line.startswith("kvindex fake-engine"):  # no fixed ports in tests: the last one counts
            line += " --endpoint tcp://127.0.0.1:0 --replay-endpoint tcp://127.0.0.1:0"
            line += " --http 0" * ("--http" in line)
        if line.startswith(("kvindex serve ", "kvindex gateway ")):
            line += " --port 0"
        return line

    def _start(self, line: str, shows: str, *, live: bool) -> None:
        process = subprocess.Popen(
            ["sh", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        self.stack.enter_context(ended_after(process))
        assert process.stdout is not None
        port = re.search("--http ([1-9][0-9]+)", line)
        wanted = [shows, *([f"vllm-0/{rank}: live" for rank in range(2)] if live else [])]
        wanted += ["HTTP at "] * bool(port)
        for printed in process.stdout:
            if " the page: " in printed:
                self.urls[SERVED] = printed.split()[-1].rstrip("/")
            if printed.startswith("kvindex serves OpenAI's API at "):
                self.urls[GATEWAY] = printed.split()[-1].removesuffix("/v1")
            if port and printed.startswith("HTTP at "):
                self.urls[f"http://127.0.0.1:{port[1]}"] = printed.split()[-1]
            wanted = [text for text in wanted if text not in printed]
            if not wanted:
                return
        raise AssertionError(f"{line} ended before it showed {wanted}")

    def interrupt(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE)
            assert process.returncode == 0


@pytest.fixture
def shell() -> Iterator[Shell]:
    engines = [FakeEngine("vllm-0", dp_rank=rank) for rank in range(2)]
    for engine in engines:
        for length in (40, 70, 100):
            engine.serve(PROMPT[:length])
    folder = Path(tempfile.mkdtemp())  # short: the path of a socket has at most 107 bytes
    opened = Shell(folder, engines)
    try:
        yield opened
    finally:
        opened.stack.close()
        opened.http.close()
        for engine in engines:
            engine.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("page", [page for page in PAGES if RUN_HERE[page]], ids=name_of)
def test_the_commands_of_a_page_run(page: Path, shell: Shell) -> None:
    if any(line.startswith("kvindex fanout ") for line in RUN_HERE[page]) and MISSING:
        pytest.skip(MISSING)
    if any(line.startswith(("kvindex serve ", "kvindex gateway ")) for line in RUN_HERE[page]):
        pytest.importorskip("httptools", reason="needs kvindex[server]")
    if any(line.startswith("kvindex top ") for line in RUN_HERE[page]):
        pytest.importorskip("rich", reason="needs kvindex[server]")
    for line in RUN_HERE[page]:
        shell.run(line)
    shell.interrupt()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_command_that_nobody_runs(page: Path) -> None:
    for line in commands(page):
        assert line in RUN_HERE[page] or line.startswith(ELSEWHERE), line
