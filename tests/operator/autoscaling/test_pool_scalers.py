"""Counts from PoolScalers, and the status fields that autoscalers read."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.autoscaling.pool_scalers import count_nodes, initial_count, with_replicas
from baton_operator.builders import build_pool
from baton_operator.builders.nodes import revision_of
from baton_operator.builders.scalers import build_scalers, seeded, selector_of
from baton_operator.kube.kinds import ChildKey, key_of
from baton_operator.state.child import CachedChild, read_child
from baton_operator.status.conditions import NONE_WANTED
from tests.support.kubernetes import pod_bodies as b
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner.observations import observed, status_of, verdict

EXTERNAL = {"mode": "external"}
BOUNDS = {"min": 1, "max": 1}
POOL = sample_pool("sim", autoscaling={"mode": "auto", "prefill": BOUNDS, "decode": EXTERNAL})


def cached_children(*bodies: b.Body) -> dict[ChildKey, CachedChild]:
    children = {}
    for number, body in enumerate(bodies):
        metadata = body["metadata"] | {"uid": "u", "resourceVersion": str(number)}
        children[key_of(body)] = read_child(body | {"metadata": metadata})
    return children


def deployment(name: str, replicas: int) -> b.Body:
    return b.workload(name, "decode") | {"spec": {"replicas": replicas}}


def node(name: str, **changes: Any) -> b.Body:
    return b.pod(b.container(b.RUNNING, ready=True), name=name, **changes)


def test_a_pool_has_no_scaler_by_default() -> None:
    assert build_scalers(sample_pool("sim")) == ()


def test_a_scaler_belongs_to_its_pool_and_its_manifest_has_no_count() -> None:
    [scaler] = build_scalers(POOL)
    assert (scaler["kind"], scaler["metadata"]["name"]) == ("PoolScaler", "demo-decode")
    assert scaler["metadata"]["ownerReferences"][0]["name"] == "demo"
    assert "spec" not in scaler
    assert seeded(scaler, 3)["spec"] == {"replicas": 3}


def test_both_roles_of_a_pool_in_external_mode_have_a_scaler() -> None:
    names = [
        child["metadata"]["name"]
        for child in build_scalers(sample_pool("sim", autoscaling=EXTERNAL))
    ]
    assert names == ["demo-prefill", "demo-decode"]


def test_a_scaler_s_count_does_not_change_the_revision() -> None:
    assert (
        revision_of(with_replicas(POOL, {"decode": 5})).name == revision_of(sample_pool("sim")).name
    )


def test_deployments_and_budgets_follow_the_scaler_s_count() -> None:
    built = build_pool(with_replicas(POOL, {"decode": 5}))
    [nodes] = [child for child in built if child["metadata"]["name"].startswith("demo-decode-")]
    assert nodes["spec"]["replicas"] == 5
    [budget] = [
        child
        for child in built
        if (child["kind"], child["metadata"]["name"]) == ("PodDisruptionBudget", "demo-decode")
    ]
    assert budget["spec"]["minAvailable"] == 1


def test_a_scaler_s_count_may_be_zero() -> None:
    none = with_replicas(POOL, {"decode": 0})
    status = status_of(observed(none, decode=()), none)
    assert verdict(status, "DecodeReady") == ("True", NONE_WANTED.name)
    assert status.decode.desired == 0


def test_without_a_scaler_s_count_the_spec_decides() -> None:
    assert with_replicas(POOL, {}) == POOL


@pytest.mark.parametrize(
    ("bodies", "seed"),
    [((), 1), ((deployment("a", 4),), 4), ((deployment("a", 0), deployment("b", 3)), 3)],
    ids=["a new pool", "existing nodes", "the larger Deployment of a roll-out"],
)
def test_a_new_scaler_starts_with_the_existing_count(bodies: tuple[b.Body, ...], seed: int) -> None:
    assert initial_count(POOL, "decode", cached_children(*bodies)) == seed


def test_the_reported_count_leaves_out_nodes_that_leave() -> None:
    leaving = {"annotations": {"baton.dev/drain-since": b.THEN}}
    children = cached_children(
        node("a"),
        b.pod(b.container(b.CREATING), name="b"),
        node("c", **leaving),
        node("d", deletionTimestamp=b.THEN),
        node("e", component="prefill"),
        node("f", status={"phase": "Failed"}),
    )
    assert count_nodes("decode", children) == 2


def test_the_selector_matches_the_role_s_pods_of_all_revisions() -> None:
    assert selector_of(POOL, "decode") == "baton.dev/pool=demo,baton.dev/component=decode"
