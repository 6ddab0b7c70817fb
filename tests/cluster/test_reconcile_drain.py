"""Nodes that are too many go one way: chosen, marked, drained, and then exactly those."""

from __future__ import annotations

import base64

import pytest

from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, FaultProxy
from tests.cluster.operators import Operator, until
from tests.cluster.stage import Stage, silent_index

MARKS = {
    "baton.dev/drain-since",
    "baton.dev/drain-reason",
    "controller.kubernetes.io/pod-deletion-cost",
}


@pytest.fixture
def stage(stage: Stage) -> Stage:
    """With three decode nodes."""
    stage.begin(3)
    return stage


def test_the_node_with_least_to_lose_drains_and_then_exactly_that_pod_goes(stage: Stage) -> None:
    first, second, third = stage.nodes()
    stage.report(first, requests=4)
    stage.report(second, requests=1)
    stage.report(third, requests=2)
    stage.scale(2)
    until(lambda: stage.router.acts("drain"), "the drain")
    assert {*stage.router.acts("drain")} == {second}
    assert stage.notes(second).keys() == MARKS
    assert stage.notes(second)["baton.dev/drain-reason"].startswith("least to lose: 1 live")
    assert not stage.notes(first)
    assert not stage.notes(third)
    until(lambda: stage.scaled() == "Draining", "condition Scaled")
    status = stage.pool.body()["status"]
    assert (status["decode"]["draining"], status["decode"]["summary"]) == (1, "2/2")
    assert stage.pool.condition("Ready")["status"] == "True"

    stage.report(second, requests=1, state="draining")
    stage.looks("drain")
    assert stage.replicas() == 3

    stage.report(second, requests=0, state="draining")
    until(lambda: stage.nodes() == [first, third], "the end of the pod")
    assert stage.replicas() == 2
    until(lambda: stage.scaled() == "NoneTooMany", "condition Scaled")
    until(lambda: stage.pool.events("Draining") and stage.pool.events("Drained"), "their events")
    [begun], [ended] = stage.pool.events("Draining"), stage.pool.events("Drained")
    assert second in begun
    assert ended == f"decode: 3 to 2 replicas, without {second}"


def test_the_router_is_told_with_the_pools_link_token(stage: Stage) -> None:
    stage.scale(2)
    until(lambda: stage.router.told, "the drain")
    encoded = stage.pool.one("Secret/pool-auth")["data"]["link-token"]
    assert stage.router.told[0].token == f"Bearer {base64.b64decode(encoded).decode()}"


def test_a_node_that_is_wanted_again_serves_on(stage: Stage) -> None:
    nodes = stage.nodes()
    for node in nodes:
        stage.report(node, requests=1)
    stage.scale(2)
    until(lambda: stage.router.acts("drain"), "the drain")
    [victim] = {*stage.router.acts("drain")}
    stage.scale(3)
    until(lambda: stage.router.acts("resume"), "the resume")
    until(lambda: not stage.notes(victim), "the marks' end")
    assert {*stage.router.acts("resume")} == {victim}
    until(lambda: stage.scaled() == "NoneTooMany", "condition Scaled")
    assert stage.nodes() == nodes
    until(lambda: stage.pool.events("Resumed"), "its event")
    assert victim in stage.pool.events("Resumed")[0]


def test_two_that_are_too_many_go_together(stage: Stage) -> None:
    first, second, third = stage.nodes()
    stage.report(second, requests=9)
    stage.scale(1)
    until(lambda: {*stage.router.acts("drain")} == {first, third}, "both drains")
    stage.report(first, state="draining")
    stage.looks("drain", 6)
    # Of two that are as good Kubernetes might take the one that is still at work.
    assert stage.replicas() == 3
    stage.report(third, state="draining")
    until(lambda: stage.nodes() == [second], "the end of the pods")


def test_nothing_goes_while_no_router_can_be_told(stage: Stage) -> None:
    stage.router.status = 500
    stage.scale(2)
    until(lambda: stage.scaled() == "DrainHeld", "condition Scaled")
    assert "answered 500" in stage.pool.condition("Scaled")["message"]
    assert len(stage.nodes()) == 3
    stage.router.status = 200
    until(lambda: stage.scaled() == "Draining", "condition Scaled")
    [victim] = {*stage.router.acts("drain")}
    stage.report(victim, state="draining")
    until(lambda: victim not in stage.nodes(), "the end of the pod")


def test_nobody_is_chosen_while_the_index_is_away(stage: Stage, index: int) -> None:
    with silent_index(index):
        stage.scale(2)
        until(lambda: "the index" in stage.pool.condition("Scaled")["message"], "what is missing")
        assert not stage.router.told
        assert stage.replicas() == 3
    until(lambda: stage.router.acts("drain"), "the drain")


def test_pods_that_are_not_ready_go_at_once_and_before_all_others(stage: Stage) -> None:
    first, second, third = stage.nodes()
    stage.router.status = 404
    stage.kubelet(second, ready=False)
    stage.scale(2)
    until(lambda: stage.nodes() == [first, third], "the end of the pod")


def test_a_pod_that_falls_ill_goes_instead_of_one_that_drains(stage: Stage) -> None:
    for node in stage.nodes():
        stage.report(node, requests=1)
    stage.scale(2)
    until(lambda: stage.router.acts("drain"), "the drain")
    [victim] = {*stage.router.acts("drain")}
    ill = next(node for node in stage.nodes() if node != victim)
    stage.report(ill, state="draining")
    stage.kubelet(ill, ready=False)
    until(lambda: ill not in stage.nodes(), "the end of the ill pod")
    until(lambda: stage.router.acts("resume"), "the resume")
    until(lambda: not stage.notes(victim), "the marks' end")
    assert {*stage.router.acts("resume")} == {victim}


def test_a_deployment_scaled_by_hand_comes_back_through_a_drain(stage: Stage) -> None:
    nodes = stage.nodes()
    deployment = stage.pool.child("Deployment", "decode")["metadata"]["name"]
    for node in nodes:
        stage.report(node, requests=1)
    stage.scale(2)
    until(lambda: stage.router.acts("drain"), "the drain")
    [victim] = {*stage.router.acts("drain")}
    stage.pool.kubectl("scale", "deployment", deployment, "--replicas=4")
    until(lambda: stage.replicas() == 3, "what was one more and never started goes")
    until(lambda: stage.nodes() == nodes, "its end")
    stage.report(victim, state="draining")
    until(lambda: victim not in stage.nodes(), "the end of the pod")


MARK, STATUS, NODES = "/pods/pool-decode", "/inferencepools/pool/status", "/deployments/pool-decode"


@pytest.mark.timeout(600)  # it starts 6 operators
def test_an_operator_killed_at_each_step_is_followed_by_one_that_ends_the_drain(
    stage: Stage, proxy: FaultProxy, operator: Operator
) -> None:
    victim, *others = stage.nodes()
    for node in others:
        stage.report(node, requests=3)

    operator.kill_at(proxy, RESET, lambda: stage.scale(2), path=MARK)
    assert not stage.notes(victim)
    operator.kill_at(proxy, ANSWERED_RESET, operator.start, path=MARK)
    until(lambda: stage.notes(victim), "the mark")
    since = stage.notes(victim)["baton.dev/drain-since"]
    assert not stage.router.told
    operator.kill_at(proxy, RESET, operator.start, path=STATUS)
    assert {*stage.router.acts("drain")} == {victim}
    operator.start()
    until(lambda: stage.scaled() == "Draining", "condition Scaled")
    assert stage.replicas() == 3
    operator.kill_at(proxy, RESET, lambda: stage.report(victim, state="draining"), path=NODES)
    assert stage.nodes() == [victim, *others]
    assert stage.notes(victim)["baton.dev/drain-since"] == since
    operator.start()
    until(lambda: stage.nodes() == others, "the end of the pod")
    until(lambda: stage.scaled() == "NoneTooMany", "condition Scaled")
    assert stage.replicas() == 2
    assert not any(stage.notes(node) for node in others)


@pytest.mark.timeout(600)  # it starts 3 operators
def test_an_operator_killed_while_it_takes_a_drain_back_is_followed_by_one_that_does(
    stage: Stage, proxy: FaultProxy, operator: Operator
) -> None:
    for node in stage.nodes():
        stage.report(node, requests=3)
    stage.scale(2)
    until(lambda: stage.router.acts("drain"), "the drain")
    [victim] = {*stage.router.acts("drain")}
    # The marks' end never comes.
    operator.kill_at(proxy, RESET, lambda: stage.scale(3), path=MARK)
    told = stage.router.acts("resume")
    assert {*told} == {victim}
    assert stage.notes(victim).keys() == MARKS
    operator.start()
    until(lambda: len(stage.router.acts("resume")) > len(told), "another resume")
    until(lambda: not stage.notes(victim), "the marks' end")
    assert {*stage.router.acts("resume")} == {victim}


def test_an_eviction_leaves_one_node_of_several_and_none_of_one(stage: Stage) -> None:
    first, second, third = stage.nodes()
    # Their successors never get ready.
    assert stage.evict(first) == 201
    assert stage.evict(second) == 201
    assert stage.evict(third) == 429
    stage.scale(1)
    until(lambda: stage.nodes() == [third], "the end of those that never got ready")
    until(lambda: stage.evict(third) == 201, "the eviction of the last one")
