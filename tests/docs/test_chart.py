"""The Helm chart, rendered by Helm's own engine over a matrix of values: valid, safe, and what it configures starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from gateway.config import load

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "kvgate"
KUBERNETES = ("1.27", "1.31", "1.34")
OTHERS = {
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}
"""Kinds of operators, whose schemas are not Kubernetes' own."""

DISCOVERY = {"discovery": {"kubernetes": {"namespace": "gpu", "selector": "app=vllm"}}}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one replica, open": {"replicaCount": 1, "admin": {"open": True}, "networkPolicy": {"enabled": False}},
    "workers by name": {"config": {"workers": [{"name": "a", "url": "http://10.0.0.1:8000"}]}},
    "discovery": {"config": DISCOVERY},
    "secrets": {
        "admin": {"existingSecret": "token"},
        "apiKeys": {"existingSecret": "keys"},
        "redis": {"existingSecret": "redis"},
        "tls": {"existingSecret": "tls"},
        "extraEnv": [{"name": "KVGATE_TELEMETRY__LOG_LEVEL", "value": "debug"}],
        "extraEnvFrom": [{"secretRef": {"name": "more"}}],
    },
    "scaled by CPU": {"autoscaling": {"enabled": True, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}}}},
    "scaled by KEDA": {"keda": {"enabled": True}},
    "ingress": {
        "ingress": {"enabled": True, "className": "nginx", "hosts": [{"host": "llm.example.com"}]},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    },
    "gateway api": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "edge"}], "hostnames": ["llm.example.com"]}},
    "seen": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "placed": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gateway", "operator": "Exists"}],
        "priorityClassName": "high",
        "podLabels": {"team": "inference"},
        "podAnnotations": {"note": "x"},
        "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "operators": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "vllm"}}}]}],
        },
        "rollOnConfigChange": False,
        "fullnameOverride": "gate",
        "image": {"repository": "example/kvgate", "digest": "sha256:" + "0" * 64},
    },
}

EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*/values.yaml"))
MATRIX |= {f"example {path.parent.name}": yaml.safe_load(path.read_text()) for path in EXAMPLES}

Manifests = list[dict[str, Any]]


@pytest.fixture(scope="module")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(str(CHART)) as loaded:
        yield loaded


def render(chart: helm.Chart, values: dict[str, Any]) -> Manifests:
    chart.validate_schema(values)
    found: Manifests = []
    for path, text in chart.render(values, name="demo", namespace="llm").items():
        if path.endswith(".yaml"):
            found += [manifest for manifest in yaml.safe_load_all(text) if manifest]
    return found


def kinds(manifests: Manifests) -> dict[str, Manifests]:
    found: dict[str, Manifests] = {}
    for manifest in manifests:
        found.setdefault(manifest["kind"], []).append(manifest)
    return found


def one(manifests: Manifests, kind: str) -> dict[str, Any]:
    (manifest,) = kinds(manifests)[kind]
    return manifest


def container(manifests: Manifests) -> dict[str, Any]:
    (found,) = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_helm_finds_nothing_wrong() -> None:
    said = [message for message in helm.lint(str(CHART))["messages"] if message["severity"] > 1]
    assert said == []


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_manifests_are_what_kubernetes_takes(chart: helm.Chart, values: dict[str, Any]) -> None:
    names = set()
    for manifest in render(chart, values):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        assert (kind, name) not in names
        names.add((kind, name))
        if kind in OTHERS:
            assert manifest["apiVersion"] == OTHERS[kind]
            continue
        for release in KUBERNETES:
            kubernetes_validate.validate(manifest, release, strict=True)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_gateway_takes_the_rendered_file(chart: helm.Chart, values: dict[str, Any], tmp_path: Path) -> None:
    manifests = render(chart, values)
    file = tmp_path / "kvgate.yaml"
    file.write_text(one(manifests, "ConfigMap")["data"]["kvgate.yaml"])
    env = {
        entry["name"]: entry.get("value", "redis://store:6379/0" if "REDIS" in entry["name"] else "secret")
        for entry in container(manifests)["env"] or ()
    }
    settings = load(file, environ=env)
    assert settings.server.host == "0.0.0.0"
    if values.get("tls"):
        assert str(settings.server.tls.cert) == "/etc/kvgate/tls/tls.crt"


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_pods_have_no_right_they_do_not_need(chart: helm.Chart, values: dict[str, Any]) -> None:
    manifests = render(chart, values)
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is False, "KVGATE_PORT of a service link is no setting"
    context = container(manifests)["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    finds_workers = "discovery" in values.get("config", {})
    assert pod["automountServiceAccountToken"] is finds_workers
    roles = kinds(manifests).get("Role", [])
    assert len(roles) == finds_workers
    for role in roles:
        assert role["metadata"]["namespace"] in ("gpu", "llm")
        assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    assert "ClusterRole" not in kinds(manifests)


def test_a_pod_outlives_its_streams(chart: helm.Chart) -> None:
    manifests = render(chart, {"config": {"server": {"drain_timeout_s": 120.5}}, "preStopSeconds": 7})
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 121 + 7 + 10


def test_a_changed_file_replaces_the_pods_unless_told_not_to(chart: helm.Chart) -> None:
    def sums(**values: Any) -> dict[str, str]:
        found = one(render(chart, values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return found or {}

    assert sums()["checksum/config"] != sums(config={"load": {"poll_s": 2}})["checksum/config"]
    assert sums() == sums()
    assert sums(rollOnConfigChange=False) == {}
    mounts = container(render(chart, {}))["volumeMounts"]
    assert all("subPath" not in mount for mount in mounts), "a file mounted by itself never changes"


def test_the_admin_port_has_a_token_unless_opened(chart: helm.Chart) -> None:
    made = render(chart, {})
    token = one(made, "Secret")["data"]["token"]
    assert len(token) >= 48
    assert one(render(chart, {}), "Secret")["data"]["token"] != token
    (variable,) = container(made)["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "demo-kvgate-admin", "key": "token"}
    given = render(chart, {"admin": {"existingSecret": "mine", "tokenKey": "t"}, **MATRIX["seen"]})
    assert "Secret" not in kinds(given)
    (endpoint,) = one(given, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "mine", "key": "t"}
    opened = render(chart, {"admin": {"open": True}})
    assert "Secret" not in kinds(opened)
    assert not container(opened)["env"]


def test_prometheus_finds_the_admin_service_alone(chart: helm.Chart) -> None:
    manifests = render(chart, MATRIX["seen"])
    wanted = one(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    found = [service for service in kinds(manifests)["Service"] if wanted <= service["metadata"]["labels"].items()]
    assert [service["metadata"]["name"] for service in found] == ["demo-kvgate-admin"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": {"tga": "x"}}, "tga"),
        ({"replicaCount": "two"}, "replicaCount"),
        ({"config": {"server": {"port": 99999}}}, "port"),
        ({"image": {"digest": "abc"}}, "digest"),
        ({"autoscaling": {"enabled": True}, "keda": {"enabled": True}}, "choose one"),
        ({"ingress": {"enabled": True}}, "name at least one host"),
        ({"httpRoute": {"enabled": True}}, "name the Gateway"),
    ],
)
def test_wrong_values_are_refused_by_name(chart: helm.Chart, values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        render(chart, values)


def test_every_value_has_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, part in values.items():
        properties = schema["properties"][name].get("properties")
        if properties is not None and name != "config":
            assert set(part) == set(properties), name


def test_the_chart_is_the_version_that_the_code_is() -> None:
    version = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version"))
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert version == f'version = "{chart["appVersion"]}"'
