"""The operator with exactly the rights of `permissions`, which suffice to manage a pool."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton_operator.controller.pool_secret import SECRET_S
from baton_operator.controller.reconcile import UNREADY_AGAIN_S
from baton_operator.kube.permissions import CLUSTER_RULES, LEASE_RULES, POOL_RULES, PermissionRule
from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import SIM, Operator, Pool, until

ACCOUNT = "operator"
SECRET_REPAIR_S = 5 * (SECRET_S + UNREADY_AGAIN_S)
CHILDREN = 17


def rules(permissions: Sequence[PermissionRule]) -> list[dict[str, Any]]:
    return [
        {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
        | ({"resourceNames": list(rule.names)} if rule.names else {})
        for rule in permissions
    ]


def grant(
    cluster: Kubernetes, namespace: str, permissions: Sequence[PermissionRule], *, everywhere: bool
) -> None:
    """Grant the permissions to the service account of `namespace`."""
    prefix = "Cluster" if everywhere else ""
    metadata = {"name": f"operator-{namespace}"}
    if not everywhere:
        metadata["namespace"] = namespace
    api, kind = "rbac.authorization.k8s.io", f"{prefix}Role"
    head = {"apiVersion": f"{api}/v1", "metadata": metadata}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    reference = {"apiGroup": api, "kind": kind, "name": metadata["name"]}
    binding = {"roleRef": reference, "subjects": [subject]}
    for body in (
        {**head, "kind": kind, "rules": rules(permissions)},
        {**head, "kind": f"{kind}Binding", **binding},
    ):
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))


def account(cluster: Kubernetes, namespace: str, folder: Path) -> Path:
    """Create the service account; return its kubeconfig. It has no rights yet."""
    cluster.kubectl("create", "serviceaccount", ACCOUNT, "-n", namespace)
    token = cluster.kubectl("create", "token", ACCOUNT, "-n", namespace).strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    for user in config["users"]:
        user["user"] = {"token": token}
    path = folder / "account.conf"
    path.write_text(json.dumps(config))
    return path


def check_pool_is_managed(operator: Operator, pool: Pool) -> None:
    pool.apply(SIM)
    until(lambda: pool.condition("Applied").get("status") == "True", "condition Applied")
    assert len(pool.children()) == CHILDREN
    pool.kubectl("delete", "service", "pool-router", "--wait=false")
    until(lambda: pool.child("Service", "router"), "the repair")
    pool.kubectl("delete", "secret", "pool-auth", "--wait=false")
    until(lambda: pool.one("Secret/pool-auth"), "the Secret's repair", SECRET_REPAIR_S)

    def events() -> str:
        return pool.kubectl("get", "events.events.k8s.io", "-o", "json")

    until(lambda: "baton.dev/baton-operator" in events(), "its events")
    assert refusals(operator) == []


def refusals(operator: Operator) -> list[str]:
    """The log messages about refused requests. Whole lines would match a 403 in timestamps."""
    messages = [json.loads(line)["message"] for line in operator.log().splitlines()]
    assert messages
    return [message for message in messages if re.search(r"\b403\b|[Ff]orbidden", message)]


def test_the_cluster_wide_rights_suffice_for_pools_in_all_namespaces(
    plane: Kubernetes, pool: Pool, tmp_path: Path
) -> None:
    config = account(plane, pool.namespace, tmp_path)
    grant(plane, pool.namespace, (*POOL_RULES, *CLUSTER_RULES), everywhere=True)
    with Operator(config, tmp_path) as operator:
        check_pool_is_managed(operator, pool)


def test_the_namespaced_rights_suffice_with_leader_election(
    plane: Kubernetes, pool: Pool, tmp_path: Path
) -> None:
    namespace = pool.namespace
    config = account(plane, namespace, tmp_path)
    grant(plane, namespace, (*POOL_RULES, *LEASE_RULES), everywhere=False)
    flags = (f"--namespace={namespace}", "--leader-elect")
    with Operator(config, tmp_path, *flags, system=namespace) as operator:
        check_pool_is_managed(operator, pool)
        plane.kubectl("get", "lease", "baton-operator", "-n", namespace)
