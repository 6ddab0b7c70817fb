"""A pool that scales itself to its latency targets: nodes move between the roles with the load and
go when it ends. If allowed, an idle pool scales to zero and back for a request, which is held.

Each answer must have the ids of an undisturbed `baton up`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.load import Shape
from tests.cluster.machine.client import Kubernetes
from tests.cluster.scaled_pool import ROLES, Loads, Report, nodes_of, scaled_pool
from tests.support.clients.http import Json
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import NODE_MEMORY, sim_spec
from tests.support.needs import needs
from tests.support.pools.baton_up import Pool

pytestmark = pytest.mark.timeout(1200)

GPU = "nvidia.com/gpu"
BUDGET, MOST = 4, 3  # GPUs of the pool, nodes of a role
# A prefill node computes 500 tokens/s, less than one of these prompts per second. A decode node
# meets the ITL target with four of these answers at once.
TIMES = ("--sim-prefill-ms-per-token=2", "--sim-decode-ms=10", "--sim-decode-ms-per-seq=20")
TARGETS = {"ttftMs": 2000, "itlMs": 100}
PROMPTS = Shape(clients=6, prompt=600, tokens=8)
ANSWERS = Shape(clients=9, prompt=40, tokens=80)
ONE = Shape(clients=1, tokens=24)
# The planner's memory of the load, and the time before an unneeded node goes.
WINDOW_S = 10


@pytest.fixture(scope="module")
def gpus(cluster: Kubernetes) -> Iterator[None]:
    needs("own_cluster")
    for node in cluster.nodes:
        cluster.set_gpus(node, BUDGET)
    yield
    for node in cluster.nodes:
        cluster.set_gpus(node, 0)


@pytest.fixture(scope="module")
def pool(cluster: Kubernetes, gpus: None) -> Iterator[ClusterPool]:
    spec = sim_spec()
    spec["engine"]["extraArgs"] = list(TIMES)
    for role in ROLES:
        limits = {**NODE_MEMORY["limits"], GPU: "1"}
        spec[role]["resources"] = {**NODE_MEMORY, "limits": limits}
    spec["gpuBudget"] = BUDGET
    spec["autoscaling"] = {
        "mode": "auto",
        "targets": TARGETS,
        **{role: {"min": 1, "max": MOST} for role in ROLES},
        "scaleDown": {"stabilizationSeconds": WINDOW_S, "nodes": 2},
    }
    with scaled_pool(cluster, "auto", spec) as running:
        yield running


@pytest.fixture(scope="module")
def loads(pool: ClusterPool, reference_pool: Pool) -> Loads:
    return Loads(pool, [reference_pool.url])


def last_decision(pool: ClusterPool) -> Json:
    """The planner's last decision."""
    found: Json = pool.read("bpool", pool.name)["status"]["autoscaling"]
    return found


def held_gpus(pool: ClusterPool) -> int:
    """The GPUs of all scheduled node pods that have not ended; each has one."""
    args = ("pods", "-l", f"baton.dev/pool={pool.name},baton.dev/component in (prefill,decode)")
    pods = pool.read(*args)["items"]
    return sum(
        "nodeName" in pod["spec"] and pod["status"]["phase"] in ("Pending", "Running")
        for pod in pods
    )


def wait_for(pool: ClusterPool, prefill: int, decode: int) -> list[str]:
    """Wait for these numbers of nodes, and return the planner's reasons until then. The pool must
    never hold more GPUs than its budget."""
    reasons: list[str] = []

    def reached() -> bool:
        assert held_gpus(pool) <= BUDGET, pool.describe()
        decision = last_decision(pool)
        assert decision["message"], decision
        if decision["reason"] not in reasons[-1:]:
            reasons.append(decision["reason"])
        return nodes_of(pool) == {"prefill": prefill, "decode": decode}

    try:
        pool.wait(reached, f"have {prefill} prefill and {decode} decode nodes")
    except AssertionError as error:
        error.add_note(f"the planner's reasons by then: {reasons}")
        raise
    return reasons


def test_nodes_move_between_the_roles_with_the_load_and_go_when_it_ends(
    pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    with loads.running("auto: heavy prompts", record_property, PROMPTS):
        reasons = wait_for(pool, MOST, BUDGET - MOST)
    with loads.running("auto: long answers", record_property, ANSWERS):
        reasons += wait_for(pool, BUDGET - MOST, MOST)
    reasons += wait_for(pool, 1, 1)
    record_property("scaling", f"auto: reasons {', '.join(reasons)}")


def is_ready_and_serving(pool: ClusterPool) -> bool:
    """A pool that is scaled to zero counts as ready and serving."""
    conditions = pool.conditions()
    return all(conditions[kind]["status"] == "True" for kind in ("Ready", "Serving"))


@contextmanager
def scaling_to_zero(pool: ClusterPool) -> Iterator[None]:
    """Let the pool scale to zero after WINDOW_S seconds without a request."""
    pool.patch({"autoscaling": {"scaleToZeroAfterSeconds": WINDOW_S}})
    try:
        yield
    finally:
        pool.patch({"autoscaling": {"scaleToZeroAfterSeconds": None}})


def test_an_idle_pool_scales_to_zero_and_the_next_request_is_held_and_answered(
    pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    with scaling_to_zero(pool):
        wait_for(pool, 0, 0)
        pool.wait(lambda: held_gpus(pool) == 0, "have no pod left")
        pool.wait(lambda: is_ready_and_serving(pool), "be ready and served")
        with loads.running("auto: a request to a pool without nodes", record_property, ONE):
            pool.wait(lambda: min(nodes_of(pool).values()) > 0, "have nodes of both roles again")
