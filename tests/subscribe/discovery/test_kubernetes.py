"""Pods that come, go, move and scale behind an API server that has faults; the index follows."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvindex import ConfigurationError, NotLiveError, Rank, connect
from kvindex.subscribe.discovery import (
    DiscoveryError,
    DiscoveryOptions,
    KubernetesSource,
    ask_engine,
    kubernetes,
)
from kvindex.subscribe.discovery.kubernetes import (
    KubeApi,
    Pod,
    PodRules,
    pod_of,
    pool_of,
    rules_of,
    targets_of,
)
from kvindex.testing import FakeEngine, HttpEngine
from tests.kube import LLM, NAMESPACE, POOL, KubeServer, pod
from tests.live import PATIENCE, REPLAYS, until
from tests.subscribe.discovery.watched import Watched
from tests.tools.doctor.doctored import unused

pytestmark = pytest.mark.e2e

PROMPT = list(range(64))


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with KubeServer() as server:
        yield server


def source_of(kube: KubeServer, **options: Any) -> KubernetesSource:
    options = {"selector": "app=vllm", **options}
    source = KubernetesSource(namespace=NAMESPACE, kube_url=kube.url, **options)
    source._pause = 0.01
    return source


@pytest.fixture
def watched(kube: KubeServer) -> Iterator[Watched]:
    """A watch that has brought one pod, "a" at port 1."""
    kube.put(pod("a", 1))
    with Watched(source_of(kube)) as watched:
        assert watched.ports() == ["1"]
        kube.wait_watched(1, PATIENCE)
        yield watched


def test_pods_come_and_go_without_a_further_list(kube: KubeServer, watched: Watched) -> None:
    kube.put(pod("other", 9, labels={"app": "web"}), pod("b", 2))
    assert watched.ports() == ["1", "2"]
    kube.delete("a")
    assert watched.ports() == ["2"]
    assert kube.lists == 1


def test_a_long_list_comes_in_pages() -> None:
    with KubeServer(page=2) as kube:
        kube.put(*(pod(f"p{number}", number + 1) for number in range(5)))
        with Watched(source_of(kube)) as watched:
            assert watched.ports() == ["1", "2", "3", "4", "5"]
        assert kube.lists == 3


def test_a_pod_comes_when_it_is_ready_and_goes_when_it_ends(kube: KubeServer) -> None:
    kube.put(pod("a", 1, ready=False), pod("b", 2, ip=""))
    with Watched(source_of(kube)) as watched:
        assert watched.ports() == []
        kube.put(pod("a", 1))
        assert watched.ports() == ["1"]
        kube.put(pod("a", 1, ready=False))  # for a while: its cache lives on
        kube.put(pod("b", 2))
        assert watched.ports() == ["1", "2"]
        ending = pod("a", 1)
        ending["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
        kube.put(ending)
        assert watched.ports() == ["2"]
        kube.put(pod("b", 2, phase="Failed"))
        assert watched.ports() == []


def test_a_pod_that_comes_back_under_its_name_is_another_one(
    kube: KubeServer, watched: Watched
) -> None:
    kube.delete("a")
    assert watched.ports() == []
    kube.put(pod("a", 1, uid="second", ready=False))
    kube.put(pod("a", 1, uid="second"))
    assert watched.ports() == ["1"]
    kube.put(pod("a", 1, uid="second", ip="127.0.0.9", ready=False))  # not ready yet there
    assert watched.ports() == []
    kube.put(pod("a", 1, uid="second", ip="127.0.0.9"))
    assert [(t.url, t.version) for t in watched.targets()] == [("http://127.0.0.9:1", "second")]


def test_a_watch_that_breaks_goes_on_behind_its_last_event_or_bookmark(
    kube: KubeServer, watched: Watched
) -> None:
    kube.bookmark()
    kube.put(pod("b", 2))
    watched.targets()
    reached = kube._version
    kube.drop()
    kube.wait_watched(2, PATIENCE)
    assert kube.watches[1] == reached
    kube.put(pod("web", 9, labels={"app": "web"}))  # of others: no event has its version
    kube.bookmark()
    kube.put(pod("c", 3))
    assert watched.ports() == ["1", "2", "3"]
    kube.drop()
    kube.wait_watched(3, PATIENCE)
    assert kube.watches[2] == kube._version
    assert kube.lists == 1


@pytest.mark.parametrize("as_event", [True, False])
def test_a_version_that_is_too_old_is_answered_by_a_new_list(
    kube: KubeServer, watched: Watched, as_event: bool
) -> None:
    kube.gone_as_event = as_event
    kube.put(pod("b", 2))
    assert watched.ports() == ["1", "2"]
    with kube._changed:
        del kube.pods["a"]  # while nobody looks
    kube.compact()
    kube.drop()
    assert watched.names(despite="unreachable") == ["b"]
    assert kube.lists >= 2


def test_a_server_that_dribbles_and_one_that_sends_nonsense_are_borne(
    kube: KubeServer, watched: Watched
) -> None:
    kube.is_slow = True
    kube.put(pod("b", 2))
    assert watched.ports() == ["1", "2"]
    kube.replies[f"/api/v1/namespaces/{NAMESPACE}/pods"] = (200, b"<html>")
    kube.drop()
    while watched.error().reason != "content":
        pass  # the watch broke first


def test_an_account_without_rights_is_told_what_it_lacks(kube: KubeServer) -> None:
    kube.replies[f"/api/v1/namespaces/{NAMESPACE}/pods"] = (403, {"message": "pods is forbidden"})
    with Watched(source_of(kube)) as watched:
        error = watched.error()
        assert error.reason == "denied"
        assert "pods is forbidden" in str(error)
        assert "needs get, list and watch" in str(error)


def test_a_token_that_is_renewed_is_read_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    with KubeServer(token="old") as kube:
        kube.put(pod("a", 1))
        with Watched(source_of(kube, token=token)) as watched:
            assert watched.ports() == ["1"]
            kube.wait_watched(1, PATIENCE)
            kube.token = "new"
            token.write_text("new\n")
            kube.bookmark()
            kube.drop()
            kube.wait_watched(2, PATIENCE)
            kube.put(pod("b", 2))
            assert watched.names(despite="unreachable") == ["a", "b"]


CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
OPENSSL = ["openssl", "req", "-x509", *CURVE, "-nodes", "-days", "1"]


@pytest.fixture
def certified(tmp_path: Path) -> ssl.SSLContext:
    """TLS of a server at 127.0.0.1, whose certificate is where a pod has its cluster's."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    names = ["-subj", "/CN=kube", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*OPENSSL, "-keyout", key, "-out", certificate, *names], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def test_a_pod_watches_its_own_cluster_over_tls(
    certified: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of the account")
    (tmp_path / "namespace").write_text(NAMESPACE)
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT", tmp_path)
    with KubeServer(token="of the account", tls=certified) as kube:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", kube.url.rpartition(":")[2])
        kube.put(pod("a", 1))
        with Watched(KubernetesSource("app=vllm")) as watched:
            assert watched.source.name == "pods app=vllm in llm"
            assert watched.ports() == ["1"]
            kube.put(pod("b", 2))
            assert watched.ports() == ["1", "2"]
        # A server that somebody else signed is not spoken to.
        with Watched(KubernetesSource("app=vllm", kube_url=kube.url, token="/dev/null")) as watched:
            assert watched.error().reason == "tls"
        with pytest.raises(DiscoveryError, match="certificate that is not trusted"):
            ask_engine(kube.url)
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        with pytest.raises(DiscoveryError, match="answers 404"):
            ask_engine(kube.url, context=trusting)


def test_a_pod_finds_its_own_cluster(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ConfigurationError, match="runs in no Kubernetes cluster"):
        KubernetesSource("app=vllm")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    (tmp_path / "namespace").write_text("llm")
    with pytest.raises(ConfigurationError, match="is no certificate"):
        KubeApi(account=tmp_path)


def test_a_pool_has_its_selector_and_its_ports(kube: KubeServer) -> None:
    def pool(**labels: str) -> Any:
        ports = [{"number": 8000}, {"number": 8001}]
        return 200, {"spec": {"selector": {"matchLabels": labels}, "targetPorts": ports}}

    kube.replies[POOL] = pool(**LLM)
    kube.put(pod("a", 1), pod("b", 1, labels={"app": "other"}))
    with Watched(source_of(kube, selector="", pool="llama")) as watched:
        report = watched.targets()
        assert [(t.name, t.url) for t in report] == [
            ("a:8000", "http://127.0.0.1:8000"),
            ("a:8001", "http://127.0.0.1:8001"),
        ]
        # One rank in each, where the ports of an engine with two ranks would be.
        workers = [t.worker for t in report if t.worker is not None]
        assert [w.publishers()[0].endpoint for w in workers] == [
            "tcp://127.0.0.1:5557",
            "tcp://127.0.0.1:5558",
        ]
        kube.wait_watched(1, PATIENCE)
        kube.replies[POOL] = pool(app="other")
        kube.bookmark()
        kube.drop()
        assert watched.names(despite="unreachable") == ["b:8000", "b:8001"]


def test_a_pool_that_is_missing_is_named(kube: KubeServer) -> None:
    with Watched(source_of(kube, selector="", pool="llama")) as watched:
        assert "inferencepools/llama answers 404" in str(watched.error())


@pytest.mark.parametrize(
    "options",
    [
        {"selector": ""},
        {"selector": "a=b", "pool": "p"},
        {"selector": "", "pool": "../secrets"},
        {"preset": "unknown"},
        {"preset": "aibrix", "dp_size": 2},
        {"events_port": 70_000},
        {"port": 0},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        KubernetesSource(**{"selector": "app=vllm", "kube_url": "http://127.0.0.1:1", **options})


def test_closing_ends_a_watch_at_once(watched: Watched) -> None:
    watched.close()
    assert watched.reports.empty()


# What is read of a pod --------------------------------------------------------------------------


def test_what_matters_of_a_pod_is_read() -> None:
    assert pod_of(pod("a", 8000, uid="u")) == Pod(
        "a", "u", "127.0.0.1", True, False, {"http": 8000}, {"app": "vllm"}
    )


@pytest.mark.parametrize(
    ("read", "listed", "why"),
    [
        (pod_of, None, "has no name"),
        (pod_of, [], "has no name"),
        (pod_of, {}, "has no name"),
        (pod_of, {"metadata": {"name": 7}}, "has no name"),
        (pod_of, {"metadata": []}, "has no name"),
        (pool_of, None, "matchLabels"),
        (pool_of, {}, "matchLabels"),
        (pool_of, {"spec": {"selector": {"matchLabels": {"a": 1}}}}, "matchLabels"),
    ],
)
def test_what_is_no_pod_or_pool_is_refused(
    read: Callable[[Any], object], listed: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        read(listed)


def test_a_pod_with_odd_parts_is_borne() -> None:
    odd = {
        "metadata": {"name": "a", "labels": {"x": 1}},
        "spec": {"containers": [7, {"ports": "x"}, {"ports": [{"containerPort": 99_999}]}]},
        "status": {"conditions": ["Ready"], "podIP": 7},
    }
    assert pod_of(odd) == Pod("a")


def test_a_pod_is_asked_at_its_label_or_its_container_port_or_8000() -> None:
    def url(rules: PodRules, **options: Any) -> str:
        (target,) = targets_of(Pod("a", address="10.0.0.1", **options), rules)
        return target.url

    assert url(PodRules()) == "http://10.0.0.1:8000"
    assert url(PodRules(), ports={"http": 8080}) == "http://10.0.0.1:8080"
    aibrix = rules_of("aibrix")[1]
    assert url(aibrix, labels={"model.aibrix.ai/port": "9000"}) == "http://10.0.0.1:9000"
    assert url(aibrix, labels={"model.aibrix.ai/port": "many"}) == "http://10.0.0.1:8000"


def test_presets_know_the_ports_of_their_systems() -> None:
    for name, replay in [("llm-d", None), ("aibrix", "tcp://[fd00::1]:5558")]:
        _, rules = rules_of(name)
        labels = {rules.model_label: "llama"}
        (target,) = targets_of(Pod("a", address="fd00::1", labels=labels), rules)
        assert (target.url, target.model) == ("http://[fd00::1]:8000", "llama")
        assert target.worker is not None
        (address,) = target.worker.publishers()
        assert (address.endpoint, address.replay) == ("tcp://[fd00::1]:5557", replay)


# The whole way: pods, engines, index ----------------------------------------------------------


class Pods:
    """Engines in pods."""

    def __init__(self, kube: KubeServer) -> None:
        self.kube = kube
        self.engines: dict[str, list[FakeEngine]] = {}
        self.servers: dict[str, HttpEngine] = {}

    def start(self, name: str, *, ranks: int = 1) -> None:
        """Start an engine (another one, if it has run) and tell of its pod."""
        self.stop(name)
        engines = [FakeEngine(name, dp_rank=rank) for rank in range(ranks)]
        for engine in engines:
            engine.serve(PROMPT)
        self.engines[name] = engines
        self.servers[name] = HttpEngine(engines, model="llama")
        self.tell(name)

    def tell(self, name: str) -> None:
        port = int(self.servers[name].url.rpartition(":")[2])
        self.kube.put(pod(name, port))

    def stop(self, name: str) -> None:
        if server := self.servers.pop(name, None):
            server.close()
        for engine in self.engines.pop(name, []):
            engine.close()


@pytest.fixture
def pods(kube: KubeServer) -> Iterator[Pods]:
    pods = Pods(kube)
    yield pods
    for name in list(pods.servers):
        pods.stop(name)


def test_the_index_follows_pods_that_come_move_scale_and_go(pods: Pods) -> None:
    kube = pods.kube
    pods.start("a")
    pods.start("b", ranks=2)
    source = source_of(kube)
    often = DiscoveryOptions(interval=0.1, timeout=PATIENCE)
    with connect(source, discovery=often, replay_policy=REPLAYS) as client:
        client.wait_live(PATIENCE)
        assert_follows(client, pods)
        assert client.statistics()["discovery"]["engines"]["b"]["model"] == "llama"

        pods.start("c")  # comes
        wait_ranks(client, "a/0 b/0 b/1 c/0")
        assert_follows(client, pods)

        pods.start("a")  # moves: another process at other ports
        until(lambda: client.statistics()["discovery"]["counters"]["moved"] == 1)
        assert_follows(client, pods)

        pods.engines["a"].append(grown := FakeEngine("a", dp_rank=1))  # scales
        grown.serve(PROMPT[:32])
        pods.servers["a"].close()
        pods.servers["a"] = HttpEngine(pods.engines["a"], model="llama")
        pods.tell("a")
        wait_ranks(client, "a/0 a/1 b/0 b/1 c/0")
        assert_follows(client, pods)
        assert client.status("a/0").epoch == 0

        kube.delete("b")  # goes
        wait_ranks(client, "a/0 a/1 c/0")
        assert client.match(PROMPT).best is not None

        kube.close()  # the API server is gone: nobody is taken away
        until(lambda: "nothing listens" in str(client.statistics()["discovery"]["sources"]))
        assert len(client.ranks) == 3
        assert_follows(client, pods, but="b")


def test_pods_without_a_way_to_ask_are_taken_to_publish_where_engines_do(pods: Pods) -> None:
    with FakeEngine("old") as engine:
        engine.serve(PROMPT)
        port = int(engine.endpoint.rpartition(":")[2])
        assert engine.replay_endpoint is not None
        replay = int(engine.replay_endpoint.rpartition(":")[2])
        with KubeServer() as silent:  # what answers 404 to every question
            pods.kube.put(pod("old", int(silent.url.rpartition(":")[2])))
            source = source_of(pods.kube, events_port=port, replay_port=replay)
            with connect(source, replay_policy=REPLAYS) as client:
                client.wait_live(PATIENCE)
                assert client.match(PROMPT)[Rank("old", 0)].tokens == engine.lookup(PROMPT).tokens


def test_an_api_server_that_cannot_be_reached_is_named() -> None:
    with (
        unused("http") as url,
        connect(KubernetesSource("app=vllm", namespace="llm", kube_url=url)) as client,
    ):
        until(lambda: "nothing listens there" in str(client.statistics()["discovery"]))
        with pytest.raises(NotLiveError, match="nothing listens there") as caught:
            client.wait_live(0.01)
        assert set(caught.value.engines) == {"pods app=vllm in llm"}


def assert_follows(client: Any, pods: Pods, but: str = "") -> None:
    """Assert that the index comes to hold what the engines hold, live."""
    engines = [e for name, engines in pods.engines.items() if name != but for e in engines]
    held = {engine.rank: engine.lookup(PROMPT).tokens for engine in engines}

    def follows() -> bool:
        tokens = {m.rank: m.tokens for m in client.match(PROMPT) if m.state == "live"}
        return held.items() <= tokens.items()

    until(follows)


def wait_ranks(client: Any, ranks: str) -> None:
    wanted = set(ranks.split())
    until(client.statuses, lambda ranks: {str(rank) for rank in ranks} == wanted)
