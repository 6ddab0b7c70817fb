"""Scale-down and roll-out of nodes that run a real model, in bfloat16, change no token either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.load import Shape
from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.torch_pods import torch_pod_overrides
from tests.cluster.scaled_pool import ROLES, Loads, Report, scaled_pool, settle
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import torch_spec, torch_up
from tests.support.needs import needs
from tests.support.pools.baton_up import Pool

pytestmark = pytest.mark.timeout(1200)

SHAPE = Shape(clients=3, prompt=160, tokens=120)


@pytest.fixture(scope="module")
def pool(cluster: Kubernetes, pod_model: Path) -> Iterator[ClusterPool]:
    needs("own_cluster")
    spec = torch_spec(str(pod_model), torch_pod_overrides(pod_model))
    spec["decode"]["replicas"] = 2
    # The environment and the model are hostPath volumes, which `restricted` does not allow.
    with scaled_pool(cluster, "torch", spec, labels={}) as running:
        yield running


@pytest.fixture(scope="module")
def loads(pool: ClusterPool, pod_model: Path) -> Iterator[Loads]:
    with Pool(torch_up(pod_model)) as calm:
        yield Loads(pool, [calm.url])


@pytest.mark.long
def test_scaling_a_real_model_down_costs_no_token(
    pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    settle(pool, 1, 2)
    with loads.running("torch: scaled down", record_property, SHAPE):
        pool.patch({"decode": {"replicas": 1}})
        settle(pool, 1, 1)


@pytest.mark.long
def test_rolling_a_real_model_out_costs_no_token(
    pool: ClusterPool, loads: Loads, record_property: Report
) -> None:
    pool.patch({"decode": {"replicas": 1}})
    settle(pool, 1, 1)
    before = {pod.name for role in ROLES for pod in pool.pods(role)}
    notes = {"metadata": {"annotations": {"example.com/roll": "1"}}}
    with loads.running("torch: rolled out", record_property, SHAPE):
        pool.patch({role: {"podTemplate": notes} for role in ROLES})
        settle(pool, 1, 1)
    assert not before & {pod.name for role in ROLES for pod in pool.pods(role)}
