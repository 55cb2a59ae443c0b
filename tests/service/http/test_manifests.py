"""The Kubernetes manifests in deploy/: whole, least privilege, and understood by the command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvindex.service.settings import ServeSettings
from kvindex.tools.cli.arguments import settings_of
from kvindex.tools.cli.engines import sources_of
from kvindex.tools.cli.gateway import add_gateway_options
from tests.service.test_deploy import parsed

pytestmark = pytest.mark.service

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def shape(_required: str = "", /, **fields: Any) -> dict[str, Any]:
    """A schema of an object with these fields and no other."""
    form = {"type": "object", "properties": fields, "additionalProperties": False}
    return {**form, "required": _required.split()}


def listed(item: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


# The fields that we use of kinds that are not Kubernetes' own, as these define them: Gateway API
# v1 (1.4), Gateway API Inference Extension v1 (84436a9), Istio networking v1 (1.28).
SPECS = {
    "Gateway": shape(
        "gatewayClassName listeners",
        gatewayClassName=NAME,
        listeners=listed(
            shape(
                "name port protocol",
                name=NAME,
                port=PORT,
                protocol={"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]},
                allowedRoutes=shape(
                    namespaces=shape("", **{"from": {"enum": ["All", "Selector", "Same"]}})
                ),
            ),
            most=64,
        ),
    ),
    "HTTPRoute": shape(
        parentRefs=listed(shape("name", name=NAME), most=32),
        rules=listed(
            shape(
                matches=listed(
                    shape(
                        path=shape(
                            type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                            value={"type": "string", "pattern": "^/", "maxLength": 1024},
                        )
                    ),
                    most=64,
                ),
                backendRefs=listed(shape("name", group=NAME, kind={}, name=NAME), most=16),
                timeouts=shape(
                    request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
                ),
            ),
            most=16,
        ),
    ),
    "InferencePool": shape(
        "selector targetPorts endpointPickerRef",
        selector=shape("matchLabels", matchLabels={"additionalProperties": {"type": "string"}}),
        targetPorts=listed(shape("number", number=PORT), most=8),
        endpointPickerRef=shape(
            "name",
            name=NAME,
            port=shape("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    "DestinationRule": shape(
        "host",
        host=NAME,
        trafficPolicy=shape(
            tls=shape(
                mode={"enum": ["DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"]},
                insecureSkipVerify={"type": "boolean"},
            )
        ),
    ),
}


def documents() -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def of_kind(kind: str, name: str = "kvindex") -> dict[str, Any]:
    (found,) = (
        each for each in documents() if each["kind"] == kind and each["metadata"]["name"] == name
    )
    return found


def pod(name: str = "kvindex") -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("Deployment", name)["spec"]["template"]["spec"]
    return spec


def test_every_document_has_the_form_of_its_kind() -> None:
    newest = kubernetes_validate.latest_version()
    for each in documents():
        if each["kind"] in SPECS:
            form = shape(
                "apiVersion kind metadata spec",
                apiVersion={},
                kind={},
                metadata=shape("name namespace", name=NAME, namespace=NAME),
                spec=SPECS[each["kind"]],
            )
            jsonschema.validate(each, form)
        else:
            kubernetes_validate.validate(each, newest, strict=True)


def test_the_commands_are_understood_and_can_work() -> None:
    (container,) = pod()["containers"]
    arguments = parsed(container["args"])
    settings = ServeSettings(**settings_of(arguments, ServeSettings))
    assert settings.host == "0.0.0.0"
    assert settings.networks() == ()  # nobody registers what it dials
    assert sources_of(arguments) == [{"kind": "kubernetes", "selector": "app=vllm"}]
    service = of_kind("Service")["metadata"]
    assert f"{service['name']}.{service['namespace']}.svc" in settings.allowed_hosts
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]


def test_the_gateways_command_is_understood() -> None:
    spec = pod("kvindex-gateway")
    (container,) = spec["containers"]
    assert container["command"] == ["kvindex", "gateway"]
    parser = argparse.ArgumentParser()
    add_gateway_options(parser)
    arguments = parser.parse_args(container["args"])
    assert container["ports"] == [{"name": "http", "containerPort": 8080}]
    assert spec["terminationGracePeriodSeconds"] > arguments.drain
    service = of_kind("Service", "kvindex-gateway")["metadata"]
    assert f"{service['name']}.{service['namespace']}.svc" in arguments.allowed_hosts


@pytest.mark.parametrize("name", ["kvindex", "kvindex-gateway"])
def test_probes_ask_what_needs_no_token(name: str) -> None:
    (container,) = pod(name)["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    assert paths == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }


@pytest.mark.parametrize("name", ["kvindex", "kvindex-gateway", "kvindex-epp"])
def test_the_pod_may_do_no_more_than_it_must(name: str) -> None:
    spec = pod(name)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in spec.get("volumes", ())}
    for rule in of_kind("Role")["rules"]:
        assert set(rule["verbs"]) == {"get", "list", "watch"}
        assert "*" not in rule["resources"] + rule["apiGroups"]


def test_everything_is_in_one_namespace_and_named_alike() -> None:
    assert {each["metadata"]["namespace"] for each in documents()} == {"llm"}
    for name in ("kvindex", "kvindex-gateway", "kvindex-epp"):
        labels = of_kind("Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert of_kind("Deployment", name)["spec"]["selector"]["matchLabels"] == labels
        assert of_kind("Service", name)["spec"]["selector"] == labels
        assert pod(name)["serviceAccountName"] == of_kind("ServiceAccount")["metadata"]["name"]
    of_serve = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == of_serve


def test_the_pool_names_the_pickers_service_and_port() -> None:
    picker = of_kind("InferencePool", "vllm")["spec"]["endpointPickerRef"]
    (port,) = of_kind("Service", picker["name"])["spec"]["ports"]
    assert picker["port"] == {"number": port["port"]}
    (container,) = pod(picker["name"])["containers"]
    assert port["targetPort"] in {each["name"] for each in container["ports"]}


def test_the_route_leads_to_the_pool_and_istio_trusts_its_picker() -> None:
    (rule,) = of_kind("HTTPRoute", "llm")["spec"]["rules"]
    pool = of_kind("InferencePool", "vllm")
    (backend,) = rule["backendRefs"]
    assert backend == {
        "group": pool["apiVersion"].partition("/")[0],
        "kind": pool["kind"],
        "name": pool["metadata"]["name"],
    }
    (parent,) = of_kind("HTTPRoute", "llm")["spec"]["parentRefs"]
    assert of_kind("Gateway", parent["name"])["spec"]["listeners"]
    service = of_kind("Service", pool["spec"]["endpointPickerRef"]["name"])["metadata"]
    host = of_kind("DestinationRule", service["name"])["spec"]["host"]
    assert host == f"{service['name']}.{service['namespace']}.svc.cluster.local"
