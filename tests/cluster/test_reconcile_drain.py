"""Scale-down always chooses nodes, marks them, drains them, and then removes exactly those."""

from __future__ import annotations

import base64

import pytest

from tests.cluster.fake_pool import FakePool, frozen_index
from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, FaultProxy
from tests.cluster.operators import Operator, until

DRAIN_ANNOTATIONS = {
    "baton.dev/drain-since",
    "baton.dev/drain-reason",
    "controller.kubernetes.io/pod-deletion-cost",
}


@pytest.fixture
def fake_pool(fake_pool: FakePool) -> FakePool:
    """A pool with three decode nodes."""
    fake_pool.start(3)
    return fake_pool


def test_the_least_loaded_node_is_drained_and_exactly_its_pod_is_removed(
    fake_pool: FakePool,
) -> None:
    first, second, third = fake_pool.decode_pods()
    fake_pool.report(first, requests=4)
    fake_pool.report(second, requests=1)
    fake_pool.report(third, requests=2)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    assert {*fake_pool.router.targets("drain")} == {second}
    assert fake_pool.drain_annotations(second).keys() == DRAIN_ANNOTATIONS
    assert fake_pool.drain_annotations(second)["baton.dev/drain-reason"].startswith(
        "least loaded: 1 live"
    )
    assert not fake_pool.drain_annotations(first)
    assert not fake_pool.drain_annotations(third)
    until(lambda: fake_pool.scaled_reason() == "Draining", "condition Scaled")
    status = fake_pool.pool.body()["status"]
    assert (status["decode"]["draining"], status["decode"]["summary"]) == (1, "2/2")
    assert fake_pool.pool.condition("Ready")["status"] == "True"

    fake_pool.report(second, requests=1, state="draining")
    fake_pool.wait_calls("drain")
    assert fake_pool.decode_replicas() == 3

    fake_pool.report(second, requests=0, state="draining")
    until(lambda: fake_pool.decode_pods() == [first, third], "the end of the pod")
    assert fake_pool.decode_replicas() == 2
    until(lambda: fake_pool.scaled_reason() == "NoneTooMany", "condition Scaled")
    until(
        lambda: fake_pool.pool.events("Draining") and fake_pool.pool.events("Drained"),
        "their events",
    )
    [started], [ended] = fake_pool.pool.events("Draining"), fake_pool.pool.events("Drained")
    assert second in started
    assert ended == f"decode: scaled from 3 to 2 replicas, without {second}"


def test_the_router_is_called_with_the_pool_s_link_token(fake_pool: FakePool) -> None:
    fake_pool.scale(2)
    until(lambda: fake_pool.router.calls, "the drain")
    encoded = fake_pool.pool.one("Secret/pool-auth")["data"]["link-token"]
    assert fake_pool.router.calls[0].token == f"Bearer {base64.b64decode(encoded).decode()}"


def test_a_draining_node_that_is_wanted_again_resumes(fake_pool: FakePool) -> None:
    nodes = fake_pool.decode_pods()
    for node in nodes:
        fake_pool.report(node, requests=1)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    fake_pool.scale(3)
    until(lambda: fake_pool.router.targets("resume"), "the resume")
    until(lambda: not fake_pool.drain_annotations(victim), "the removal of the annotations")
    assert {*fake_pool.router.targets("resume")} == {victim}
    until(lambda: fake_pool.scaled_reason() == "NoneTooMany", "condition Scaled")
    assert fake_pool.decode_pods() == nodes
    until(lambda: fake_pool.pool.events("Resumed"), "its event")
    assert victim in fake_pool.pool.events("Resumed")[0]


def test_two_drained_nodes_are_removed_together(fake_pool: FakePool) -> None:
    first, second, third = fake_pool.decode_pods()
    fake_pool.report(second, requests=9)
    fake_pool.scale(1)
    until(lambda: {*fake_pool.router.targets("drain")} == {first, third}, "both drains")
    fake_pool.report(first, state="draining")
    fake_pool.wait_calls("drain", 6)
    # Kubernetes might remove the node that still drains, as both have the same deletion cost.
    assert fake_pool.decode_replicas() == 3
    fake_pool.report(third, state="draining")
    until(lambda: fake_pool.decode_pods() == [second], "the end of the pods")


def test_no_node_is_removed_while_the_router_refuses_drains(fake_pool: FakePool) -> None:
    fake_pool.router.status = 500
    fake_pool.scale(2)
    until(lambda: fake_pool.scaled_reason() == "DrainHeld", "condition Scaled")
    assert "answered 500" in fake_pool.pool.condition("Scaled")["message"]
    assert len(fake_pool.decode_pods()) == 3
    fake_pool.router.status = 200
    until(lambda: fake_pool.scaled_reason() == "Draining", "condition Scaled")
    [victim] = {*fake_pool.router.targets("drain")}
    fake_pool.report(victim, state="draining")
    until(lambda: victim not in fake_pool.decode_pods(), "the end of the pod")


def test_no_node_is_chosen_while_the_index_is_down(fake_pool: FakePool, index: int) -> None:
    with frozen_index(index):
        fake_pool.scale(2)
        until(
            lambda: "the index" in fake_pool.pool.condition("Scaled")["message"],
            "the missing index in the condition",
        )
        assert not fake_pool.router.calls
        assert fake_pool.decode_replicas() == 3
    until(lambda: fake_pool.router.targets("drain"), "the drain")


def test_unready_pods_are_removed_first_and_without_a_drain(fake_pool: FakePool) -> None:
    first, second, third = fake_pool.decode_pods()
    fake_pool.router.status = 404
    fake_pool.set_pod_status(second, ready=False)
    fake_pool.scale(2)
    until(lambda: fake_pool.decode_pods() == [first, third], "the end of the pod")


def test_a_pod_that_becomes_unready_is_removed_instead_of_a_draining_one(
    fake_pool: FakePool,
) -> None:
    for node in fake_pool.decode_pods():
        fake_pool.report(node, requests=1)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    unready = next(node for node in fake_pool.decode_pods() if node != victim)
    fake_pool.report(unready, state="draining")
    fake_pool.set_pod_status(unready, ready=False)
    until(lambda: unready not in fake_pool.decode_pods(), "the end of the unready pod")
    until(lambda: fake_pool.router.targets("resume"), "the resume")
    until(lambda: not fake_pool.drain_annotations(victim), "the removal of the annotations")
    assert {*fake_pool.router.targets("resume")} == {victim}


def test_a_deployment_scaled_by_hand_is_corrected_and_the_drain_goes_on(
    fake_pool: FakePool,
) -> None:
    nodes = fake_pool.decode_pods()
    deployment = fake_pool.pool.child("Deployment", "decode")["metadata"]["name"]
    for node in nodes:
        fake_pool.report(node, requests=1)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    fake_pool.pool.kubectl("scale", "deployment", deployment, "--replicas=4")
    until(lambda: fake_pool.decode_replicas() == 3, "the removal of the extra pod")
    until(lambda: fake_pool.decode_pods() == nodes, "only the old pods")
    fake_pool.report(victim, state="draining")
    until(lambda: victim not in fake_pool.decode_pods(), "the end of the pod")


POD_PATH, STATUS_PATH, DEPLOYMENT_PATH = (
    "/pods/pool-decode",
    "/inferencepools/pool/status",
    "/deployments/pool-decode",
)


@pytest.mark.timeout(600)  # it starts 6 operators
def test_after_a_kill_at_each_step_the_next_operator_ends_the_drain(
    fake_pool: FakePool, proxy: FaultProxy, operator: Operator
) -> None:
    victim, *others = fake_pool.decode_pods()
    for node in others:
        fake_pool.report(node, requests=3)

    operator.kill_at(proxy, RESET, lambda: fake_pool.scale(2), path=POD_PATH)
    assert not fake_pool.drain_annotations(victim)
    operator.kill_at(proxy, ANSWERED_RESET, operator.start, path=POD_PATH)
    until(lambda: fake_pool.drain_annotations(victim), "the annotations")
    since = fake_pool.drain_annotations(victim)["baton.dev/drain-since"]
    assert not fake_pool.router.calls
    operator.kill_at(proxy, RESET, operator.start, path=STATUS_PATH)
    assert {*fake_pool.router.targets("drain")} == {victim}
    operator.start()
    until(lambda: fake_pool.scaled_reason() == "Draining", "condition Scaled")
    assert fake_pool.decode_replicas() == 3
    operator.kill_at(
        proxy, RESET, lambda: fake_pool.report(victim, state="draining"), path=DEPLOYMENT_PATH
    )
    assert fake_pool.decode_pods() == [victim, *others]
    assert fake_pool.drain_annotations(victim)["baton.dev/drain-since"] == since
    operator.start()
    until(lambda: fake_pool.decode_pods() == others, "the end of the pod")
    until(lambda: fake_pool.scaled_reason() == "NoneTooMany", "condition Scaled")
    assert fake_pool.decode_replicas() == 2
    assert not any(fake_pool.drain_annotations(node) for node in others)


@pytest.mark.timeout(600)  # it starts 3 operators
def test_after_a_kill_during_a_resume_the_next_operator_resumes_the_node(
    fake_pool: FakePool, proxy: FaultProxy, operator: Operator
) -> None:
    for node in fake_pool.decode_pods():
        fake_pool.report(node, requests=3)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    # The operator is killed before it removes the annotations.
    operator.kill_at(proxy, RESET, lambda: fake_pool.scale(3), path=POD_PATH)
    resumes = fake_pool.router.targets("resume")
    assert {*resumes} == {victim}
    assert fake_pool.drain_annotations(victim).keys() == DRAIN_ANNOTATIONS
    operator.start()
    until(lambda: len(fake_pool.router.targets("resume")) > len(resumes), "another resume")
    until(lambda: not fake_pool.drain_annotations(victim), "the removal of the annotations")
    assert {*fake_pool.router.targets("resume")} == {victim}


def test_evictions_keep_one_of_several_nodes_and_may_remove_a_single_one(
    fake_pool: FakePool,
) -> None:
    first, second, third = fake_pool.decode_pods()
    # The evicted pods' successors never become ready.
    assert fake_pool.evict(first) == 201
    assert fake_pool.evict(second) == 201
    assert fake_pool.evict(third) == 429
    fake_pool.scale(1)
    until(lambda: fake_pool.decode_pods() == [third], "the end of the unready pods")
    until(lambda: fake_pool.evict(third) == 201, "the eviction of the last one")
