"""Engines in the pods of a Kubernetes cluster: what a pod is, and how its API server is followed.

A list of all pods has a version, and a watch yields each change after a version. A watch ends every
few minutes, and goes on at the version that was received last; a version that is too old for the
server ("expired") makes a new list.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import msgspec

from kvindex.subscribe.discovery.sources import Notify, Target, UsualPorts, usual_worker
from kvindex.wire import CacheSettings
from kvindex.wire.errors import UNREADABLE, ConfigurationError, DiscoveryError
from kvindex.wire.web import Stream, Web

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its account's token, the API server's certificate, and its namespace."""

POOLS: Final = "/apis/inference.networking.k8s.io/v1"
"""Where the API server has the pools of the Gateway API Inference Extension."""

_MAX_PORTS = 8  # of an InferencePool, by its definition
_PAGE = 500  # objects in one answer to a list
_MAX_PAGES = 200
_MAX_ANSWER = 64 << 20  # bytes of a page
_MAX_EVENT = 4 << 20  # bytes of one event; an object has 1.5 MB at most
_TIMEOUT = 30.0  # seconds for a list
_WATCH = 240  # seconds after which the server ends a watch, and a new one goes on
_SLACK = 15.0  # seconds beyond that until it is taken for dead


class PodRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the engines in a pod are found; what is not said here is as for `KubernetesSource`."""

    ports: tuple[int, ...] = ()  # of their HTTP servers, one for each engine; or, if there is none,
    port_label: str = ""  # a label that has the port; else
    port_name: str = "http"  # a container port; else 8000
    model_label: str = ""
    events_port: int | None = 5557
    replay_port: int | None = None
    dp_size: int = 1
    routing_group: str = "default"
    cache: CacheSettings = CacheSettings()

    def __post_init__(self) -> None:
        for port in self.ports:
            if _port(port) is None:
                raise ConfigurationError(f"port {port!r} is no port")


_PRESETS: Mapping[str, tuple[str, PodRules]] = {
    "llm-d": ("llm-d.ai/inference-serving=true", PodRules(model_label="llm-d.ai/model")),
    "aibrix": (
        "model.aibrix.ai/kv-events-enabled=true",
        PodRules(
            port_label="model.aibrix.ai/port",
            model_label="model.aibrix.ai/name",
            replay_port=5558,
        ),
    ),
    "vllm-production-stack": ("helm-release-name,model", PodRules(port_name="container-port")),
}


def rules_of(preset: str) -> tuple[str, PodRules]:
    """Return the label selector and the rules of a preset: a system that deploys engines."""
    if preset not in _PRESETS:
        raise ConfigurationError(f"no preset {preset!r}: there are {', '.join(_PRESETS)}")
    return _PRESETS[preset]


class Pod(msgspec.Struct, frozen=True):
    """The fields of a pod that discovery needs."""

    name: str
    uid: str = ""  # differs for another pod of the same name
    address: str = ""  # its IP; "" while it has none
    is_ready: bool = False
    is_ending: bool = False  # or has ended
    ports: dict[str, int] = {}  # its containers', by name
    labels: dict[str, str] = {}


def pod_of(listed: Any) -> Pod:
    """Return a pod of the API server's JSON; ValueError if it is none."""
    metadata, spec, status = (_part(listed, key) for key in ("metadata", "spec", "status"))
    labels = _part(metadata, "labels")
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a pod has no name")
    # Whatever is missing or of another type counts as absent: the server may be newer than this.
    conditions = [c for c in _list(status, "conditions") if isinstance(c, Mapping)]
    containers = [c for c in _list(spec, "containers") if isinstance(c, Mapping)]
    ports = [p for c in containers for p in _list(c, "ports") if isinstance(p, Mapping)]
    return Pod(
        name,
        _text(metadata.get("uid")),
        _text(status.get("podIP")),
        any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Failed", "Succeeded"),
        {_text(p.get("name")): port for p in ports if (port := _port(p.get("containerPort")))},
        {str(key): value for key, value in labels.items() if isinstance(value, str)},
    )


def pool_of(listed: Any) -> tuple[str, tuple[int, ...]]:
    """Return an InferencePool's label selector ("app=vllm") and ports; ValueError if it is none."""
    spec = _part(listed, "spec")
    labels = _part(_part(spec, "selector"), "matchLabels")
    if not labels or not all(isinstance(value, str) for value in labels.values()):
        raise ValueError("its selector has no matchLabels")
    numbers = [_port(_part({"p": p}, "p").get("number")) for p in _list(spec, "targetPorts")]
    ports = tuple(number for number in numbers if number)[:_MAX_PORTS]
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports


def targets_of(pod: Pod, rules: PodRules) -> Iterator[Target]:
    """Yield the engines of a pod that has an address; ConfigurationError if its ports cannot be."""
    ports: Sequence[int] = rules.ports
    if not ports:
        labelled = pod.labels.get(rules.port_label, "") if rules.port_label else ""
        number = int(labelled[:6]) if labelled.isascii() and labelled.isdigit() else None
        ports = (_port(number) or pod.ports.get(rules.port_name, 8000),)
    usual = UsualPorts(rules.events_port, rules.replay_port, rules.dp_size)
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    # Several servers in one pod are engines that share its ranks' ports: the second one's come
    # after those of the first.
    for place, port in enumerate(ports):
        name = pod.name if len(ports) == 1 else f"{pod.name}:{port}"
        yield Target(
            name,
            f"http://{host}:{port}",
            usual_worker(name, pod.address, usual, rules.cache, place * rules.dp_size),
            pod.labels.get(rules.model_label, ""),
            rules.routing_group,
            pod.labels,
            pod.uid,
            rules.cache,
        )


def _part(whole: Any, key: str) -> Mapping[str, Any]:
    part = whole.get(key) if isinstance(whole, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _list(whole: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = whole.get(key)
    return value if isinstance(value, list) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _port(value: Any) -> int | None:
    return value if isinstance(value, int) and 1 <= value <= 65_535 else None


class KubernetesSource:
    """Lists the engines in pods, as the Kubernetes API server does.

    A pod is listed when it is ready for the first time. It is removed as soon as it is being
    deleted, has ended, or no longer has the labels; not when it is only unready for a while, since
    its cache lives on. If the server cannot be reached, its last answer stays valid.

    Each engine is asked where it publishes. If it does not report it, `events_port` + rank is
    assumed.

    Args:
        selector: labels of the pods, as kubectl accepts them: "app=vllm".
        pool: instead, the name of an InferencePool (`inference.networking.k8s.io/v1`), whose
            selector and ports count.
        preset: instead, "llm-d", "aibrix" or "vllm-production-stack": their labels and ports.
            With `selector` or `pool`, their ports alone.
        namespace: of the pods; by default this process's own.
        port: of the engines' HTTP server; by default the container port "http", else 8000.
        events_port: where rank 0 publishes if its engine does not report it; None assumes nothing.
        replay_port: where it then answers replay requests.
        dp_size: number of ranks of such an engine.
        model_label: a label that has the name of the model; by default each engine is asked.
        routing_group, cache: as for `Target`.
        kube_url: the API server's URL, or that of a `kubectl proxy`; by default that of the cluster
            around this process, with the token and certificate of its service account.
        token, certificate: files that have others.

    Raises:
        ConfigurationError: a value cannot work, or this process runs in no cluster.

    Examples:
        >>> KubernetesSource("app=vllm", namespace="llm", kube_url="http://127.0.0.1:8001").name
        'pods app=vllm in llm'
    """

    is_certain = True

    def __init__(
        self,
        selector: str = "",
        *,
        pool: str = "",
        preset: str = "",
        namespace: str = "",
        port: int | None = None,
        events_port: int | None = 5557,
        replay_port: int | None = None,
        dp_size: int = 1,
        model_label: str = "",
        routing_group: str = "default",
        cache: CacheSettings | None = None,
        kube_url: str | None = None,
        token: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
    ) -> None:
        usual, rules = rules_of(preset) if preset else ("", PodRules())
        self.rules = msgspec.structs.replace(
            rules,
            ports=() if port is None else (port,),
            events_port=events_port,
            replay_port=replay_port or rules.replay_port,
            dp_size=dp_size,
            model_label=model_label or rules.model_label,
            routing_group=routing_group,
            cache=cache or CacheSettings(),
        )
        if (selector and pool) or not (selector or pool or usual):
            raise ConfigurationError("give the pods' labels, or the name of an InferencePool")
        for name in filter(None, (pool, namespace)):
            if not all(c.isascii() and (c.isalnum() or c in "-.") for c in name):
                raise ConfigurationError(f"{name!r} is no name in Kubernetes")
        tuple(targets_of(Pod("any", address="127.0.0.1"), self.rules))  # refuses impossible ports
        # A watch of pods does not show that the pool selects others: it is asked between watches.
        self._api = KubeApi(
            kube_url, token=token, certificate=certificate, watch_seconds=60 if pool else 240
        )
        self.namespace = namespace or self._api.namespace or "default"
        self._path = f"/api/v1/namespaces/{self.namespace}/pods"
        self._selector = "" if pool else selector or usual
        self._pool = pool
        self.name = f"pods {f'of pool {pool}' if pool else self._selector} in {self.namespace}"
        self._pods: dict[str, Pod] = {}
        self._listed: tuple[Target, ...] | None = None
        self._closed = threading.Event()
        self._pause = 1.0  # seconds that a list or a watch takes at least: see `_paced`

    def watch(self, notify: Notify) -> None:
        """Call `notify` with the pods' engines, and again whenever they change."""
        while not self._closed.is_set():
            with self._paced():
                try:
                    self._list_and_follow(notify)
                except DiscoveryError as error:
                    if self._closed.is_set():
                        return
                    if error.reason != "expired":  # a new list cures that
                        raise

    def close(self) -> None:
        """End `watch`."""
        self._closed.set()
        self._api.close()

    def _list_and_follow(self, notify: Notify) -> None:
        """Receive all pods, and their changes, until other pods are selected."""
        selector, rules = selected = self._present()
        items, version = self._api.list(self._path, selector)
        # Those of before count: a pod that was ready once stays, although it is not ready now.
        before, self._pods = self._pods, {}
        for item in items:
            self._note("ADDED", item, before)
        self._notify(rules, notify)
        while version and not self._closed.is_set():
            with self._paced():
                version = self._follow(selector, rules, version, notify)
            if self._pool and self._present() != selected:
                return

    @contextmanager
    def _paced(self) -> Iterator[None]:
        """Take a moment at least, so that a server which hangs up at once is not flooded."""
        until = time.monotonic() + self._pause
        yield
        self._closed.wait(max(until - time.monotonic(), 0.0))

    def _present(self) -> tuple[str, PodRules]:
        """Return the pool's present selector and rules."""
        if not self._pool:
            return self._selector, self.rules
        path = f"{POOLS}/namespaces/{self.namespace}/inferencepools/{self._pool}"
        try:
            selector, ports = pool_of(self._api.get(path))
        except ValueError as error:
            raise self._odd(f"the pool {self._pool} cannot be understood: {error}") from None
        if ports and not self.rules.ports:
            return selector, msgspec.structs.replace(self.rules, ports=ports)
        return selector, self.rules

    def _follow(self, selector: str, rules: PodRules, version: str, notify: Notify) -> str:
        """Receive changes until the watch ends; return the last version received."""
        reached = version  # also by bookmarks, which carry nothing else
        try:
            for kind, changed in self._api.watch(self._path, selector, version):
                if kind in ("ADDED", "MODIFIED", "DELETED"):
                    self._note(kind, changed, self._pods)
                    self._notify(rules, notify)
                reached = _text(_part(changed, "metadata").get("resourceVersion")) or reached
        except DiscoveryError as error:
            # It made progress: the next watch goes on there, at once. If not, the caller's pauses
            # grow, since the server may be down.
            if error.reason not in ("unreachable", "timeout") or reached == version:
                raise
        return reached

    def _note(self, kind: str, listed: Any, before: Mapping[str, Pod]) -> None:
        try:
            pod = pod_of(listed)
        except ValueError as error:
            raise self._odd(str(error)) from None
        known = before.get(pod.name)
        # A StatefulSet's pod keeps its name when it is made anew, with an empty cache.
        was_here = known is not None and (known.uid, known.address) == (pod.uid, pod.address)
        is_gone = kind == "DELETED" or pod.is_ending or not pod.address
        if is_gone or not (pod.is_ready or was_here):
            self._pods.pop(pod.name, None)
        else:
            self._pods[pod.name] = pod

    def _notify(self, rules: PodRules, notify: Notify) -> None:
        try:
            targets = tuple(
                target
                for name in sorted(self._pods)
                for target in targets_of(self._pods[name], rules)
            )
        except ConfigurationError as error:
            raise self._odd(str(error)) from None
        # Most changes of pods are of no matter here: conditions, heartbeats, annotations.
        if targets != self._listed:
            self._listed = targets
            notify(targets)

    def _odd(self, text: str) -> DiscoveryError:
        return DiscoveryError(f"{self._api.url}: {text}", url=self._api.url, reason="content")


# The API server ---------------------------------------------------------------------------------


class KubeApi:
    """Lists and watches objects of an API server; one thread, but for `close`.

    Without a URL, the server is that of the cluster around this process, with the service account's
    token and certificate.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        account: Path | None = None,
        watch_seconds: int = _WATCH,
    ) -> None:
        self.namespace: str | None = None
        if url is None:
            host = os.environ.get("KUBERNETES_SERVICE_HOST")
            if not host:
                raise ConfigurationError(
                    "this process runs in no Kubernetes cluster: give the API server's URL, that of"
                    " `kubectl proxy` for instance"
                )
            host = f"[{host}]" if ":" in host else host
            url = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
            account = account or SERVICE_ACCOUNT
            token = token or account / "token"
            certificate = certificate or account / "ca.crt"
            self.namespace = _read(account / "namespace")
        self._token = None if token is None else Path(token)
        context = None
        if certificate is not None and url.lower().startswith("https://"):
            try:
                context = ssl.create_default_context(cafile=os.fspath(certificate))
            except OSError as error:
                raise ConfigurationError(f"{certificate} is no certificate: {error}") from None
        # Read anew for each request: the cluster renews the token every hour.
        self._web = Web(url, token=self._present_token, context=context)
        self.url = self._web.url
        self._watch_seconds = watch_seconds
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._is_closed = False

    def get(self, path: str) -> Mapping[str, Any]:
        """Return one object; DiscoveryError if it cannot be read."""
        with self._opened(path) as stream:
            body = stream.read(_MAX_ANSWER + 1)
        self._check(stream.status, path, body)
        if len(body) > _MAX_ANSWER:
            raise self._error(path, "content", f"answers more than {_MAX_ANSWER} bytes")
        return self._object(path, body)

    def list(self, path: str, selector: str) -> tuple[list[Any], str]:
        """Return all objects with certain labels, and the version of that list."""
        items: list[Any] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        for _ in range(_MAX_PAGES):
            answer = self.get(f"{path}?{urlencode(query)}")
            page, metadata = answer.get("items"), answer.get("metadata")
            if not isinstance(page, list) or not isinstance(metadata, Mapping):
                raise self._error(path, "content", "answers no list")
            items += page
            # The server may change between pages: then it answers "expired", and all begins anew.
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            query["continue"] = str(metadata["continue"])
        raise self._error(path, "content", f"has more than {_MAX_PAGES * _PAGE} objects")

    def watch(self, path: str, selector: str, version: str) -> Iterator[tuple[str, Any]]:
        """Yield the changes after a version, the kind and the object, until the server ends it."""
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(self._watch_seconds),
        }
        with self._opened(f"{path}?{urlencode(query)}") as stream:
            if stream.status != 200:
                self._check(stream.status, path, stream.read(65_536))
            while line := stream.read_line(_MAX_EVENT, self._watch_seconds + _SLACK):
                event = self._object(path, line)
                kind, changed = str(event.get("type")), event.get("object")
                # An error within the stream, after the head with 200: "expired" comes like that.
                if kind == "ERROR":
                    status = changed if isinstance(changed, Mapping) else {}
                    code = status.get("code")
                    self._check(
                        code if isinstance(code, int) else 500, path, msgspec.json.encode(status)
                    )
                yield kind, changed

    def close(self) -> None:
        """End a watch that is under way, and all later ones. From any thread."""
        with self._lock:
            self._is_closed = True
            stream = self._stream
        if stream is not None:
            stream.close()

    def _opened(self, path: str) -> Stream:
        stream = self._web.open(path, _TIMEOUT)
        with self._lock:
            self._stream = stream
            if self._is_closed:  # since this was opened: `close` saw another stream, or none
                stream.close()
        return stream

    def _present_token(self) -> str | None:
        return None if self._token is None else _read(self._token)

    def _check(self, status: int, path: str, body: bytes) -> None:
        if 200 <= status < 300:
            return
        try:
            message = msgspec.json.decode(body).get("message")
        except (ValueError, AttributeError, RecursionError):
            message = None
        # A proxy's page of errors may hold anything: it must not reach a terminal.
        is_shown = isinstance(message, str) and message.isprintable()
        shown = f" ({message[:300]})" if is_shown and message else ""
        what = {401: "denied", 403: "denied", 410: "expired", 504: "timeout"}.get(status, "status")
        hint = ": the service account needs get, list and watch" if what == "denied" else ""
        raise self._error(path, what, f"answers {status}{shown}{hint}")

    def _object(self, path: str, body: bytes) -> Mapping[str, Any]:
        try:
            content = msgspec.json.decode(body)
        except UNREADABLE as error:
            raise self._error(path, "content", f"answers no JSON ({error})") from None
        if not isinstance(content, dict):
            raise self._error(path, "content", "answers no object")
        return content

    def _error(self, path: str, reason: str, text: str) -> DiscoveryError:
        path = path.partition("?")[0]
        return DiscoveryError(f"{self.url}{path} {text}", url=self.url, reason=reason)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise DiscoveryError(
            f"{path} cannot be read: {error}", url=str(path), reason="unreachable"
        ) from None
