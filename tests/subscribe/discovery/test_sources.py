"""What files and names tell of engines."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvindex import ConfigurationError, Worker
from kvindex.subscribe.discovery import (
    DiscoveryError,
    DnsSource,
    EngineSource,
    FileSource,
    Target,
    read_targets,
    split_engines,
)
from tests.subscribe.discovery.watched import Watched

pytestmark = pytest.mark.unit


# Files ----------------------------------------------------------------------------------------

TOML = """
engines = ["http://vllm-2:8000"]
listen = "somebody else's"

[[workers]]
name = "vllm-0"
endpoint = "tcp://vllm-0:5557"
replay = "tcp://vllm-0:5657"
dp_size = 2
model = "llama"
labels = {zone = "a"}

[[workers]]
name = "vllm-1"
endpoint = {0 = "tcp://h0:5557", 1 = "tcp://h1:5558"}
routing_group = "batch"
cache = {eagle = true}
"""


def engines_file(folder: Path) -> Path:
    path = folder / "engines.json"
    path.write_text('["http://a:1"]')
    return path


def replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def test_a_toml_file_lists_workers_and_engines(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    path = tmp_path / "engines.toml"
    path.write_text(TOML)
    first, second, third = FileSource(path).read()
    assert first.worker == Worker(
        "vllm-0", "tcp://vllm-0:5557", replay="tcp://vllm-0:5657", dp_size=2
    )
    assert (first.model, first.routing_group, first.labels) == ("llama", "default", {"zone": "a"})
    assert second.worker is not None
    assert [a.endpoint for a in second.worker.publishers()] == ["tcp://h0:5557", "tcp://h1:5558"]
    assert (second.routing_group, second.worker.cache.eagle) == ("batch", True)
    assert (third.name, third.url, third.worker) == ("vllm-2:8000", "http://vllm-2:8000", None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("e.json", '[{"name": "a", "endpoint": "tcp://a:1"}, "http://b:8000/"]'),
        ("e.json", '{"workers": [{"name": "a", "endpoint": "tcp://a:1"}], "engines": [{"url": '
         '"http://b:8000"}]}'),
        ("e.ndjson", '{"name": "a", "endpoint": "tcp://a:1"}\n\n"http://b:8000"\n'),
        ("e.jsonl", '{"name": "a", "endpoint": "tcp://a:1"}\n{"url": "http://b:8000"}'),
    ],
)  # fmt: skip
def test_json_says_the_same(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    first, second = FileSource(path).read()
    assert (first.name, first.url) == ("a", "")
    assert (second.name, second.url) == ("b:8000", "http://b:8000")


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (
            [{"name": "a", "endpoint": "tcp://a:1", "dpsize": 2}],
            "entry 1: .* key `dpsize`",
        ),
        ([{"name": "a"}], "either `url`, to ask the engine, or `endpoint`"),
        ([{"url": "http://a:1", "endpoint": "tcp://a:1"}], "either"),
        ([{"endpoint": "tcp://a:1"}], "name must be"),
        ([{"name": "a", "endpoint": "tcp://*:1"}], "nobody can connect"),
        ([{"name": "a", "endpoint": {"one": "tcp://a:1"}}], "not all numbers"),
        (["a:8000"], "is no URL"),
        ([7], "entry 1"),
        (["http://a:1", "http://a:1/"], "two engines are called 'a:1'"),
        ({"worker": []}, "neither `workers` nor `engines`"),
        ({"workers": {}}, "must be lists"),
        ({"prefill": "http://a:1"}, "`prefill` must be lists"),
        ({"prefill": ["http://a:1"], "decode": ["http://a:1"]}, "two engines are called 'a:1'"),
    ],
)
def test_an_entry_that_cannot_be_understood_is_named(listed: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        read_targets(listed)


def test_roles_come_from_lists_and_from_labels() -> None:
    listed = read_targets(
        {
            "engines": ["http://a:1"],
            "prefill": ["http://b:1", {"url": "http://c:1", "labels": {"zone": "z"}}],
            "decode": [{"url": "http://d:1"}],
        }
    )
    assert [target.role for target in listed] == ["", "prefill", "prefill", "decode"]
    assert listed[2].labels["zone"] == "z"
    source = EngineSource(["http://a:1"], prefill=["http://b:1"], decode=["http://c:1"])
    assert [target.role for target in source.targets] == ["", "prefill", "decode"]
    assert EngineSource(decode=["http://c:1"]).name == "engine http://c:1"
    with pytest.raises(ConfigurationError, match="a:1 is given twice"):
        EngineSource("http://a:1", prefill=["http://a:1"])


@pytest.mark.parametrize(
    ("label", "role"),
    [("prefill", "prefill"), ("decode", "decode"), ("both", ""), ("prefill-decode", ""), ("", "")],
)
def test_a_pods_label_says_its_role(label: str, role: str) -> None:
    assert Target("a", "http://a:1", labels={"llm-d.ai/role": label}).role == role


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = engines_file(tmp_path)
    with Watched(FileSource(path, interval=0.01)) as watched:
        assert watched.names() == ["a:1"]
        replace(path, '["http://a:1", "http://b:2"]')
        assert watched.names() == ["a:1", "b:2"]
        replace(path, '["http://a:1", ')
        error = watched.error()
        assert error.reason == "content"
        assert "engines.json cannot be understood" in str(error)


def test_a_file_that_is_being_written_is_believed_once_it_stays_the_same(tmp_path: Path) -> None:
    # What each look finds, a quarter of a second after the one before: its state and its text.
    whole = '["http://a:1", "http://b:2"]'
    looks = iter([*[("A", whole)] * 2, *[("B", "[]")] * 4, *[("C", '["http://a:1"]')] * 4])
    now = ("", "")
    quarters = itertools.count()

    class Written(FileSource):
        def _clock(self) -> float:
            return next(quarters) / 4

        def _look(self) -> Any:
            nonlocal now
            now = next(looks, ("D", '["http://a:1", "http://c:3"]'))
            self.path.write_text(now[1])
            return now[0]

    with Watched(Written(tmp_path / "engines.json", interval=1e-9)) as watched:
        assert watched.names() == ["a:1", "b:2"]
        assert watched.names() == ["a:1", "c:3"]


def test_what_was_read_while_the_file_changed_is_not_believed(tmp_path: Path) -> None:
    class Written(FileSource):
        def read(self) -> tuple[Target, ...]:
            targets = super().read()
            if len(targets) == 1:
                self.path.write_text('["http://a:1", "http://b:2"]')
            return targets

    path = engines_file(tmp_path)
    with Watched(Written(path, interval=1e-9)) as watched:
        assert watched.names() == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        *((name, "\n", "it is empty") for name in ("e.json", "e.ndjson", "e.jsonl", "e.toml")),
        ("e.json", "7", "cannot be understood"),
        ("e.json", "\xff", "cannot be understood"),
        ("e.ndjson", "{", "cannot be understood"),
        ("e.json", "[" * 9999, "cannot be understood"),
    ],
    ids=lambda value: value[:9],
)
def test_an_empty_file_and_one_with_nonsense_are_refused(
    tmp_path: Path, name: str, text: str, why: str
) -> None:
    pytest.importorskip("tomllib")
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DiscoveryError, match=why):
        FileSource(path).read()


def test_a_file_that_is_there_and_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = engines_file(tmp_path)
    source = FileSource(path, interval=0.01)

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", denied)
        with pytest.raises(DiscoveryError, match="cannot be read"):
            source.watch(lambda targets: None)
    with Watched(source) as watched:
        assert watched.names() == ["a:1"]


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    with Watched(FileSource(tmp_path / "engines.json")) as watched:
        assert "No such file" in str(watched.error())


def test_a_file_of_another_form_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\.toml, \.json"):
        FileSource("engines.yaml")
    with pytest.raises(ConfigurationError, match="interval"):
        FileSource("engines.json", interval=0)


# Names ----------------------------------------------------------------------------------------


def test_each_address_of_a_name_is_an_engine() -> None:
    answers = iter([["10.0.0.2", "10.0.0.1", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["fd00::1"]])

    def look_up(host: str) -> list[str]:
        assert host == "vllm"
        answer = next(answers, None)
        if answer is None:
            raise socket.gaierror("no answer")
        return answer

    with Watched(DnsSource("http://vllm:8000", interval=0.01, look_up=look_up)) as watched:
        assert [(t.name, t.url) for t in watched.targets()] == [
            ("10.0.0.1", "http://10.0.0.1:8000"),
            ("10.0.0.2", "http://10.0.0.2:8000"),
        ]
        assert [(t.name, t.url) for t in watched.targets()] == [
            ("fd00::1", "http://[fd00::1]:8000")
        ]
        assert watched.error().reason == "name"


def test_engines_behind_a_name_that_cannot_be_asked_publish_where_it_says() -> None:
    source = DnsSource(
        "tcp://vllm:5557", replay_port=5657, dp_size=2, look_up=lambda host: ["fd00::1"]
    )
    with Watched(source) as watched:
        (target,) = watched.targets()
    assert target.url == ""
    assert target.worker is not None
    assert target.worker.publishers()[1].endpoint == "tcp://[fd00::1]:5558"
    assert target.worker.publishers()[1].replay == "tcp://[fd00::1]:5658"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("vllm", {}),
        ("tcp://vllm", {}),
        ("tcp://vllm:5557/path", {}),
        ("tcp://vllm:65535", {"dp_size": 2}),
        ("tcp://vllm:5557", {"replay_port": 5558, "dp_size": 2}),
        ("http://vllm:8000", {"interval": 0}),
    ],
)
def test_a_name_that_cannot_work_is_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        DnsSource(url, **options)


def test_what_a_caller_gives_is_told_apart() -> None:
    worker = Worker("a", "tcp://a:1")
    assert split_engines(worker) == (worker, [])
    assert split_engines([]) == ([], [])
    workers, sources = split_engines([worker, "http://b:1", FileSource("c.json"), "HTTPS://d:1"])
    assert workers == [worker]
    assert [source.name for source in sources] == ["engines http://b:1 and 1 more", "file c.json"]
