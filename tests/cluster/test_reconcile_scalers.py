"""PoolScalers in a real API server: who may set them, and how the nodes follow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from baton_operator.api.crd import crd, scaler_crd
from tests.cluster.installed import definition
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.cluster.operators import SIM, ApiClient, Body, Operator, Pool, print_log, until

# The planner sets the number of prefill nodes, which its bounds fix at 1.
SCALING: Body = {"mode": "auto", "prefill": {"max": 1}, "decode": {"mode": "external"}}
EXTERNAL: Body = {**SIM, "decode": {"replicas": 2}, "autoscaling": SCALING}
SCALER = "poolscaler/pool-decode"


@pytest.fixture(scope="module")
def operator(
    control_plane: Kubernetes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    with (
        definition(control_plane, crd()),
        definition(control_plane, scaler_crd()),
        Operator(control_plane.kubeconfig, tmp_path_factory.mktemp("operator")) as one,
    ):
        yield one


@pytest.fixture
def pool(
    operator: Operator, control_plane: Kubernetes, api_client: ApiClient, namespace: str
) -> Iterator[Pool]:
    one = Pool(control_plane, api_client, namespace)
    until(lambda: served(one), "the definitions are served")
    one.apply(EXTERNAL)
    until(lambda: nodes(one) == 2, "the nodes")
    yield one
    one.delete()
    print_log(operator)


def served(pool: Pool) -> bool:
    """Whether both kinds are served; a new definition needs a moment until its storage is ready."""
    kinds = ("inferencepools", "poolscalers")
    try:
        for kind in kinds:
            pool.kubectl("get", kind)
    except CommandFailed:
        return False
    return True


def scaler(pool: Pool) -> Body:
    return pool.child("PoolScaler", "decode")


def nodes(pool: Pool) -> int:
    deployment = pool.child("Deployment", "decode")
    return int(deployment["spec"]["replicas"]) if deployment else -1


def scale(pool: Pool) -> Any:
    """The scale subresource, which an autoscaler reads."""
    path = f"/apis/baton.dev/v1alpha1/namespaces/{pool.namespace}/poolscalers/pool-decode/scale"
    return json.loads(pool.kubectl("get", "--raw", path))


def test_a_scaler_starts_with_the_spec_s_replicas_and_reports_the_current_ones(pool: Pool) -> None:
    until(lambda: scale(pool)["status"]["replicas"] == 2, "the status")
    assert scale(pool)["spec"] == {"replicas": 2}
    selector = scale(pool)["status"]["selector"]
    assert selector == "baton.dev/pool=pool,baton.dev/component=decode"
    pods = pool.kubectl("get", "pods", "-l", selector, "-o", "name").split()
    assert len(pods) == 2


def test_nodes_follow_kubectl_scale_instead_of_the_pool_s_own_replicas(pool: Pool) -> None:
    pool.kubectl("scale", SCALER, "--replicas=4")
    until(lambda: nodes(pool) == 4, "four nodes")
    pool.patch({"decode": {"replicas": 9}})
    generation = pool.body()["metadata"]["generation"]
    until(
        lambda: pool.body()["status"]["observedGeneration"] == generation, "the observed generation"
    )
    assert nodes(pool) == 4
    assert pool.body()["status"]["decode"]["desired"] == 4
    pool.kubectl("scale", SCALER, "--replicas=1")
    until(lambda: nodes(pool) == 1, "one node")
    until(lambda: scale(pool)["status"]["replicas"] == 1, "the status")


def test_nodes_follow_a_horizontal_pod_autoscaler(pool: Pool) -> None:
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}
    target = {"apiVersion": "baton.dev/v1alpha1", "kind": "PoolScaler", "name": "pool-decode"}
    body = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "hpa"},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 3,
            "maxReplicas": 5,
            # Nothing measures it here, so only the bounds have an effect.
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }
    pool.kubectl("create", "-f", "-", stdin=json.dumps(body))
    until(lambda: nodes(pool) == 3, "the autoscaler's minimum")
    bounds = '--patch={"spec":{"minReplicas":1,"maxReplicas":1}}'
    pool.kubectl("patch", "hpa", "hpa", "--type=merge", bounds)
    until(lambda: nodes(pool) == 1, "the autoscaler's maximum")


def test_a_deleted_scaler_is_recreated_with_the_current_replicas(pool: Pool) -> None:
    pool.kubectl("scale", SCALER, "--replicas=3")
    until(lambda: nodes(pool) == 3, "three nodes")
    old = scaler(pool)["metadata"]["uid"]
    pool.kubectl("delete", SCALER, "--wait=false")
    until(lambda: scaler(pool).get("metadata", {}).get("uid", old) != old, "the new one")
    assert scaler(pool)["spec"] == {"replicas": 3}
    assert nodes(pool) == 3


def test_without_autoscaling_the_scaler_is_deleted_and_the_pool_s_replicas_apply(
    pool: Pool,
) -> None:
    pool.kubectl("scale", SCALER, "--replicas=3")
    until(lambda: nodes(pool) == 3, "three nodes")
    pool.apply({**SIM, "decode": {"replicas": 1}})
    until(lambda: not scaler(pool), "the scaler's end")
    until(lambda: nodes(pool) == 1, "the pool's own replicas")


def test_a_foreign_scaler_of_the_same_name_is_reported_and_the_pool_s_replicas_apply(
    pool: Pool,
) -> None:
    foreign = {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "PoolScaler",
        "metadata": {"name": "pool-prefill"},
        "spec": {"replicas": 7},
    }
    pool.kubectl("create", "-f", "-", stdin=json.dumps(foreign))
    pool.patch({"autoscaling": {"mode": "external"}})
    until(lambda: pool.condition("Applied")["status"] == "False", "condition Applied")
    assert "PoolScaler pool-prefill" in pool.condition("Applied")["message"]
    assert pool.child("Deployment", "prefill")["spec"]["replicas"] == 1
