"""The operator's permissions on a cluster, as the API server's own authorizer decides them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import yaml

from baton_operator.builders import build_pool
from baton_operator.kube.permissions import CLUSTER_RULES, LEASE_RULES, POOL_RULES, PermissionRule
from tests.cluster.machine.client import Kubernetes
from tests.support.kubernetes.chart import OPERATOR, Manifest, manifests, one_of
from tests.support.kubernetes.documents import ROOT
from tests.support.kubernetes.manifests import SAMPLES, sample_pool, templates
from tests.support.needs import needs

MANAGED = "get list watch create patch delete"
# Where verbs are allowed. `pools`: in namespaces with managed pools; `all`: only for an operator of
# all namespaces; `own`: in the operator's own namespace; `nowhere`: in none.
Where = Literal["pools", "all", "own", "nowhere"]


class Row(NamedTuple):
    """Verbs on a resource, written RESOURCE[/SUBRESOURCE][.GROUP], for the object `name` or, if "",
    for any."""

    verbs: str
    resource: str
    where: Where
    name: str = ""


ROWS = (
    Row("get list watch", "inferencepools.baton.dev", "pools"),
    Row("patch", "inferencepools/status.baton.dev", "pools"),
    Row("create update patch delete deletecollection", "inferencepools.baton.dev", "nowhere"),
    Row("update delete", "inferencepools/status.baton.dev", "nowhere"),
    Row("update patch", "inferencepools/finalizers.baton.dev", "nowhere"),
    Row("get create patch", "secrets", "pools"),
    Row("list watch update delete deletecollection", "secrets", "nowhere"),
    Row(MANAGED, "services", "pools"),
    Row("update deletecollection proxy", "services", "nowhere"),
    Row("get create", "services/proxy", "nowhere"),
    Row(MANAGED, "deployments.apps", "pools"),
    Row("update deletecollection", "deployments.apps", "nowhere"),
    Row("update patch", "deployments/scale.apps", "nowhere"),
    Row("update patch", "deployments/status.apps", "nowhere"),
    Row("create patch delete", "statefulsets.apps", "nowhere"),
    Row("create patch delete", "replicasets.apps", "nowhere"),
    Row("create patch delete", "daemonsets.apps", "nowhere"),
    Row("create patch delete", "jobs.batch", "nowhere"),
    Row("create patch delete", "cronjobs.batch", "nowhere"),
    Row(MANAGED, "networkpolicies.networking.k8s.io", "pools"),
    Row(MANAGED, "ingresses.networking.k8s.io", "pools"),
    Row("create patch delete", "ingressclasses.networking.k8s.io", "nowhere"),
    Row(MANAGED, "httproutes.gateway.networking.k8s.io", "pools"),
    Row("get create patch", "gateways.gateway.networking.k8s.io", "nowhere"),
    Row(MANAGED, "poolscalers.baton.dev", "pools"),
    Row("update deletecollection", "poolscalers.baton.dev", "nowhere"),
    Row("patch", "poolscalers/status.baton.dev", "pools"),
    Row("update delete", "poolscalers/status.baton.dev", "nowhere"),
    Row("update patch", "poolscalers/scale.baton.dev", "nowhere"),
    Row(MANAGED, "poddisruptionbudgets.policy", "pools"),
    Row("update deletecollection", "poddisruptionbudgets.policy", "nowhere"),
    Row("get list watch patch", "pods", "pools"),
    Row("create update delete deletecollection", "pods", "nowhere"),
    Row("update patch", "pods/status", "nowhere"),
    Row("get create", "pods/exec", "nowhere"),
    Row("get create", "pods/attach", "nowhere"),
    Row("get create", "pods/portforward", "nowhere"),
    Row("get", "pods/log", "nowhere"),
    Row("create", "pods/eviction", "nowhere"),
    Row("patch", "pods/ephemeralcontainers", "nowhere"),
    Row("create list", "events.events.k8s.io", "pools"),
    Row("create patch", "events", "nowhere"),
    Row("get watch delete", "events.events.k8s.io", "nowhere"),
    Row("create", "leases.coordination.k8s.io", "own"),
    Row("get update", "leases.coordination.k8s.io", "own", "baton-operator"),
    Row("get update", "leases.coordination.k8s.io", "nowhere", "foreign-lease"),
    Row("list patch delete", "leases.coordination.k8s.io", "nowhere"),
    Row("list watch", "customresourcedefinitions.apiextensions.k8s.io", "all"),
    Row("create patch delete", "customresourcedefinitions.apiextensions.k8s.io", "nowhere"),
    Row("get list create patch delete", "nodes", "nowhere"),
    Row("get create", "nodes/proxy", "nowhere"),
    Row("get list create patch delete", "namespaces", "nowhere"),
    Row("get list create patch", "configmaps", "nowhere"),
    Row("get create patch", "serviceaccounts", "nowhere"),
    Row("create", "serviceaccounts/token", "nowhere"),
    Row("get create delete", "persistentvolumeclaims", "nowhere"),
    Row("get create delete", "persistentvolumes", "nowhere"),
    Row("create patch escalate bind", "roles.rbac.authorization.k8s.io", "nowhere"),
    Row("create patch", "rolebindings.rbac.authorization.k8s.io", "nowhere"),
    Row("create patch escalate bind", "clusterroles.rbac.authorization.k8s.io", "nowhere"),
    Row("create patch", "clusterrolebindings.rbac.authorization.k8s.io", "nowhere"),
    Row("impersonate", "users", "nowhere"),
    Row("impersonate", "groups", "nowhere"),
    Row("impersonate", "serviceaccounts", "nowhere"),
    Row("approve", "signers.certificates.k8s.io", "nowhere"),
    Row("create", "tokenreviews.authentication.k8s.io", "nowhere"),
    Row("create", "mutatingwebhookconfigurations.admissionregistration.k8s.io", "nowhere"),
    Row("create", "validatingwebhookconfigurations.admissionregistration.k8s.io", "nowhere"),
    Row("create", "priorityclasses.scheduling.k8s.io", "nowhere"),
    Row("*", "*.*", "nowhere"),
)


class AccessCheck(NamedTuple):
    verb: str
    resource: str
    namespace: str
    object_name: str = ""

    def review(self, user: str) -> Manifest:
        name, _, group = self.resource.partition(".")
        resource, _, subresource = name.partition("/")
        attributes = {"verb": self.verb, "group": group, "resource": resource}
        attributes |= {"subresource": subresource, "namespace": self.namespace}
        attributes["name"] = self.object_name
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            # The groups to which the API server adds service accounts.
            "spec": {
                "user": user,
                "groups": ["system:serviceaccounts", "system:authenticated"],
                "resourceAttributes": {key: value for key, value in attributes.items() if value},
            },
        }


def allowed(kubernetes: Kubernetes, namespace: str, checks: list[AccessCheck]) -> set[AccessCheck]:
    user = f"system:serviceaccount:{namespace}:{OPERATOR}"
    reviews = yaml.safe_dump_all(check.review(user) for check in checks)
    answers = kubernetes.kubectl(
        "create", "-o=jsonpath={.status.allowed}{'\\n'}", "-f", "-", stdin=reviews
    )
    decisions = answers.split()
    assert len(decisions) == len(checks)
    return {one for one, answer in zip(checks, decisions, strict=True) if answer == "true"}


def apply_rights(kubernetes: Kubernetes, namespace: str, *args: str) -> None:
    """Apply the chart's service account, roles and bindings, and nothing else of it."""
    needs("own_cluster")  # some of these objects are cluster-wide
    kinds = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ServiceAccount"}
    objects = [
        manifest
        for manifest in manifests(kubernetes, *args, namespace=namespace)
        if manifest["kind"] in kinds
    ]
    kubernetes.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))


def access_checks(namespaces: Iterable[str]) -> list[tuple[AccessCheck, Where]]:
    return [
        (AccessCheck(verb, row.resource, namespace, row.name), row.where)
        for row in ROWS
        for verb in row.verbs.split()
        for namespace in ("", *namespaces)
    ]


def test_the_table_of_rights_is_long() -> None:
    assert len(ROWS) >= 40
    assert len(access_checks([])) > 100


def test_an_operator_of_all_namespaces_has_exactly_the_rights_of_the_table(
    control_plane: Kubernetes, namespace: str
) -> None:
    apply_rights(control_plane, namespace, "--set=operator.replicas=2")
    table = access_checks([namespace, "default"])
    expected = {
        check
        for check, where in table
        if where in {"pools", "all"} or (where == "own" and check.namespace == namespace)
    }
    try:
        assert allowed(control_plane, namespace, [check for check, _ in table]) == expected
    finally:
        both = ("clusterrole", "clusterrolebinding")
        control_plane.kubectl("delete", *(f"{kind}/{OPERATOR}" for kind in both))


def test_an_operator_of_some_namespaces_has_no_rights_in_others(
    control_plane: Kubernetes, namespace: str
) -> None:
    """It may not read Secrets even in its own namespace."""
    needs("own_cluster")
    watched = control_plane.new_namespace()
    args = (f'--set-json=watchNamespaces=["{watched}"]', "--set=operator.replicas=2")
    apply_rights(control_plane, namespace, *args)
    table = access_checks([watched, namespace, "default"])
    expected = {
        check
        for check, where in table
        if (where == "pools" and check.namespace == watched)
        or (where == "own" and check.namespace == namespace)
    }
    assert AccessCheck("get", "secrets", namespace) not in expected
    assert allowed(control_plane, namespace, [check for check, _ in table]) == expected
    control_plane.delete_namespace(watched)


# Verbs by group, resource and object names.
RuleTable = dict[tuple[str, str, tuple[str, ...]], set[str]]


def rules_of(role: Manifest) -> RuleTable:
    table: RuleTable = {}
    for rule in role["rules"]:
        assert rule.keys() - {"resourceNames"} == {"apiGroups", "resources", "verbs"}
        names = tuple(rule.get("resourceNames", ()))
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert (group, resource, names) not in table
                table[group, resource, names] = set(rule["verbs"])
    return table


def as_table(rules: Iterable[PermissionRule]) -> RuleTable:
    return {(rule.group, rule.resource, rule.names): set(rule.verbs) for rule in rules}


def test_the_chart_s_rules_are_those_of_the_operator_s_permissions(
    control_plane: Kubernetes,
) -> None:
    objects = manifests(control_plane, "--set=operator.replicas=2")
    assert rules_of(one_of(objects, "ClusterRole")) == as_table((*POOL_RULES, *CLUSTER_RULES))
    assert rules_of(one_of(objects, "Role", f"{OPERATOR}-lease")) == as_table(LEASE_RULES)
    objects = manifests(control_plane, '--set-json=watchNamespaces=["blue"]')
    assert rules_of(one_of(objects, "Role")) == as_table(POOL_RULES)


def test_no_rule_has_a_wildcard(control_plane: Kubernetes) -> None:
    for manifest in manifests(control_plane, "--set=operator.replicas=2"):
        if manifest["kind"] in {"Role", "ClusterRole"}:
            assert "*" not in json.dumps(manifest["rules"])


def with_token(
    kubernetes: Kubernetes, namespace: str, pods: dict[str, Manifest]
) -> dict[str, bool]:
    """Whether each pod of these templates, as the API server admits it, gets an API token."""
    pod_manifests = [
        {"apiVersion": "v1", "kind": "Pod", **template}
        | {"metadata": template["metadata"] | {"name": name, "namespace": namespace}}
        for name, template in pods.items()
    ]
    path = "{.metadata.name} {.spec.volumes[*].projected.sources[*].serviceAccountToken}{'\\n'}"
    args = ("create", "--dry-run=server", f"-o=jsonpath={path}", "-f", "-")
    # JSON, because kubectl's YAML reads a digest such as 12e34567 as a number.
    stdin = "".join(f"{json.dumps(manifest)}\n---\n" for manifest in pod_manifests)
    lines = kubernetes.kubectl(*args, stdin=stdin).splitlines()
    return {line.split()[0]: len(line.split()) > 1 for line in lines}


def test_only_the_operator_s_pod_has_an_api_token(
    control_plane: Kubernetes, namespace: str
) -> None:
    apply_rights(control_plane, namespace, f'--set-json=watchNamespaces=["{namespace}"]')
    operator = one_of(manifests(control_plane, namespace=namespace), "Deployment")
    pods = {"operator": operator["spec"]["template"]}
    for number, sample in enumerate(SAMPLES):
        pod_templates = templates(build_pool(sample_pool(sample)))
        pods |= {f"{name}-{number}": template for name, template in pod_templates.items()}
    assert len(pods) > 3 * len(SAMPLES)
    tokens = with_token(control_plane, namespace, pods)
    assert tokens == dict.fromkeys(pods, False) | {"operator": True}


# A row of docs/security.md: | `RESOURCE.GROUP` named `NAME` | VERBS | WHERE | ...
DOCUMENTED = re.compile(
    r"^\| `([a-z/]+)([a-z.0-9]*)`(?: named `([a-z-]+)`)? \| ([a-z, ]+) \| ([^|]+)"
)


def documented(title: str) -> dict[str, RuleTable]:
    """The rules under a heading, grouped by the table's third column."""
    text = (ROOT / "docs" / "security.md").read_text()
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    tables: dict[str, RuleTable] = {}
    for line in section.splitlines():
        if row := DOCUMENTED.match(line):
            resource, group, name, verbs, where = row.groups()
            table = tables.setdefault(where.strip(), {})
            key = (group.removeprefix("."), resource, (name,) if name else ())
            assert key not in table, line
            table[key] = set(verbs.split(", "))
    return tables


def test_the_security_page_lists_the_rights_that_the_chart_grants(
    control_plane: Kubernetes,
) -> None:
    page = documented("The operator's rights")
    assert page.keys() == {"namespaces of pools", "the cluster", "its own namespace"}
    everywhere = manifests(control_plane, "--set=operator.replicas=2")
    granted_all = page["namespaces of pools"] | page["the cluster"]
    assert rules_of(one_of(everywhere, "ClusterRole")) == granted_all
    lease = one_of(everywhere, "Role", f"{OPERATOR}-lease")
    assert rules_of(lease) == page["its own namespace"]
    some = manifests(control_plane, '--set-json=watchNamespaces=["blue"]')
    assert rules_of(one_of(some, "Role")) == page["namespaces of pools"]


def test_the_security_page_lists_the_rights_that_the_chart_gives_users(
    control_plane: Kubernetes,
) -> None:
    page, objects = documented("Users"), manifests(control_plane)
    assert (
        rules_of(one_of(objects, "ClusterRole", "baton-pools-edit")) == page["`edit` and `admin`"]
    )
    viewers = page["`view`, `edit` and `admin`"]
    assert rules_of(one_of(objects, "ClusterRole", "baton-pools-view")) == viewers


def test_only_the_operator_is_bound_to_roles(control_plane: Kubernetes) -> None:
    for args in (("--set=operator.replicas=2",), ('--set-json=watchNamespaces=["blue"]',)):
        objects = manifests(control_plane, *args)
        bindings = [one for one in objects if one["kind"].endswith("Binding")]
        assert bindings
        for one in bindings:
            assert [subject["name"] for subject in one["subjects"]] == [OPERATOR]
