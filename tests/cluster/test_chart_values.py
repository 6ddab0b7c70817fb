"""Each value of the chart has an effect, and invalid values are refused. Nothing is installed."""

from __future__ import annotations

import textwrap
import tomllib
from typing import Any

import pytest
import yaml

from baton_operator.api.pool import read_pool
from baton_operator.builders import build_pool
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.kubernetes.chart import (
    CHART,
    MONITORING,
    OPERATOR,
    SPREAD,
    Manifest,
    leaves,
    manifests,
    one_of,
    render,
    schema,
    set_words,
    values,
)
from tests.support.kubernetes.documents import ROOT
from tests.support.kubernetes.manifests import CREDENTIALS, INSTALLATION, containers, templates
from tests.support.kubernetes.network_policies import Place, may_connect

# Path, a value other than the default, and text that is in the manifests only with that value.
CHANGES: list[tuple[str, Any, str]] = [
    ("images.registry", "registry.example/team", "image: \"registry.example/team/baton-operator:"),
    ("images.tag", "9.8.7", "--router-image=baton-router:9.8.7"),
    ("images.pullPolicy", "Never", "--pull-policy=Never"),
    ("images.pullSecrets", ["login", "other"], "--pull-secrets=login,other"),
    ("images.operator", "mine:1", "image: \"mine:1\""),
    ("images.node", "mine@sha256:0123", "--node-image=mine@sha256:0123\n"),
    ("images.sim", "mine:2", "--sim-image=mine:2\n"),
    ("images.router", "mine", "--router-image=mine:"),
    ("images.redis", "valkey/valkey:8.1.4", "--redis-image=valkey/valkey:8.1.4"),
    ("watchNamespaces", ["blue", "green"], "--namespace=blue,green"),
    ("operator.replicas", 2, "--leader-elect"),
    ("operator.logLevel", "debug", "--log-level=debug"),
    ("operator.indexNetworks", ["10.2.0.0/16", "fd00::/8"], "--index-networks=10.2.0.0/16,fd"),
    ("operator.resources.requests", {"cpu": "123m"}, "cpu: 123m"),
    ("operator.resources.limits", {"memory": "321Mi"}, "memory: 321Mi"),
    ("operator.podAnnotations", {"team.example/a": "b"}, "team.example/a: b"),
    ("operator.serviceAccountAnnotations", {"cloud.example/a": "c"}, "cloud.example/a: c"),
    ("operator.priorityClassName", "first", "priorityClassName: first"),
    ("operator.nodeSelector", {"disk": "fast"}, "disk: fast"),
    ("operator.tolerations", [{"key": "tainted", "operator": "Exists"}], "key: tainted"),
    ("operator.affinity", {"podAffinity": {}}, "podAffinity: {}"),
    ("operator.topologySpreadConstraints", [SPREAD], "topologyKey: topology.kubernetes.io/zone"),
    ("metrics.port", 9999, "port: 9999"),
    ("metrics.annotations", {"prometheus.io/scrape": "true"}, "prometheus.io/scrape: \"true\""),
    ("networkPolicy.monitoring", [MONITORING], "kubernetes.io/metadata.name: monitoring"),
    ("serviceMonitor.enabled", True, "kind: PodMonitor"),
    ("serviceMonitor.labels", {"release": "prometheus"}, "release: prometheus"),
    ("serviceMonitor.interval", "7s", "interval: 7s"),
    ("serviceMonitor.authorization.secretName", "admins", "name: admins\n          key: admin-key"),
    ("serviceMonitor.authorization.secretKey", "word", "key: word"),
    ("dashboards.enabled", True, "pool-overview.json: |"),
    ("dashboards.labels", {"shown": "yes"}, "shown: \"yes\""),
    ("samplePool.enabled", True, "kind: InferencePool\nmetadata:\n  name: sample"),
    ("samplePool.name", "first", "kind: InferencePool\nmetadata:\n  name: first"),
    ("samplePool.spec", {"engine": {"kind": "torch"}}, "kind: torch"),
]  # fmt: skip
# Values that must be set for another value to have an effect, by the beginning of its path.
REQUIRED: dict[str, dict[str, Any]] = {
    "samplePool.": {"samplePool.enabled": True},
    "serviceMonitor.": {"serviceMonitor.enabled": True},
    "serviceMonitor.authorization.secretKey": {"serviceMonitor.authorization.secretName": "a"},
    "dashboards.": {"dashboards.enabled": True},
}
# Path, invalid value, and the error: its path, and part of its message.
REFUSED: list[tuple[str, Any, str, str]] = [
    ("image.tag", "1", "", "additional properties 'image' not allowed"),
    ("images.tagg", "1", "/images", "additional properties 'tagg' not allowed"),
    ("images.tag", 1.1, "/images/tag", "got number, want string"),
    ("images.tag", "a b", "/images/tag", "'a b' does not match pattern"),
    ("images.pullPolicy", "No", "/images/pullPolicy", "one of 'Always', 'IfNotPresent', 'Never'"),
    ("images.pullSecrets", [{"name": "a"}], "/images/pullSecrets/0", "got object, want string"),
    ("images.node", "", "/images/node", "does not match pattern"),
    ("watchNamespaces", "blue", "/watchNamespaces", "got string, want array"),
    ("watchNamespaces", ["blue", "blue"], "/watchNamespaces", "items at 0 and 1 are equal"),
    ("watchNamespaces", ["Blue"], "/watchNamespaces/0", "'Blue' does not match pattern"),
    ("crds.install", "yes", "/crds/install", "got string, want boolean"),
    ("operator.replicas", 0, "/operator/replicas", "got 0, want 1"),
    ("operator.replicas", "2", "/operator/replicas", "got string, want integer"),
    ("operator.logLevel", "loud", "/operator/logLevel", "one of 'debug', 'info', "),
    ("operator.indexNetworks", ["redis"], "/operator/indexNetworks/0", "does not match pattern"),
    ("operator.resources.claims", [], "/operator/resources", "'claims' not allowed"),
    ("operator.nodeSelector", {"a": True}, "/operator/nodeSelector/a", "got boolean, want string"),
    ("operator.priorityClassName", "A b", "/operator/priorityClassName", "does not match pattern"),
    (
        "operator.topologySpreadConstraints",
        [{"maxSkew": 1}],
        "/operator/topologySpreadConstraints/0",
        "missing properties 'topologyKey', 'whenUnsatisfiable', 'labelSelector'",
    ),
    (
        "operator.serviceAccountAnnotations",
        {"a": 1},
        "/operator/serviceAccountAnnotations/a",
        "got number, want string",
    ),
    ("networkPolicy.monitoring", [{}], "/networkPolicy/monitoring/0", "minProperties"),
    (
        "networkPolicy.monitoring",
        [{"podSelektor": {}}],
        "/networkPolicy/monitoring/0",
        "additional properties 'podSelektor' not allowed",
    ),
    ("metrics.port", 0, "/metrics/port", "got 0, want 1"),
    ("serviceMonitor.interval", "often", "/serviceMonitor/interval", "does not match pattern"),
    ("dashboards.labels", {"a": 1}, "/dashboards/labels/a", "got number, want string"),
    ("samplePool.name", "4ever", "/samplePool/name", "'4ever' does not match pattern"),
    ("samplePool.specs", {}, "/samplePool", "additional properties 'specs' not allowed"),
    ("samplePool.spec", "sim", "/samplePool/spec", "got string, want object"),
]


def test_helm_lint_passes_in_strict_mode(control_plane: Kubernetes) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in control_plane.helm(
        "lint", "--strict", str(CHART)
    )


def test_values_and_schema_have_the_same_paths() -> None:
    defaults = values()
    for path in leaves(schema()):
        part: Any = defaults
        if path != "global":
            for name in path.split("."):
                assert name in part, path
                part = part[name]
    assert sorted(defaults) == sorted(name for name in schema()["properties"] if name != "global")


def test_every_value_has_a_description_in_the_schema() -> None:
    def undescribed(part: dict[str, Any], where: str) -> list[str]:
        paths = []
        for name, inner in part["properties"].items():
            path = f"{where}.{name}"
            if "properties" in inner:
                assert inner["additionalProperties"] is False, path
                paths += undescribed(inner, path)
            elif not inner.get("description"):
                paths.append(path)
        return paths

    assert schema()["additionalProperties"] is False
    assert undescribed(schema(), "") == []


def test_every_value_is_in_the_table_of_changes() -> None:
    # Values that are on by default have their own tests.
    known = {path for path, _, _ in CHANGES} | {"crds.install", "networkPolicy.enabled", "global"}
    assert sorted(known) == sorted(leaves(schema()))


@pytest.mark.parametrize(("path", "value", "fragment"), CHANGES, ids=[row[0] for row in CHANGES])
def test_a_changed_value_changes_the_manifests(
    control_plane: Kubernetes, path: str, value: Any, fragment: str
) -> None:
    before: dict[str, Any] = {}
    for beginning, required in REQUIRED.items():
        if path.startswith(beginning) and path not in required:
            before |= required
    assert fragment not in render(control_plane, *set_words(before))
    assert fragment in render(control_plane, *set_words(before | {path: value}))


def kinds(kubernetes: Kubernetes, *args: str) -> set[tuple[str, str]]:
    objects = manifests(kubernetes, *args)
    return {(one["kind"], one["metadata"]["name"]) for one in objects}


def test_without_the_crds_the_roles_for_their_users_are_left_out_too(
    control_plane: Kubernetes,
) -> None:
    missing = kinds(control_plane) - kinds(control_plane, "--set=crds.install=false")
    assert missing == {
        ("CustomResourceDefinition", "inferencepools.baton.dev"),
        ("CustomResourceDefinition", "poolscalers.baton.dev"),
        ("ClusterRole", "baton-pools-edit"),
        ("ClusterRole", "baton-pools-view"),
    }


@pytest.mark.parametrize(("path", "value", "where", "message"), REFUSED)
def test_an_invalid_value_is_refused_with_its_path(
    control_plane: Kubernetes, path: str, value: Any, where: str, message: str
) -> None:
    with pytest.raises(CommandFailed) as refused:
        render(control_plane, *set_words({path: value}))
    [line] = [one for one in refused.value.error.splitlines() if one.startswith("- at ")]
    assert line.startswith(f"- at '{where}': ")
    assert message in line


def test_an_old_cluster_is_refused(control_plane: Kubernetes) -> None:
    with pytest.raises(CommandFailed, match=r"kubeVersion: >=1\.30\.0-0"):
        render(control_plane, "--kube-version=1.29.0")
    assert render(control_plane, "--kube-version=1.30.0-gke.1")


def test_the_chart_has_baton_s_version(control_plane: Kubernetes) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert f"--node-image=baton-node:{version}\n" in render(control_plane)


def test_pools_network_policies_find_the_operator_by_its_label(control_plane: Kubernetes) -> None:
    objects = manifests(control_plane)
    deployment = one_of(objects, "Deployment")
    label = {"app.kubernetes.io/name": "baton-operator"}
    assert label.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    service = one_of(objects, "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_registry_prefixes_baton_s_images_but_not_redis(
    control_plane: Kubernetes,
) -> None:
    """`make images` builds exactly these names for a registry."""
    args = ("--set=images.registry=registry.example/team/", "--set=images.tag=1.2.3")
    deployment = one_of(manifests(control_plane, *args), "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/team/baton-operator:1.2.3"
    assert [one for one in container["args"] if "-image=" in one] == [
        "--node-image=registry.example/team/baton-node:1.2.3",
        "--sim-image=registry.example/team/baton-sim:1.2.3",
        "--router-image=registry.example/team/baton-router:1.2.3",
        f"--redis-image={values()['images']['redis']}",
    ]


def test_an_operator_has_five_minutes_to_start_and_its_last_log_lines_are_kept(
    control_plane: Kubernetes,
) -> None:
    deployment = one_of(manifests(control_plane), "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["httpGet"] == container["livenessProbe"]["httpGet"]
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 300
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize(("replicas", "strategy", "elects"), [
    (1, {"type": "Recreate"}, False), (2, ROLLING, True),
])  # fmt: skip
def test_one_operator_is_recreated_and_several_elect_a_leader(
    control_plane: Kubernetes, replicas: int, strategy: dict[str, Any], elects: bool
) -> None:
    objects = manifests(control_plane, f"--set=operator.replicas={replicas}")
    spec = one_of(objects, "Deployment")["spec"]
    assert spec["strategy"] == strategy
    [container] = spec["template"]["spec"]["containers"]
    assert ("--leader-elect" in container["args"]) is elects
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert (("Role", "baton-operator-lease") in names) is elects


def test_several_operators_are_evicted_one_at_a_time(control_plane: Kubernetes) -> None:
    assert ("PodDisruptionBudget", OPERATOR) not in kinds(control_plane)
    objects = manifests(control_plane, "--set=operator.replicas=2")
    budget = one_of(objects, "PodDisruptionBudget")["spec"]
    assert budget["selector"] == one_of(objects, "Deployment")["spec"]["selector"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_several_operators_prefer_different_machines_unless_affinity_is_set(
    control_plane: Kubernetes,
) -> None:
    def affinity(*args: str) -> Any:
        deployment = one_of(manifests(control_plane, *args), "Deployment")["spec"]
        return deployment["template"]["spec"].get("affinity"), deployment["selector"]

    several = "--set=operator.replicas=2"
    assert affinity()[0] is None
    preferred, selector = affinity(several)
    [rule] = preferred["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert rule["podAffinityTerm"] == {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": selector,
        "matchLabelKeys": ["pod-template-hash"],
    }
    own: dict[str, Any] = {"nodeAffinity": {}}
    assert affinity(several, *set_words({"operator.affinity": own}))[0] == own


def operator_policies(kubernetes: Kubernetes, *args: str) -> tuple[list[Manifest], Place]:
    """The chart's NetworkPolicies, and the operator's pod as their target."""
    objects = manifests(kubernetes, *args)
    labels = one_of(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    return policies, Place("baton-system", labels)


PROMETHEUS = Place("monitoring", {"app.kubernetes.io/name": "prometheus"})
NEIGHBOUR = Place("baton-system", {"app": "neighbour"})


@pytest.mark.parametrize(("args", "callers"), [
    ((), [PROMETHEUS, NEIGHBOUR]),
    (set_words({"networkPolicy.monitoring": [MONITORING]}), [PROMETHEUS]),
], ids=["default", "monitoring"])  # fmt: skip
def test_the_network_policy_allows_only_metrics_and_only_from_monitoring_if_given(
    control_plane: Kubernetes, args: list[str], callers: list[Place]
) -> None:
    policies, operator = operator_policies(control_plane, *args)
    places = (PROMETHEUS, NEIGHBOUR)
    assert [place for place in places if may_connect(policies, place, operator, 8081)] == callers
    assert not any(may_connect(policies, one, operator, 8080) for one in places)


def test_the_operator_s_network_policy_can_be_disabled(control_plane: Kubernetes) -> None:
    assert len(operator_policies(control_plane)[0]) == 1
    assert operator_policies(control_plane, "--set=networkPolicy.enabled=false")[0] == []


def test_the_operator_s_network_policy_names_the_ports_that_the_pod_opens(
    control_plane: Kubernetes,
) -> None:
    objects = manifests(control_plane)
    [container] = one_of(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"health": 8080, "metrics": 8081}
    assert container["startupProbe"]["httpGet"]["port"] == "health"
    assert f"--metrics-port={ports['metrics']}" in container["args"]


def test_the_pool_in_the_notes_is_valid_and_fits_a_small_node(control_plane: Kubernetes) -> None:
    arguments = ("install", "baton", str(CHART), "--dry-run=client", "--namespace=baton-system")
    notes = control_plane.helm(*arguments).partition("NOTES:")[2]
    text = textwrap.dedent(notes.partition("<<'END'\n")[2].partition("    END\n")[0])
    resource = yaml.safe_load(text)
    resource["metadata"] |= {"namespace": "default", "uid": "1"}
    pool = read_pool(resource, INSTALLATION, CREDENTIALS)
    cpus = [
        container["resources"]["requests"]["cpu"]
        for template in templates(build_pool(pool)).values()
        for container in containers(template)
    ]
    assert len(cpus) == 5
    assert set(cpus) == {"50m"}
    assert "kubectl scale bscaler/NAME-decode" in notes
