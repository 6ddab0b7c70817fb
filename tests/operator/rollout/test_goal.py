"""goal_of: the replicas of each Deployment in a roll-out, computed from a pool's children."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.api.pool import Pool
from baton_operator.builders import Manifest, build_pool, revision_of
from baton_operator.names import REVISION_LABEL
from baton_operator.rollout.goal import Goal, goal_of
from baton_protocol.store import Role
from tests.operator.children import DESIRED, POOL, PROVEN, cached, live, old_nodes
from tests.support.kubernetes.manifests import sample_pool

# A timestamp by a cluster node's clock; the operator measures no time with it.
STAMP = "2026-05-04T11:50:00Z"
LONG_S, MOMENT_S = 600.0, 30.0  # time on the operator's clock since it first saw the children


def nodes_now() -> list[Manifest]:
    return [live(one) for one in DESIRED if REVISION_LABEL in one["metadata"]["labels"]]


def pod(deployment: Manifest, number: int = 0, **changes: Any) -> Manifest:
    """Return a ready pod of the Deployment; `changes` overrides fields of its status."""
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": STAMP}
    name = f"{deployment['metadata']['name']}-{number}"
    template = deployment["spec"]["template"]["spec"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**deployment["metadata"], "name": name, "uid": name, "ownerReferences": []},
        "spec": template,
        "status": {"phase": "Running", "conditions": [ready]} | changes,
    }


def unready(deployment: Manifest) -> Manifest:
    not_ready = {"type": "Ready", "status": "False", "lastTransitionTime": STAMP}
    return pod(deployment, conditions=[not_ready])


def goal(*bodies: Manifest, pool: Pool = POOL, now_s: float = LONG_S) -> Goal:
    return goal_of(pool, revision_of(pool), cached(*bodies), now_s)


def new(found: Goal) -> dict[Role, int]:
    return dict(found.replicas)


def old(found: Goal) -> dict[str, int]:
    return {one.role: one.replicas for one in found.old}


def test_a_new_pool_gets_all_its_nodes_at_once() -> None:
    found = goal()
    assert new(found) == {"prefill": 1, "decode": 1}
    assert not found.old
    assert not found.roll.rolling


def test_old_nodes_stay_while_the_first_new_ones_start() -> None:
    before = old_nodes(**PROVEN)
    found = goal(*before, *(pod(one) for one in before))
    assert new(found) == old(found) == {"prefill": 1, "decode": 1}
    assert found.roll.rolling


def test_old_nodes_are_removed_when_the_new_ones_are_ready() -> None:
    before, now = old_nodes(**PROVEN), nodes_now()
    found = goal(*before, *now, *(pod(one) for one in (*before, *now)))
    assert old(found) == {"prefill": 0, "decode": 0}


def test_a_new_node_that_drains_does_not_count_as_ready() -> None:
    before, now = old_nodes(**PROVEN), nodes_now()
    pods = [pod(one) for one in (*before, *now)]
    pods[-1]["metadata"]["annotations"] = {"baton.dev/drain-since": STAMP}
    assert old(goal(*before, *now, *pods)) == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize(
    ("now_s", "kept"),
    [(LONG_S, {"prefill": 0, "decode": 0}), (MOMENT_S, {"prefill": 1, "decode": 1})],
    ids=["600 s", "30 s"],
)
def test_old_nodes_are_removed_when_they_have_not_been_ready_for_long(
    now_s: float, kept: dict[str, int]
) -> None:
    before = old_nodes(**PROVEN)
    found = goal(*before, *(unready(one) for one in before), now_s=now_s)
    assert old(found) == kept
    assert found.roll.rolling == bool(sum(kept.values()))


def test_old_pods_that_were_never_scheduled_are_removed_at_once() -> None:
    before = old_nodes(**PROVEN)
    found = goal(*before, *(pod(one, phase="Pending", conditions=[]) for one in before))
    assert old(found) == {"prefill": 0, "decode": 0}


def test_old_deployments_that_never_served_are_no_part_of_a_roll_out() -> None:
    before = old_nodes()
    found = goal(*before, *(unready(one) for one in before), now_s=MOMENT_S)
    assert not found.old
    assert not found.roll.rolling


def gpu_pool(**spec: Any) -> Pool:
    node = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    return sample_pool("sim", **({"prefill": node, "decode": node} | spec))


def gpu_nodes() -> list[Manifest]:
    pool = gpu_pool()
    found = [live(one, **PROVEN) for one in build_pool(pool) if is_node(one)]
    for one in found:
        one["metadata"]["name"] += "-old"
        one["metadata"]["labels"] = {**one["metadata"]["labels"], REVISION_LABEL: "old"}
    return found


def is_node(manifest: Manifest) -> bool:
    return REVISION_LABEL in manifest["metadata"]["labels"]


def test_without_gpus_for_one_more_pair_a_roll_out_does_not_start_and_reports_the_need() -> None:
    before = gpu_nodes()
    bodies = (*before, *(pod(one) for one in before))
    small, enough = gpu_pool(gpuBudget=3), gpu_pool(gpuBudget=4)
    found = goal(*bodies, pool=small)
    assert new(found) == {"prefill": 0, "decode": 0}
    assert old(found) == {"prefill": 1, "decode": 1}
    assert found.roll.no_room == (
        "old and new nodes together need 4 GPUs, 2 are held, and gpuBudget is 3"
    )
    found = goal(*bodies, pool=enough)
    assert new(found) == {"prefill": 1, "decode": 1}
    assert found.roll.no_room == ""


def test_roles_that_the_gpu_budget_limits_are_reported() -> None:
    spec = {"replicas": 3, "resources": {"limits": {"nvidia.com/gpu": 2}}}
    found = goal(pool=gpu_pool(decode=spec, gpuBudget=5))
    assert new(found) == {"prefill": 1, "decode": 2}
    assert found.roll.short == ("decode",)
