"""Clients that are given engines by URL: they ask, subscribe, and follow what changes."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvindex import (
    Client,
    ClosedError,
    ConfigurationError,
    NotLiveError,
    Rank,
    UnknownRankError,
    Worker,
    connect,
)
from kvindex.subscribe.discovery import (
    Discovery,
    DiscoveryOptions,
    Engine,
    EngineSource,
    Target,
    ask_engine,
)
from kvindex.testing import FakeEngine, HttpEngine, HttpOptions
from kvindex.tools.cli import main
from tests.canned import CannedServer
from tests.children import in_child
from tests.live import PATIENCE, REPLAYS, resident, truth, until
from tests.tools.doctor.doctored import unused

pytestmark = pytest.mark.e2e

PROMPT = list(range(64))
OFTEN = DiscoveryOptions(interval=0.05, timeout=PATIENCE)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        engine.serve(PROMPT)
        yield engine


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[HttpEngine]:
    with HttpEngine(engine) as server:
        yield server


def name_of(server: HttpEngine | CannedServer) -> str:
    return server.url.removeprefix("http://")


def sources_of(*engines: FakeEngine) -> dict[str, Any]:
    return {
        str(engine.rank.dp_rank): {
            "endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
        }
        for engine in engines
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vllm", HttpOptions()),
        ("vllm", HttpOptions(sources="list")),
        ("vllm", HttpOptions(sources="sources")),
        ("sglang", HttpOptions()),
    ],
)
def test_a_url_is_all_that_a_client_needs(
    engine: FakeEngine, kind: Any, options: HttpOptions
) -> None:
    with HttpEngine(engine, kind=kind, options=options) as server, connect(server.url) as client:
        client.wait_live(PATIENCE)
        assert client.ranks == (Rank(name_of(server), 0),)
        best = client.match(PROMPT).best
        assert best is not None
        assert best.tokens == engine.lookup(PROMPT).tokens
        shown = client.statistics()["discovery"]["engines"][name_of(server)]
        assert (shown["ranks"], shown["is_added"], shown["model"]) == (1, True, "fake-model")


def test_the_reports_of_added_engines_are_shown_until_they_differ(engine: FakeEngine) -> None:
    options = HttpOptions(version="0.33.0", loras=("sql",))
    with (
        HttpEngine(engine, options=options) as server,
        connect([server.url, Worker("other", "tcp://127.0.0.1:1")], discovery=OFTEN) as client,
    ):
        discovery = client.discovery
        assert discovery is not None
        client.wait_live(PATIENCE, ranks=[name_of(server)])
        shown = discovery.engines()
        report = shown[name_of(server)]
        assert (report.url, report.kind, report.version) == (server.url, "vllm", "0.33.0")
        assert report.models == ("fake-model", "sql")
        assert (report.adapters, report.first_rank) == (("sql",), 0)
        asked = discovery.statistics()["counters"]["asked"]
        until(lambda: discovery.statistics()["counters"]["asked"] > asked + 2)
        assert discovery.engines() is shown
        client.remove(name_of(server))
    with HttpEngine(engine, options=HttpOptions(version="0.34.0")) as server:
        with Discovery(EngineSource(server.url), id, id, OFTEN) as alone:
            until(lambda: [each.version for each in alone.engines().values()] == ["0.34.0"])


def test_urls_and_workers_may_be_mixed_and_the_index_follows_what_a_found_engine_serves(
    engine: FakeEngine, server: HttpEngine, other: FakeEngine
) -> None:
    worker = Worker("other", other.endpoint, replay=other.replay_endpoint)
    with connect([server.url, worker], replay_policy=REPLAYS) as client:
        client.wait_live(PATIENCE)
        assert {rank.worker for rank in client.ranks} == {"other", name_of(server)}
        asyncio.run(client.wait_live_async(PATIENCE))
        engine.serve(PROMPT[::-1])
        rank, last = Rank(name_of(server), 0), engine.published - 1
        until(client.statuses, lambda statuses: statuses[rank].seq == last)
        assert resident(client, rank) == truth(engine)
        for prompt in (PROMPT, PROMPT[::-1]):
            assert client.match(prompt)[rank].tokens == engine.lookup(prompt).tokens


def test_an_engine_that_does_not_answer_is_named_with_the_reason() -> None:
    with unused("http") as url, connect(url) as client:
        until(lambda: "nothing listens there" in missing(client).get(url, ""))
        with pytest.raises(NotLiveError) as caught:
            client.wait_live(0.01)
        assert set(caught.value.engines) == {url}
        assert "nothing listens there" in str(caught.value)
        assert "1 engine is not found after 0.01 s" in str(caught.value)
        with pytest.raises(NotLiveError, match="nothing listens there"):
            asyncio.run(client.wait_live_async(0.01))


def test_an_engine_that_starts_later_is_found(engine: FakeEngine) -> None:
    with CannedServer() as server, connect(server.url, discovery=OFTEN) as client:
        with pytest.raises(NotLiveError):
            client.wait_live(0.1)
        server.replies["/kv_event_sources"] = (200, sources_of(engine))
        client.wait_live(PATIENCE)


def test_an_engine_that_grows_and_moves_is_followed(engine: FakeEngine) -> None:
    with (
        FakeEngine() as moved,
        FakeEngine(dp_rank=1) as second,
        CannedServer({"/kv_event_sources": (200, sources_of(engine))}) as server,
        connect(server.url, discovery=OFTEN, replay_policy=REPLAYS) as client,
    ):
        for other in (moved, second):
            other.serve(PROMPT[:32])
        first, later = (Rank(name_of(server), dp_rank) for dp_rank in (0, 1))
        client.wait_live(PATIENCE)
        server.replies["/kv_event_sources"] = (200, sources_of(engine, second))
        until(client.statuses, lambda ranks: len(ranks) == 2)
        client.wait_live(PATIENCE)
        for rank, fake in ((first, engine), (later, second)):
            assert client.match(PROMPT)[rank].tokens == fake.lookup(PROMPT).tokens
        server.replies["/kv_event_sources"] = (200, sources_of(moved))
        until(
            lambda: (
                client.statistics()["discovery"]["counters"]["moved"] == 2
                and client.ranks == (first,)
            )
        )
        client.wait_live(PATIENCE)
        assert client.match(PROMPT)[first].tokens == moved.lookup(PROMPT).tokens


def test_an_engine_that_hangs_up_is_asked_at_once_where_it_is_now(engine: FakeEngine) -> None:
    seldom = DiscoveryOptions(interval=3600.0, timeout=PATIENCE)
    with CannedServer({"/kv_event_sources": (200, sources_of(engine))}) as server:
        with connect(server.url, discovery=seldom, replay_policy=REPLAYS) as client:
            client.wait_live(PATIENCE)
            with FakeEngine() as again:
                again.serve(PROMPT[:32])
                server.replies["/kv_event_sources"] = (200, sources_of(again))
                engine.close()
                rank = Rank(name_of(server), 0)
                until(lambda: rank in (match := client.match(PROMPT)) and match[rank].tokens == 32)


def missing(client: Client) -> dict[str, str]:
    assert client.discovery is not None
    return client.discovery.missing()


@pytest.mark.parametrize("dropped", [True, False])
def test_a_client_that_is_closed_or_dropped_ends_its_discovery(
    server: HttpEngine, dropped: bool
) -> None:
    before = set(threading.enumerate())
    client = connect(server.url, discovery=OFTEN)
    client.wait_live(PATIENCE)
    discovery = client.discovery
    assert discovery is not None
    started = {t for t in set(threading.enumerate()) - before if t.name.startswith("kvindex")}
    assert started > set(discovery._threads)
    if dropped:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del client
            gc.collect()
    else:
        client.close()
        client.close()
        with pytest.raises(ClosedError):
            client.wait_live(1.0)
    for thread in started:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert discovery.is_closed


def test_a_forked_child_has_a_closed_discovery(engine: FakeEngine, server: HttpEngine) -> None:
    with connect(server.url) as client:
        client.wait_live(PATIENCE)

        def child() -> None:
            discovery = client.discovery
            assert discovery is not None
            assert discovery.is_closed
            assert discovery.statistics()["engines"]
            client.close()

        assert in_child(child) == 0
        engine.serve(PROMPT[::-1])
        client.wait_live(PATIENCE)


def test_a_callback_that_fails_stops_nothing(server: HttpEngine, caplog: Any) -> None:
    calls: list[str] = []
    second = threading.Event()

    def add(engine: Engine) -> None:
        calls.append(engine.worker.name)
        if len(calls) == 1:
            raise RuntimeError("the consumer is broken")
        second.set()

    with Discovery(EngineSource(server.url), add, print, OFTEN) as discovery:
        assert second.wait(PATIENCE)
        until(lambda: discovery.missing() == {})
    assert "the consumer is broken" in caplog.text


def test_an_engine_whose_answer_breaks_its_reader_is_asked_again(
    server: HttpEngine, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    answers = iter([RuntimeError("nobody thought of this"), RuntimeError("nor of this")])

    def ask(url: str, **options: Any) -> Any:
        for error in answers:
            raise error
        return ask_engine(url, **options)

    monkeypatch.setattr("kvindex.subscribe.discovery.discovery.ask_engine", ask)
    with Discovery(EngineSource(server.url), print, print, OFTEN) as discovery:
        until(lambda: discovery.missing() == {})
    assert "nobody thought of this" in caplog.text


def test_a_source_that_fails_is_called_again() -> None:
    class Flaky:
        name = "flaky"
        is_certain = True

        def __init__(self) -> None:
            self.calls = 0
            self.closed = threading.Event()

        def watch(self, tell: Callable[[list[Target]], None]) -> None:
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("not yet")
            tell([Target("a", worker=Worker("a", "tcp://127.0.0.1:5557"))])
            self.closed.wait()

        def close(self) -> None:
            self.closed.set()

    added: list[Engine] = []
    with Discovery(Flaky(), added.append, print) as discovery:
        until(lambda: discovery.missing() == {})
        assert discovery.statistics()["sources"]["flaky"]["failures"] == 1
    assert [engine.worker.name for engine in added] == ["a"]


@pytest.mark.parametrize("given", ["engine:8000", "http://", 7, [7], ["http://a:1", "http://a:1"]])
def test_what_is_no_engine_is_refused_at_once(given: Any) -> None:
    with pytest.raises(ConfigurationError):
        connect(given)


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="interval"):
        DiscoveryOptions(interval=0)
    with pytest.raises(ConfigurationError, match="two sources"):
        Discovery([EngineSource("http://a:1"), EngineSource("http://a:1")], print, print)
    with pytest.raises(ConfigurationError, match="no source"):
        Discovery(["http://a:1"], print, print)  # type: ignore[list-item]


@pytest.mark.parametrize("command", ["tail", "match", "record"])
def test_commands_take_the_url_of_an_engine(
    server: HttpEngine, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_text(str(PROMPT))
    arguments = {
        "tail": ["tail", "--limit", "1"],
        "match": ["match", str(tmp_path / "tokens")],
        "record": ["record", str(tmp_path / "recording"), "--seconds", "0.01", "--replay"],
    }[command]
    assert main([*arguments, "--engine", server.url]) == 0
    assert name_of(server) in "".join(capsys.readouterr()) + str(list(tmp_path.iterdir()))


def test_commands_say_why_an_engine_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_text("1 2 3")
    with unused("http") as url:
        assert main(["tail", "--engine", url]) == 1
        assert "nothing listens there" in capsys.readouterr().err
        arguments = ["match", str(tmp_path / "tokens"), "--engine", url, "--wait", "0.1"]
        assert main([*arguments, "--json"]) == 1
    assert url in json.loads(capsys.readouterr().out)["not_live"]


def test_a_dead_engine_does_not_hold_up_whoever_waits_for_another(server: HttpEngine) -> None:
    with unused("http") as dead, connect([dead, server.url]) as client:
        rank = Rank(name_of(server), 0)
        until(client.statuses, lambda statuses: rank in statuses)
        assert client.discovery is not None

        def wait() -> None:
            client.wait_live(3600.0, ranks=[rank])
            asyncio.run(client.wait_live_async(3600.0, ranks=rank.worker))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        assert set(client.discovery.missing()) == {dead}
        with pytest.raises(UnknownRankError):
            client.wait_live(0.1, ranks=["nobody"])
