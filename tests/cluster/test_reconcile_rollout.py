"""Nodes of an older spec give way to new ones in step, and never before these are ready."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton_operator.names import DRAIN_S
from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, Fault, FaultProxy
from tests.cluster.operators import Operator, until
from tests.cluster.stage import OTHER, Stage


def test_old_nodes_go_as_new_ones_get_ready_in_both_roles(stage: Stage) -> None:
    old = stage.begin(2)
    [old_prefill], [first, second] = stage.of(old, "prefill"), stage.of(old, "decode")
    stage.report(first, requests=3)
    new = stage.roll()
    stage.made(new, "prefill")
    stage.made(new, "decode")
    assert stage.deployments(new) == {"prefill": 1, "decode": 1}
    stage.serve(new, "prefill")
    stage.serve(new, "decode")

    stage.drained(second)
    assert stage.words(second) == {
        "deadline_s": DRAIN_S,
        "reason": "roll-out",
        "replaced_by": new,
    }
    until(lambda: stage.of(old, "decode") == [first], "the end of the old node with less to lose")
    assert not stage.words(old_prefill)
    stage.made(new, "decode", 2)
    assert not stage.words(first)

    stage.serve(new, "decode")
    stage.drained(first, old_prefill)
    until(lambda: stage.is_over(old), "the end of the roll-out")
    assert stage.deployments(new) == {"prefill": 1, "decode": 2}
    until(lambda: stage.pool.condition("Updated")["reason"] == "OneRevision", "condition Updated")
    until(lambda: len(stage.pool.events("RolledOut")) == 1, "its event")


def test_nothing_old_goes_while_one_role_is_behind(stage: Stage) -> None:
    old = stage.begin()
    new = stage.roll()
    stage.made(new, "decode")
    stage.serve(new, "decode")
    until(lambda: "1 of 2 ready" in stage.pool.condition("Updated")["message"], "the status")
    assert stage.deployments(old) == {"prefill": 1, "decode": 1}
    assert not stage.router.told


def test_requests_that_no_new_node_can_take_over_have_the_time_that_the_spec_says(
    stage: Stage,
) -> None:
    # Long enough for a look at it.
    old = stage.begin(rollout={"maxDrainSeconds": 20})
    [decode], [prefill] = stage.of(old, "decode"), stage.of(old, "prefill")
    stage.report(decode, requests=1)
    new = stage.roll()
    stage.made(new, "prefill")
    stage.made(new, "decode")
    stage.serve(new, fingerprint=OTHER)
    stage.drained(prefill)
    until(lambda: stage.words(decode), "the drain")
    assert stage.words(decode) == {"deadline_s": 20, "reason": "roll-out", "replaced_by": new}
    assert stage.notes(decode)["baton.dev/drain-seconds"] == "20"
    stage.report(decode, requests=1, state="draining")
    # Its request never ends.
    until(lambda: stage.is_over(old), "the end of the roll-out")


def test_without_a_word_in_the_spec_it_is_as_long_as_a_request_may_take(
    stage: Stage,
) -> None:
    old = stage.begin(router={"extraArgs": ["--request-timeout=77"]})
    new = stage.roll()
    stage.made(new, "prefill")
    stage.made(new, "decode")
    stage.serve(new, fingerprint=OTHER)
    [decode] = stage.of(old, "decode")
    until(lambda: stage.words(decode), "the drain")
    assert stage.words(decode)["deadline_s"] == 77


def test_new_nodes_that_do_not_get_ready_stop_it_and_the_spec_set_back_ends_it(
    stage: Stage,
) -> None:
    old = stage.begin()
    new = stage.roll()
    until(lambda: stage.blocked() == ("True", "NewNodesFailing"), "condition RolloutBlocked")
    # No node of the cluster runs pods.
    message = stage.pool.condition("RolloutBlocked")["message"]
    assert message.startswith("Unschedulable: pool-")
    assert stage.pool.condition("Ready")["status"] == "True"
    until(lambda: len(stage.pool.events("RolloutBlocked")) == 1, "its event")
    assert stage.deployments(old) == {"prefill": 1, "decode": 1}
    stage.pool.patch({"engine": {"blockSize": 16}})
    until(lambda: stage.is_over(new), "the end of the failed revision")
    assert stage.revision() == old
    assert not stage.router.told
    assert stage.pool.condition("Ready")["status"] == "True"


def test_a_spec_set_back_in_the_middle_uses_again_what_drains(stage: Stage) -> None:
    old = stage.begin(2)
    for node in stage.of(old, "decode"):
        stage.report(node, requests=1)
    new = stage.roll()
    stage.made(new, "prefill")
    stage.made(new, "decode")
    stage.serve(new)
    until(lambda: stage.router.acts("drain"), "the drain of an old node")
    [victim] = {*stage.router.acts("drain")}
    until(lambda: stage.notes(victim), "its mark")
    stage.pool.patch({"engine": {"blockSize": 16}})
    until(lambda: stage.router.acts("resume"), "the resume")
    until(lambda: not stage.notes(victim), "the marks' end")
    assert {*stage.router.acts("resume")} == {victim}
    stage.drained(*stage.of(new))
    until(lambda: stage.is_over(new), "the end of the other revision")
    assert stage.deployments(old) == {"prefill": 1, "decode": 2}


def test_without_gpus_for_one_more_of_each_role_it_does_not_begin(stage: Stage) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    old = stage.begin(prefill=gpu, decode=gpu, gpuBudget=3)
    new = stage.roll()
    until(lambda: stage.blocked() == ("True", "GpuBudgetTooSmall"), "condition RolloutBlocked")
    assert stage.pool.condition("RolloutBlocked")["message"] == (
        "4 GPUs are needed for old and new nodes beside each other, 2 are held, and gpuBudget is 3"
    )
    assert stage.deployments(new) == {"prefill": 0, "decode": 0}
    assert stage.deployments(old) == {"prefill": 1, "decode": 1}
    stage.pool.patch({"gpuBudget": 4})
    stage.made(new, "prefill")
    stage.made(new, "decode")


@pytest.mark.long  # a minute; tests/operator/rollout/test_goal.py has the rule
def test_old_nodes_that_are_not_ready_for_long_make_room(stage: Stage) -> None:
    old = stage.begin(3)
    for node in stage.of(old):
        stage.kubelet(node, ready=False)
    stage.router.status = 404
    new = stage.roll()
    until(lambda: stage.deployments(new) == {"prefill": 1, "decode": 3}, "all new ones at once")
    until(lambda: not stage.of(old), "the end of the old ones")


@pytest.mark.timeout(900)  # it starts 8 operators
def test_an_operator_killed_at_each_step_is_followed_by_one_that_ends_the_roll_out(
    stage: Stage, proxy: FaultProxy, operator: Operator
) -> None:
    old = stage.begin()
    [decode] = stage.of(old, "decode")

    def killed(method: str, path: str, fault: Fault, act: Callable[[], object]) -> None:
        operator.kill_at(proxy, fault, act, method=method, path=path)

    def serve_new() -> None:
        new = stage.revision()
        stage.made(new, "prefill")
        stage.made(new, "decode")
        stage.serve(new)
        operator.start()

    def edit() -> None:
        stage.pool.patch({"engine": {"blockSize": 32}})

    def drained() -> None:
        stage.report(decode, state="draining")
        operator.start()

    killed("PATCH", "/deployments/pool-prefill", RESET, edit)
    killed("PATCH", "/deployments/pool-prefill", ANSWERED_RESET, operator.start)
    killed("PATCH", "/inferencepools/pool/status", RESET, operator.start)
    assert not stage.router.told
    operator.start()
    until(lambda: stage.revision() != old, "the new revision")
    operator.kill()
    killed("PATCH", f"/pods/{decode}", ANSWERED_RESET, serve_new)
    until(lambda: stage.notes(decode), "the mark")
    since = stage.notes(decode)["baton.dev/drain-since"]
    killed("PATCH", f"/deployments/pool-decode-{old}", RESET, drained)
    assert stage.deployments(old)["decode"] == 1
    assert stage.notes(decode)["baton.dev/drain-since"] == since
    killed("PATCH", f"/deployments/pool-decode-{old}", ANSWERED_RESET, operator.start)
    until(lambda: stage.deployments(old)["decode"] == 0, "what was done and not answered")
    killed("DELETE", f"/deployments/pool-decode-{old}", RESET, operator.start)
    assert "decode" in stage.deployments(old)
    operator.start()
    until(lambda: "decode" not in stage.deployments(old), "the end of the old Deployment")
    stage.drained(*stage.of(old))
    until(lambda: stage.is_over(old), "the end of the roll-out")
    assert stage.deployments(stage.revision()) == {"prefill": 1, "decode": 1}
