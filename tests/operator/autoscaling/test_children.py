"""What autoscaling changes in a pool's children, besides the number of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.api.pool import Pool
from baton_operator.builders.disruption import build_budgets
from baton_operator.builders.router import build_router
from tests.support.kubernetes.manifests import sample_pool

BOUNDS: dict[str, Any] = {"prefill": {"max": 4}, "decode": {"max": 4}}


def scaled(mode: str = "auto", replicas: int = 1, **autoscaling: Any) -> Pool:
    count = {"replicas": replicas}
    scaling = {"mode": mode, **BOUNDS, **autoscaling}
    return sample_pool("sim", autoscaling=scaling, prefill=count, decode=count)


def idle_args(pool: Pool) -> list[str]:
    [container] = build_router(pool, 600)["spec"]["template"]["spec"]["containers"]
    args: list[str] = container["args"]
    return [arg for arg in args if arg.startswith(("--wake-wait", "--sleep-"))]


def min_available(pool: Pool, role: str) -> int:
    [budget] = [
        budget for budget in build_budgets(pool) if budget["metadata"]["name"] == f"demo-{role}"
    ]
    count: int = budget["spec"]["minAvailable"]
    return count


@pytest.mark.parametrize("mode", ["auto", "advise", "external"])
def test_routers_let_the_nodes_of_an_idle_pool_sleep_in_every_mode(mode: str) -> None:
    wait = "--wake-wait=900"
    assert idle_args(scaled(mode, sleepAfterSeconds=60)) == [wait, "--sleep-after=60"]
    deep = scaled(mode, sleepAfterSeconds=60, sleepLevel=2)
    assert idle_args(deep) == [wait, "--sleep-after=60", "--sleep-level=2"]
    assert idle_args(scaled(mode, sleepLevel=2)) == []


def test_routers_hold_requests_only_if_their_pool_may_have_no_node_that_is_awake() -> None:
    assert idle_args(scaled(scaleToZeroAfterSeconds=60)) == ["--wake-wait=900"]
    assert idle_args(scaled("advise", scaleToZeroAfterSeconds=60)) == []
    assert idle_args(scaled()) == []
    assert idle_args(sample_pool("sim")) == []


def test_the_autoscaling_mode_does_not_change_the_routers() -> None:
    assert build_router(scaled(replicas=3), 600) == build_router(sample_pool("sim"), 600)


@pytest.mark.parametrize(
    ("least", "replicas", "count"),
    [(1, 1, 0), (1, 3, 1), (2, 4, 2), (2, 3, 2), (2, 2, 1), (3, 0, 0)],
)
def test_evictions_leave_the_minimum_of_nodes_and_may_always_take_one(
    least: int, replicas: int, count: int
) -> None:
    assert (
        min_available(scaled(replicas=replicas, decode={"min": least, "max": 4}), "decode") == count
    )


def test_all_prefill_nodes_may_be_evicted_if_their_minimum_is_zero() -> None:
    assert min_available(scaled(replicas=3, prefill={"min": 0, "max": 4}), "prefill") == 0


@pytest.mark.parametrize("mode", ["advise", "external"])
def test_a_minimum_that_the_operator_does_not_enforce_sets_no_budget(mode: str) -> None:
    assert min_available(scaled(mode, replicas=3, decode={"min": 2, "max": 4}), "decode") == 1
