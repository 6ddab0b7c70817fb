"""PodDisruptionBudgets: how many pods of each role an eviction must leave."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.builders import build_pool
from baton_operator.builders.disruption import build_budgets
from tests.support.kubernetes.manifests import sample_pool, templates


@pytest.mark.parametrize(("replicas", "kept"), [(1, 0), (2, 1), (9, 1)])
@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_budget_keeps_one_pod_of_several_and_none_of_one(
    role: str, replicas: int, kept: int
) -> None:
    changes: dict[str, Any] = {role: {"replicas": replicas}}
    budgets = build_budgets(sample_pool("sim", **changes))
    found = {budget["metadata"]["name"]: budget["spec"]["minAvailable"] for budget in budgets}
    others = {"demo-prefill": 0, "demo-decode": 0, "demo-router": 0}
    assert found == others | {f"demo-{role}": kept}


def test_the_budget_of_a_role_without_nodes_keeps_none() -> None:
    found = build_budgets(sample_pool("sim", prefill={"replicas": 0}))[0]
    assert found["spec"]["minAvailable"] == 0


def test_a_budget_selects_exactly_the_pods_of_its_role() -> None:
    pool = sample_pool("sim")
    pods = {name: one["metadata"]["labels"] for name, one in templates(build_pool(pool)).items()}
    for budget in build_budgets(pool):
        labels = budget["spec"]["selector"]["matchLabels"]
        chosen = [name for name, own in pods.items() if labels.items() <= own.items()]
        component = budget["metadata"]["labels"]["baton.dev/component"]
        assert [pods[name]["baton.dev/component"] for name in chosen] == [component]


def test_a_budget_does_not_change_with_the_revision() -> None:
    old = build_budgets(sample_pool("sim"))
    assert build_budgets(sample_pool("sim", engine={"kind": "sim", "blockSize": 32})) == old


def test_pods_that_are_not_ready_may_always_be_evicted() -> None:
    for budget in build_budgets(sample_pool("sim")):
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
