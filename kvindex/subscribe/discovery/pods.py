"""Pods as a Kubernetes API server shows them, read as engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvindex.subscribe.discovery.names import usual_worker
from kvindex.subscribe.discovery.targets import Target
from kvindex.wire import CacheSettings
from kvindex.wire.errors import ConfigurationError

__all__ = ["POOLS", "Pod", "PodRules", "pod_of", "pool_of", "rules_of", "targets_of"]

POOLS = "/apis/inference.networking.k8s.io/v1"
"""Where the API server has the pools of the Gateway API Inference Extension."""

_MAX_PORTS = 8  # of an InferencePool, by its definition


class PodRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the engines in a pod are found.

    Raises:
        ConfigurationError: a port is invalid.

    Attributes:
        ports: of their HTTP servers, one for each engine; none: the container port that is called
            `port_name`, else 8000.
        port_name: a container port.
        port_label: a label that has the port.
        model_label: a label that has the name of the model.
        events_port: where rank 0 publishes if the engine does not report it; None assumes nothing.
        replay_port: where rank 0 then answers replay requests.
        dp_size: number of ranks of such an engine.
        routing_group: of all of them.
        cache: what their events do not state.
    """

    ports: tuple[int, ...] = ()
    port_name: str = "http"
    port_label: str = ""
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
    "llm-d": (
        "llm-d.ai/inference-serving=true",
        PodRules(model_label="llm-d.ai/model"),
    ),
    "aibrix": (
        "model.aibrix.ai/kv-events-enabled=true",
        PodRules(
            port_label="model.aibrix.ai/port",
            model_label="model.aibrix.ai/name",
            replay_port=5558,
        ),
    ),
    "vllm-production-stack": (
        "helm-release-name,model",
        PodRules(port_name="container-port"),
    ),
}


def rules_of(preset: str) -> tuple[str, PodRules]:
    """Return the label selector and the rules of a system that deploys engines.

    Raises:
        ConfigurationError: no such preset.
    """
    if preset not in _PRESETS:
        raise ConfigurationError(f"no preset {preset!r}: there are {', '.join(_PRESETS)}")
    return _PRESETS[preset]


class Pod(msgspec.Struct, frozen=True):
    """The fields of a pod that discovery needs.

    Attributes:
        name: its name.
        uid: differs for another pod of the same name.
        address: its IP; "" while it has none.
        is_ready: whether it is ready.
        is_ending: whether it is being deleted, or has ended.
        ports: its containers' ports, by name.
        labels: its labels.
    """

    name: str
    uid: str = ""
    address: str = ""
    is_ready: bool = False
    is_ending: bool = False
    ports: dict[str, int] = {}
    labels: dict[str, str] = {}


def pod_of(found: Any) -> Pod:
    """Return a pod of the API server's JSON.

    Raises:
        ValueError: it is no pod.
    """
    metadata, spec, status = (_part(found, key) for key in ("metadata", "spec", "status"))
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a pod has no name")
    conditions = [c for c in _list(status, "conditions") if isinstance(c, Mapping)]
    containers = [c for c in _list(spec, "containers") if isinstance(c, Mapping)]
    ports = [p for c in containers for p in _list(c, "ports") if isinstance(p, Mapping)]
    labels = metadata.get("labels")
    labels = labels if isinstance(labels, Mapping) else {}
    return Pod(
        name,
        _text(metadata.get("uid")),
        _text(status.get("podIP")),
        any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        bool(metadata.get("deletionTimestamp")) or status.get("phase") in ("Failed", "Succeeded"),
        {_text(p.get("name")): port for p in ports if (port := _port(p.get("containerPort")))},
        {str(key): value for key, value in labels.items() if isinstance(value, str)},
    )


def pool_of(found: Any) -> tuple[str, tuple[int, ...]]:
    """Return the label selector and the ports of an InferencePool.

    Raises:
        ValueError: it is no pool.

    Examples:
        >>> pool_of({"spec": {"selector": {"matchLabels": {"app": "vllm"}},
        ...                   "targetPorts": [{"number": 8000}]}})
        ('app=vllm', (8000,))
    """
    spec = _part(found, "spec")
    labels = _part(_part(spec, "selector"), "matchLabels")
    if not labels or not all(isinstance(value, str) for value in labels.values()):
        raise ValueError("its selector has no matchLabels")
    numbers = [_port(_part({"p": p}, "p").get("number")) for p in _list(spec, "targetPorts")]
    ports = tuple(number for number in numbers if number)[:_MAX_PORTS]
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())), ports


def targets_of(pod: Pod, rules: PodRules) -> Iterator[Target]:
    """Yield the engines of a pod that has an address.

    Raises:
        ConfigurationError: its ports are invalid.
    """
    ports = _ports(pod, rules)
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    for place, port in enumerate(ports):
        name = pod.name if len(ports) == 1 else f"{pod.name}:{port}"
        worker = None
        if rules.events_port is not None:
            worker = usual_worker(
                name,
                pod.address,
                rules.events_port,
                rules.replay_port,
                rules.dp_size,
                rules.cache,
                place * rules.dp_size,
            )
        yield Target(
            name,
            f"http://{host}:{port}",
            worker,
            pod.labels.get(rules.model_label, ""),
            rules.routing_group,
            pod.labels,
            pod.uid,
            rules.cache,
        )


def _ports(pod: Pod, rules: PodRules) -> Sequence[int]:
    if rules.ports:
        return rules.ports
    labelled = pod.labels.get(rules.port_label, "") if rules.port_label else ""
    if labelled.isascii() and labelled.isdigit() and (port := _port(int(labelled[:6]))):
        return (port,)
    return (pod.ports.get(rules.port_name, 8000),)


def _part(found: Any, key: str) -> Mapping[str, Any]:
    part = found.get(key) if isinstance(found, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _list(found: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = found.get(key)
    return value if isinstance(value, list) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _port(value: Any) -> int | None:
    return value if isinstance(value, int) and 1 <= value <= 65_535 else None
