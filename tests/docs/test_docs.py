"""Every example of the README and of the site runs, against fake engines where it names some."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib.util
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvindex import Client, KVEventsConfig, replicas
from kvindex.testing import FakeEngine, HttpEngine
from tests.docs.pages import (
    DOCS,
    PAGES,
    README,
    ROOT,
    Fence,
    anchors,
    fences,
    fences_in,
    links,
    name_of,
)
from tests.docs.test_commands import commands
from tests.live import until
from tests.native_ring import MISSING, needs_ring
from tests.tools.commands import started

pytestmark = pytest.mark.e2e

WORKER = re.compile(
    r'Worker\("(\w+-0)", "tcp://127\.0\.0\.1:5557", replay="tcp://127\.0\.0\.1:5657", dp_size=2\)'
)
HTTP = "http://127.0.0.1:8000"
GATEWAY = "http://127.0.0.1:8080"  # where `kvindex gateway` listens by default
CLUSTER = ".svc.cluster.local"
PROMPT = list(range(100))
CLOSED = (Client, replicas.FanOut, replicas.Replica, HttpEngine, ExitStack)  # after a page
# Python has one spelling, so that no example is left out. What is not run has another test:
# shell commands (test_commands), the engines' JSON and YAML (below), or shows text.
LANGUAGES = {"python", "sh", "text", "yaml", "{toctree}", "{eval-rst}"}
INCLUDES = re.compile(r"\{literalinclude\} (\S+)")


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    ranks = [FakeEngine("vllm-0", dp_rank=rank) for rank in range(2)]
    for engine in ranks:  # as `kvindex fake-engine` does, which the pages tell their reader to run
        engine.serve(PROMPT[: len(PROMPT) // (engine.rank.dp_rank + 1)])
    yield ranks
    for engine in ranks:
        engine.close()


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What an example finds, and what it leaves for the next one; closed at the end."""
    names: dict[str, Any] = {"token_ids": PROMPT}
    yield names
    for thing in names.values():
        if isinstance(thing, CLOSED):
            thing.close()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_python_examples_of_a_page_run_and_print_what_it_says(
    page: Path,
    engines: list[FakeEngine],
    names: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", in_the_cluster(socket.getaddrinfo))
    left_out: set[str] = set()
    for fence, after in pairwise([*fences(page), Fence("", "", 0)]):
        if fence.language != "python":
            continue
        left_out |= not_installed(fence)
        if left_out:  # and what follows, which may use it
            continue
        capsys.readouterr()
        run(page, fence, engines, names)
        printed = capsys.readouterr().out
        if after.language == "text":
            assert equal(printed, after.text), f"{name_of(page)}:{after.line}: got {printed}"
    if left_out:
        pytest.skip(f"left out from the first example on that needs {', '.join(sorted(left_out))}")


def run(page: Path, fence: Fence, engines: list[FakeEngine], names: dict[str, Any]) -> None:
    live = [engine.endpoint for engine in engines]
    replay = [engine.replay_endpoint for engine in engines]
    example = WORKER.sub(rf'Worker("\1", {live}, replay={replay})', fence.text)
    if HTTP in example:
        served = names.setdefault("http server of the engines", None) or HttpEngine(engines)
        names["http server of the engines"] = served
        example = example.replace(HTTP, served.url).replace("tcp://127.0.0.1:5557", live[0])
    if GATEWAY in example:
        example = example.replace(GATEWAY, gateway(engines, names))
    # As many lines down as in the page, so that a traceback names the page's own line.
    exec(compile("\n" * (fence.line - 1) + example, str(page), "exec"), names)


def gateway(engines: list[FakeEngine], names: dict[str, Any]) -> str:
    """Start `kvindex gateway` in front of the engines; return its URL."""
    names["gateway of the engines"] = opened = ExitStack()
    served = opened.enter_context(HttpEngine(engines))
    process = opened.enter_context(started("gateway", "--port", "0", served.url))
    url = process.out.readline().split()[-1].removesuffix("/v1")
    assert any(served.url in line for line in process.out), "it has found the engine"
    return url


@needs_ring
def test_the_hooks_for_servers_join_and_leave(
    engines: list[FakeEngine], names: dict[str, Any]
) -> None:
    page = DOCS / "how-to" / "many-processes.md"
    examples = fences_in(page, "python")
    for fence in examples[: 1 + next(n for n, e in enumerate(examples) if "exit" in e.text)]:
        run(page, fence, engines, names)
    gunicorn = SimpleNamespace(pid=7)
    names["post_fork"](None, gunicorn)
    assert names["joined"][7].match(PROMPT).best.tokens == 96
    names["worker_exit"](None, gunicorn)
    assert not names["joined"]
    assert asyncio.run(asked_in(names["lifespan"])) == 96


async def asked_in(lifespan: Any) -> int:
    app = SimpleNamespace(state=SimpleNamespace())
    async with lifespan(app):
        tokens: int = app.state.replica.match(PROMPT).best.tokens
    return tokens


def not_installed(fence: Fence) -> set[str]:
    """Return the packages that an example imports and that are not here."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(fence.text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
            if node.module.startswith("kvindex.routing.adapters."):
                imported.add(node.module.split(".")[2].split("_")[0])
    missing = {name for name in imported if importlib.util.find_spec(name) is None}
    assert not missing & {"kvindex", *sys.stdlib_module_names}
    if MISSING and re.search(r"\b(fanout|kvindex\.shm)\b|\bserver\b", fence.text):
        missing.add(f"the ring ({MISSING})")
    return missing


def equal(printed: str, shown: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown, printed, flags)


def in_the_cluster(getaddrinfo: Any) -> Any:
    """Resolve a cluster's names to this machine, and all others as ever."""

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        inside = isinstance(host, str) and host.endswith(CLUSTER)
        return getaddrinfo("127.0.0.1" if inside else host, *args, **kwargs)

    return look_up


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_example_that_nobody_runs(page: Path) -> None:
    for fence in fences(page):
        if included := INCLUDES.match(fence.language):
            shown = (page.parent / included[1]).resolve()
            assert shown.parent == ROOT / "examples", (
                "tests/package/test_examples.py runs these only"
            )
            assert shown.exists()
        else:
            assert fence.language in LANGUAGES, f"{name_of(page)}:{fence.line}"


CONFIGURATION = re.compile(r"'(\{[^']*\"publisher\"[^']*\})'")


def configured() -> list[Any]:
    """Return what the pages have engines publish: JSON on command lines, and in manifests."""
    return [
        pytest.param(text, id=f"{name_of(page)}-{number}")
        for page in PAGES
        for number, text in enumerate(CONFIGURATION.findall(page.read_text()))
    ]


@pytest.mark.parametrize("text", configured())
def test_the_events_configurations_of_the_pages_are_valid(text: str) -> None:
    config = KVEventsConfig.from_cli(text)
    assert config.publisher == "zmq"
    assert config.endpoint == "tcp://*:5557"
    assert config.replay_endpoint == "tcp://*:5657"


def test_the_manifests_open_the_ports_that_the_engines_are_given() -> None:
    yaml = pytest.importorskip("yaml")
    manifests = [
        manifest
        for fence in fences(DOCS / "how-to" / "kubernetes.md")
        if fence.language == "yaml"
        for manifest in yaml.safe_load_all(fence.text)
    ]
    assert [manifest["kind"] for manifest in manifests] == [
        "Service",
        "StatefulSet",
        "NetworkPolicy",
    ]
    service, engines, policy = manifests
    ports = {"http": 8000, "kv-events": 5557, "kv-replay": 5657}
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    (container,) = engines["spec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
    assert engines["spec"]["serviceName"] == service["metadata"]["name"]
    labels = engines["spec"]["template"]["metadata"]["labels"]
    for chosen in (service["spec"]["selector"], policy["spec"]["podSelector"]["matchLabels"]):
        assert chosen == labels
    opened = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert opened == list(ports.values())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(("https:", "http:")):
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), link
        if anchor:
            assert anchor in anchors(linked), link


def test_the_readme_example_finds_the_rank_that_holds_the_prompt(
    engines: list[FakeEngine], names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(README, fences_in(README, "python")[0], engines, names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "vllm-0/0 96 True"
    assert "vllm-0/0: 96 of 100 tokens: every whole block of the prompt is resident" in printed


def test_the_readme_and_the_command_line_name_the_same_fake_engine() -> None:
    # Whoever copies the first example beside `kvindex fake-engine` must meet it.
    assert WORKER.search(fences_in(README, "python")[0].text)
    assert "kvindex fake-engine" in commands(README)


def test_the_router_of_the_quickstart_sends_nothing_to_a_dead_engine(
    engines: list[FakeEngine], names: dict[str, Any]
) -> None:
    page = DOCS / "quickstart.md"
    wanted = [fence for fence in fences_in(page, "python") if "client.close" not in fence.text]
    for fence in wanted:
        run(page, fence, engines, names)
    busy = Counter({engines[1].rank: 10_000})
    assert names["choose"](PROMPT, busy) == engines[0].rank
    for engine, left in ((engines[0], engines[1].rank), (engines[1], None)):
        engine.close()
        until(partial(names["client"].status, engine.rank), lambda now: now.state == "connecting")
        assert names["choose"](PROMPT, busy) == left


def test_no_line_installs_kvindex_by_a_name_that_is_on_no_index() -> None:
    """Whoever registers the name would get the machines; a checkout or a wheel has a path."""
    by_name = re.compile(r"pip install(?: -\S+)* '?kvindex\b(?! @ git)")
    files = [
        path
        for folder in ("docs", "deploy", "examples", "kvindex", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".md", ".py", ".service", ".yaml"} or path.name == "Containerfile"
    ]
    assert len(files) > 300
    found = [path for path in (README, *files) if by_name.search(path.read_text())]
    assert found == []
