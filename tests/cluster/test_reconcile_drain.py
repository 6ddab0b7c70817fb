"""Nodes that are too many go one way: chosen, marked, drained, and then exactly those."""

from __future__ import annotations

import base64

import pytest

from tests.cluster.fake_pool import FakePool, frozen_index
from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, FaultProxy
from tests.cluster.operators import Operator, until

MARKS = {
    "baton.dev/drain-since",
    "baton.dev/drain-reason",
    "controller.kubernetes.io/pod-deletion-cost",
}


@pytest.fixture
def fake_pool(fake_pool: FakePool) -> FakePool:
    """With three decode nodes."""
    fake_pool.start(3)
    return fake_pool


def test_the_node_with_least_to_lose_drains_and_then_exactly_that_pod_goes(
    fake_pool: FakePool,
) -> None:
    first, second, third = fake_pool.decode_pods()
    fake_pool.report(first, requests=4)
    fake_pool.report(second, requests=1)
    fake_pool.report(third, requests=2)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    assert {*fake_pool.router.targets("drain")} == {second}
    assert fake_pool.drain_annotations(second).keys() == MARKS
    assert fake_pool.drain_annotations(second)["baton.dev/drain-reason"].startswith(
        "least to lose: 1 live"
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
    [begun], [ended] = fake_pool.pool.events("Draining"), fake_pool.pool.events("Drained")
    assert second in begun
    assert ended == f"decode: 3 to 2 replicas, without {second}"


def test_the_router_is_told_with_the_pools_link_token(fake_pool: FakePool) -> None:
    fake_pool.scale(2)
    until(lambda: fake_pool.router.calls, "the drain")
    encoded = fake_pool.pool.one("Secret/pool-auth")["data"]["link-token"]
    assert fake_pool.router.calls[0].token == f"Bearer {base64.b64decode(encoded).decode()}"


def test_a_node_that_is_wanted_again_serves_on(fake_pool: FakePool) -> None:
    nodes = fake_pool.decode_pods()
    for node in nodes:
        fake_pool.report(node, requests=1)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    fake_pool.scale(3)
    until(lambda: fake_pool.router.targets("resume"), "the resume")
    until(lambda: not fake_pool.drain_annotations(victim), "the marks' end")
    assert {*fake_pool.router.targets("resume")} == {victim}
    until(lambda: fake_pool.scaled_reason() == "NoneTooMany", "condition Scaled")
    assert fake_pool.decode_pods() == nodes
    until(lambda: fake_pool.pool.events("Resumed"), "its event")
    assert victim in fake_pool.pool.events("Resumed")[0]


def test_two_that_are_too_many_go_together(fake_pool: FakePool) -> None:
    first, second, third = fake_pool.decode_pods()
    fake_pool.report(second, requests=9)
    fake_pool.scale(1)
    until(lambda: {*fake_pool.router.targets("drain")} == {first, third}, "both drains")
    fake_pool.report(first, state="draining")
    fake_pool.wait_calls("drain", 6)
    # Of two that are as good Kubernetes might take the one that is still at work.
    assert fake_pool.decode_replicas() == 3
    fake_pool.report(third, state="draining")
    until(lambda: fake_pool.decode_pods() == [second], "the end of the pods")


def test_nothing_goes_while_no_router_can_be_told(fake_pool: FakePool) -> None:
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


def test_nobody_is_chosen_while_the_index_is_away(fake_pool: FakePool, index: int) -> None:
    with frozen_index(index):
        fake_pool.scale(2)
        until(
            lambda: "the index" in fake_pool.pool.condition("Scaled")["message"], "what is missing"
        )
        assert not fake_pool.router.calls
        assert fake_pool.decode_replicas() == 3
    until(lambda: fake_pool.router.targets("drain"), "the drain")


def test_pods_that_are_not_ready_go_at_once_and_before_all_others(fake_pool: FakePool) -> None:
    first, second, third = fake_pool.decode_pods()
    fake_pool.router.status = 404
    fake_pool.set_pod_status(second, ready=False)
    fake_pool.scale(2)
    until(lambda: fake_pool.decode_pods() == [first, third], "the end of the pod")


def test_a_pod_that_falls_ill_goes_instead_of_one_that_drains(fake_pool: FakePool) -> None:
    for node in fake_pool.decode_pods():
        fake_pool.report(node, requests=1)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    ill = next(node for node in fake_pool.decode_pods() if node != victim)
    fake_pool.report(ill, state="draining")
    fake_pool.set_pod_status(ill, ready=False)
    until(lambda: ill not in fake_pool.decode_pods(), "the end of the ill pod")
    until(lambda: fake_pool.router.targets("resume"), "the resume")
    until(lambda: not fake_pool.drain_annotations(victim), "the marks' end")
    assert {*fake_pool.router.targets("resume")} == {victim}


def test_a_deployment_scaled_by_hand_comes_back_through_a_drain(fake_pool: FakePool) -> None:
    nodes = fake_pool.decode_pods()
    deployment = fake_pool.pool.child("Deployment", "decode")["metadata"]["name"]
    for node in nodes:
        fake_pool.report(node, requests=1)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    fake_pool.pool.kubectl("scale", "deployment", deployment, "--replicas=4")
    until(lambda: fake_pool.decode_replicas() == 3, "what was one more and never started goes")
    until(lambda: fake_pool.decode_pods() == nodes, "its end")
    fake_pool.report(victim, state="draining")
    until(lambda: victim not in fake_pool.decode_pods(), "the end of the pod")


MARK, STATUS, NODES = "/pods/pool-decode", "/inferencepools/pool/status", "/deployments/pool-decode"


@pytest.mark.timeout(600)  # it starts 6 operators
def test_an_operator_killed_at_each_step_is_followed_by_one_that_ends_the_drain(
    fake_pool: FakePool, proxy: FaultProxy, operator: Operator
) -> None:
    victim, *others = fake_pool.decode_pods()
    for node in others:
        fake_pool.report(node, requests=3)

    operator.kill_at(proxy, RESET, lambda: fake_pool.scale(2), path=MARK)
    assert not fake_pool.drain_annotations(victim)
    operator.kill_at(proxy, ANSWERED_RESET, operator.start, path=MARK)
    until(lambda: fake_pool.drain_annotations(victim), "the mark")
    since = fake_pool.drain_annotations(victim)["baton.dev/drain-since"]
    assert not fake_pool.router.calls
    operator.kill_at(proxy, RESET, operator.start, path=STATUS)
    assert {*fake_pool.router.targets("drain")} == {victim}
    operator.start()
    until(lambda: fake_pool.scaled_reason() == "Draining", "condition Scaled")
    assert fake_pool.decode_replicas() == 3
    operator.kill_at(proxy, RESET, lambda: fake_pool.report(victim, state="draining"), path=NODES)
    assert fake_pool.decode_pods() == [victim, *others]
    assert fake_pool.drain_annotations(victim)["baton.dev/drain-since"] == since
    operator.start()
    until(lambda: fake_pool.decode_pods() == others, "the end of the pod")
    until(lambda: fake_pool.scaled_reason() == "NoneTooMany", "condition Scaled")
    assert fake_pool.decode_replicas() == 2
    assert not any(fake_pool.drain_annotations(node) for node in others)


@pytest.mark.timeout(600)  # it starts 3 operators
def test_an_operator_killed_while_it_takes_a_drain_back_is_followed_by_one_that_does(
    fake_pool: FakePool, proxy: FaultProxy, operator: Operator
) -> None:
    for node in fake_pool.decode_pods():
        fake_pool.report(node, requests=3)
    fake_pool.scale(2)
    until(lambda: fake_pool.router.targets("drain"), "the drain")
    [victim] = {*fake_pool.router.targets("drain")}
    # The marks' end never comes.
    operator.kill_at(proxy, RESET, lambda: fake_pool.scale(3), path=MARK)
    told = fake_pool.router.targets("resume")
    assert {*told} == {victim}
    assert fake_pool.drain_annotations(victim).keys() == MARKS
    operator.start()
    until(lambda: len(fake_pool.router.targets("resume")) > len(told), "another resume")
    until(lambda: not fake_pool.drain_annotations(victim), "the marks' end")
    assert {*fake_pool.router.targets("resume")} == {victim}


def test_an_eviction_leaves_one_node_of_several_and_none_of_one(fake_pool: FakePool) -> None:
    first, second, third = fake_pool.decode_pods()
    # Their successors never get ready.
    assert fake_pool.evict(first) == 201
    assert fake_pool.evict(second) == 201
    assert fake_pool.evict(third) == 429
    fake_pool.scale(1)
    until(lambda: fake_pool.decode_pods() == [third], "the end of those that never got ready")
    until(lambda: fake_pool.evict(third) == 201, "the eviction of the last one")
