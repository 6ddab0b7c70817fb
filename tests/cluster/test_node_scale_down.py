"""The removal of nodes, by any cause, costs clients neither a token nor an error.

Clients stream all the time. Each answer must have the ids of an undisturbed `baton up`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.cluster.external_metrics import external_metrics
from tests.cluster.load import Shape
from tests.cluster.machine.client import Kubernetes
from tests.cluster.scaled_pool import (
    DECODE_MS,
    PREFILL_MS_PER_TOKEN,
    ROLES,
    Loads,
    Report,
    nodes_of,
    scaled_pool,
    settle,
)
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import sim_spec
from tests.support.needs import needs
from tests.support.pools.baton_up import Pool

pytestmark = pytest.mark.timeout(1200)

# The roles that shrink from two nodes to one, in this order.
SHRINKING_ROLES = ("decode", "prefill", "decode")
LONG_ROUNDS, LONG_LOADS = 10, 5
SHAPE = Shape(clients=6, tokens=80)
# These streams take longer than a drain waits: 60 s.
ENDLESS = Shape(clients=4, tokens=3200)
SCALER = "bscaler/shrinks-decode"
PER_NODE = 10  # the HPA's target value per node


@pytest.fixture(scope="module")
def pool(cluster: Kubernetes) -> Iterator[ClusterPool]:
    needs("own_cluster")
    spec = sim_spec(
        prefill=2, decode=2, decode_ms=DECODE_MS, prefill_ms_per_token=PREFILL_MS_PER_TOKEN
    )
    with scaled_pool(cluster, "shrinks", spec) as running:
        yield running


@pytest.fixture(scope="module")
def loads(pool: ClusterPool, reference_pool: Pool) -> Loads:
    return Loads(pool, [reference_pool.url])


@pytest.fixture
def ready_pool(pool: ClusterPool) -> ClusterPool:
    settle(pool, 2, 2)
    return pool


def shrink_and_grow(pool: ClusterPool, roles: Iterable[str]) -> None:
    """For each role in turn, lower the pool's replicas by one and raise them again. The new node
    may start while the next role shrinks."""
    for role in roles:
        wait_for_two(pool, role)
        before = names(pool, role)
        pool.patch({role: {"replicas": 1}})
        wait_for_one(pool, role)
        [gone] = before - names(pool, role)
        wait_for_drain_event(pool, gone)
        pool.patch({role: {"replicas": 2}})


def wait_for_two(pool: ClusterPool, role: str) -> None:
    pool.wait(lambda: nodes_of(pool)[role] == 2, f"have two {role} nodes")


def wait_for_one(pool: ClusterPool, role: str) -> None:
    pool.wait(lambda: len(names(pool, role)) == 1, f"have one {role} node")


def wait_for_drain_event(pool: ClusterPool, gone: str) -> None:
    """Check by the operator's events that the removed node is the one that was drained."""
    pool.wait(lambda: gone in drained_nodes(pool), f"report that {gone} was drained", 60)


def names(pool: ClusterPool, role: str) -> set[str]:
    return {pod.name for pod in pool.pods(role)}


def drained_nodes(pool: ClusterPool) -> list[str]:
    """Names of the nodes in the operator's events about drains."""
    events = pool.read("events.events.k8s.io")["items"]
    notes = [event["note"] for event in events if event["reason"] == "Draining"]
    return [note.split(" node ")[1].split()[0] for note in notes]


def test_scaling_down_costs_no_token(
    ready_pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    with loads.running(f"scaled down {len(SHRINKING_ROLES)} times", record_property, SHAPE):
        shrink_and_grow(ready_pool, SHRINKING_ROLES)


def test_draining_a_cluster_node_costs_no_token(
    cluster: Kubernetes, ready_pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    safe, drained = cluster.nodes
    args = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=390s")
    assert drained in hosts(ready_pool), "the node runs no pod of the pool"
    try:
        with loads.running("kubectl drain", record_property, SHAPE):
            cluster.kubectl("drain", drained, *args)
            settle(ready_pool, 2, 2)
            assert hosts(ready_pool) == {safe}
    finally:
        cluster.kubectl("uncordon", drained)


def hosts(pool: ClusterPool) -> set[str]:
    """The cluster's nodes on which the pool's nodes and store run."""
    components = (*ROLES, "kv-index", "kv-data")
    return {pod.host for component in components for pod in pool.pods(component)}


def test_deleted_pods_that_get_sigterm_cost_no_token(
    ready_pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    with loads.running("SIGTERM to pods", record_property, SHAPE):
        victims = [ready_pool.busiest(role).name for role in ROLES]
        ready_pool.kubectl("delete", "pods", *victims)  # waits until they are gone


@pytest.fixture
def externally_scaled(ready_pool: ClusterPool) -> Iterator[ClusterPool]:
    """The pool with replicas from PoolScalers, two for each role at first."""
    ready_pool.patch({"autoscaling": {"mode": "external"}})
    ready_pool.wait(
        lambda: bool(ready_pool.kubectl("get", SCALER, "--ignore-not-found")), "have a scaler"
    )
    yield ready_pool
    ready_pool.patch({"autoscaling": None})


def test_kubectl_scale_costs_no_token(
    externally_scaled: ClusterPool, loads: Loads, record_property: Report
) -> None:
    pool = externally_scaled
    with loads.running("kubectl scale", record_property, SHAPE):
        pool.kubectl("scale", SCALER, "--replicas=1")
        settle(pool, 2, 1)


def test_an_autoscaler_with_an_external_metric_costs_no_token(
    cluster: Kubernetes,
    externally_scaled: ClusterPool,
    loads: Loads,
    record_property: Report,
    tmp_path: Path,
) -> None:
    pool = externally_scaled
    with external_metrics(cluster, pool.namespace, tmp_path) as metrics:
        metrics.value = 2 * PER_NODE
        pool.kubectl("create", "-f", "-", stdin=json.dumps(autoscaler()))
        try:
            with loads.running("an HPA on an external metric", record_property, SHAPE):
                metrics.value = PER_NODE
                settle(pool, 2, 1)
            assert metrics.requests > 0
        finally:
            pool.kubectl("delete", "hpa", "outside", "--ignore-not-found")


def autoscaler() -> dict[str, object]:
    target = {"apiVersion": "baton.dev/v1alpha1", "kind": "PoolScaler", "name": "shrinks-decode"}
    external = {
        "metric": {"name": "waiting"},
        "target": {"type": "AverageValue", "averageValue": str(PER_NODE)},
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "outside"},
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": 1,
            "maxReplicas": 2,
            "metrics": [{"type": "External", "external": external}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_scaling_down_fifty_times_costs_no_token(
    ready_pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    for number in range(LONG_LOADS):
        what = f"scaled down {LONG_ROUNDS} times, {number + 1} of {LONG_LOADS}"
        with loads.running(what, record_property, SHAPE):
            shrink_and_grow(ready_pool, islice(cycle(ROLES), LONG_ROUNDS))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_streams_that_outlast_a_drain_move_and_lose_no_token(
    ready_pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    with loads.running("scaled down under endless streams", record_property, ENDLESS) as load:
        ready_pool.patch({"decode": {"replicas": 1}})
        wait_for_one(ready_pool, "decode")
        load.wait_tokens()
    assert ready_pool.moved(load.requests()) > 0
    ready_pool.patch({"decode": {"replicas": 2}})
