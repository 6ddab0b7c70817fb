"""New nodes replace those of an older spec in step, and only once the new ones are ready."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton_operator.names import DRAIN_S
from tests.cluster.fake_pool import OTHER_FINGERPRINT, FakePool
from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, Fault, FaultProxy
from tests.cluster.operators import Operator, until


def test_old_nodes_are_drained_as_new_nodes_of_both_roles_become_ready(fake_pool: FakePool) -> None:
    old = fake_pool.start(2)
    [old_prefill], [first, second] = (
        fake_pool.node_pods(old, "prefill"),
        fake_pool.node_pods(old, "decode"),
    )
    fake_pool.report(first, requests=3)
    new = fake_pool.roll()
    fake_pool.wait_pods(new, "prefill")
    fake_pool.wait_pods(new, "decode")
    assert fake_pool.deployments(new) == {"prefill": 1, "decode": 1}
    fake_pool.make_ready(new, "prefill")
    fake_pool.make_ready(new, "decode")

    fake_pool.finish_drains(second)
    assert fake_pool.drain_request(second) == {
        "deadline_s": DRAIN_S,
        "reason": "roll-out",
        "replaced_by": new,
    }
    until(
        lambda: fake_pool.node_pods(old, "decode") == [first],
        "the end of the less loaded old node",
    )
    assert not fake_pool.drain_request(old_prefill)
    fake_pool.wait_pods(new, "decode", 2)
    assert not fake_pool.drain_request(first)

    fake_pool.make_ready(new, "decode")
    fake_pool.finish_drains(first, old_prefill)
    until(lambda: fake_pool.is_gone(old), "the end of the roll-out")
    assert fake_pool.deployments(new) == {"prefill": 1, "decode": 2}
    until(
        lambda: fake_pool.pool.condition("Updated")["reason"] == "OneRevision", "condition Updated"
    )
    until(lambda: len(fake_pool.pool.events("RolledOut")) == 1, "its event")


def test_no_old_node_is_removed_while_one_role_has_no_new_node(fake_pool: FakePool) -> None:
    old = fake_pool.start()
    new = fake_pool.roll()
    fake_pool.wait_pods(new, "decode")
    fake_pool.make_ready(new, "decode")
    until(lambda: "1 of 2 ready" in fake_pool.pool.condition("Updated")["message"], "the status")
    assert fake_pool.deployments(old) == {"prefill": 1, "decode": 1}
    assert not fake_pool.router.calls


def test_requests_of_another_fingerprint_get_the_spec_s_drain_time(
    fake_pool: FakePool,
) -> None:
    # Long enough for the test to read the state in between.
    old = fake_pool.start(rollout={"maxDrainSeconds": 20})
    [decode], [prefill] = fake_pool.node_pods(old, "decode"), fake_pool.node_pods(old, "prefill")
    fake_pool.report(decode, requests=1)
    new = fake_pool.roll()
    fake_pool.wait_pods(new, "prefill")
    fake_pool.wait_pods(new, "decode")
    fake_pool.make_ready(new, fingerprint=OTHER_FINGERPRINT)
    fake_pool.finish_drains(prefill)
    until(lambda: fake_pool.drain_request(decode), "the drain")
    assert fake_pool.drain_request(decode) == {
        "deadline_s": 20,
        "reason": "roll-out",
        "replaced_by": new,
    }
    assert fake_pool.drain_annotations(decode)["baton.dev/drain-seconds"] == "20"
    fake_pool.report(decode, requests=1, state="draining")
    # Its request never ends.
    until(lambda: fake_pool.is_gone(old), "the end of the roll-out")


def test_the_default_drain_time_is_the_request_timeout(
    fake_pool: FakePool,
) -> None:
    old = fake_pool.start(router={"extraArgs": ["--request-timeout=77"]})
    new = fake_pool.roll()
    fake_pool.wait_pods(new, "prefill")
    fake_pool.wait_pods(new, "decode")
    fake_pool.make_ready(new, fingerprint=OTHER_FINGERPRINT)
    [decode] = fake_pool.node_pods(old, "decode")
    until(lambda: fake_pool.drain_request(decode), "the drain")
    assert fake_pool.drain_request(decode)["deadline_s"] == 77


def test_new_nodes_that_stay_unready_stop_the_roll_out_and_reverting_the_spec_ends_it(
    fake_pool: FakePool,
) -> None:
    old = fake_pool.start()
    new = fake_pool.roll()
    until(
        lambda: fake_pool.rollout_blocked() == ("True", "NewNodesFailing"),
        "condition RolloutBlocked",
    )
    # The control plane has no nodes that could run pods.
    message = fake_pool.pool.condition("RolloutBlocked")["message"]
    assert message.startswith("Unschedulable: pool-")
    assert fake_pool.pool.condition("Ready")["status"] == "True"
    until(lambda: len(fake_pool.pool.events("RolloutBlocked")) == 1, "its event")
    assert fake_pool.deployments(old) == {"prefill": 1, "decode": 1}
    fake_pool.pool.patch({"engine": {"blockSize": 16}})
    until(lambda: fake_pool.is_gone(new), "the end of the failed revision")
    assert fake_pool.revision() == old
    assert not fake_pool.router.calls
    assert fake_pool.pool.condition("Ready")["status"] == "True"


def test_reverting_the_spec_during_a_roll_out_resumes_draining_nodes(fake_pool: FakePool) -> None:
    old = fake_pool.start(2)
    for node in fake_pool.node_pods(old, "decode"):
        fake_pool.report(node, requests=1)
    new = fake_pool.roll()
    fake_pool.wait_pods(new, "prefill")
    fake_pool.wait_pods(new, "decode")
    fake_pool.make_ready(new)
    until(lambda: fake_pool.router.targets("drain"), "the drain of an old node")
    [victim] = {*fake_pool.router.targets("drain")}
    until(lambda: fake_pool.drain_annotations(victim), "its annotations")
    fake_pool.pool.patch({"engine": {"blockSize": 16}})
    until(lambda: fake_pool.router.targets("resume"), "the resume")
    until(lambda: not fake_pool.drain_annotations(victim), "the removal of the annotations")
    assert {*fake_pool.router.targets("resume")} == {victim}
    fake_pool.finish_drains(*fake_pool.node_pods(new))
    until(lambda: fake_pool.is_gone(new), "the end of the other revision")
    assert fake_pool.deployments(old) == {"prefill": 1, "decode": 2}


def test_without_gpus_for_one_more_node_of_each_role_the_roll_out_does_not_start(
    fake_pool: FakePool,
) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    old = fake_pool.start(prefill=gpu, decode=gpu, gpuBudget=3)
    new = fake_pool.roll()
    until(
        lambda: fake_pool.rollout_blocked() == ("True", "GpuBudgetTooSmall"),
        "condition RolloutBlocked",
    )
    assert fake_pool.pool.condition("RolloutBlocked")["message"] == (
        "old and new nodes together need 4 GPUs, 2 are held, and gpuBudget is 3"
    )
    assert fake_pool.deployments(new) == {"prefill": 0, "decode": 0}
    assert fake_pool.deployments(old) == {"prefill": 1, "decode": 1}
    fake_pool.pool.patch({"gpuBudget": 4})
    fake_pool.wait_pods(new, "prefill")
    fake_pool.wait_pods(new, "decode")


@pytest.mark.long  # it takes a minute; tests/operator/rollout/test_goal.py tests the rule
def test_old_nodes_that_are_unready_for_long_are_removed_without_a_drain(
    fake_pool: FakePool,
) -> None:
    old = fake_pool.start(3)
    for node in fake_pool.node_pods(old):
        fake_pool.set_pod_status(node, ready=False)
    fake_pool.router.status = 404
    new = fake_pool.roll()
    until(
        lambda: fake_pool.deployments(new) == {"prefill": 1, "decode": 3}, "all new nodes at once"
    )
    until(lambda: not fake_pool.node_pods(old), "the end of the old nodes")


@pytest.mark.timeout(900)  # it starts 8 operators
def test_after_a_kill_at_each_step_the_next_operator_ends_the_roll_out(
    fake_pool: FakePool, proxy: FaultProxy, operator: Operator
) -> None:
    old = fake_pool.start()
    [decode] = fake_pool.node_pods(old, "decode")

    def kill_at(method: str, path: str, fault: Fault, act: Callable[[], object]) -> None:
        operator.kill_at(proxy, fault, act, method=method, path=path)

    def serve_new() -> None:
        new = fake_pool.revision()
        fake_pool.wait_pods(new, "prefill")
        fake_pool.wait_pods(new, "decode")
        fake_pool.make_ready(new)
        operator.start()

    def edit() -> None:
        fake_pool.pool.patch({"engine": {"blockSize": 32}})

    def report_drained() -> None:
        fake_pool.report(decode, state="draining")
        operator.start()

    kill_at("PATCH", "/deployments/pool-prefill", RESET, edit)
    kill_at("PATCH", "/deployments/pool-prefill", ANSWERED_RESET, operator.start)
    kill_at("PATCH", "/inferencepools/pool/status", RESET, operator.start)
    assert not fake_pool.router.calls
    operator.start()
    until(lambda: fake_pool.revision() != old, "the new revision")
    operator.kill()
    kill_at("PATCH", f"/pods/{decode}", ANSWERED_RESET, serve_new)
    until(lambda: fake_pool.drain_annotations(decode), "the annotations")
    since = fake_pool.drain_annotations(decode)["baton.dev/drain-since"]
    kill_at("PATCH", f"/deployments/pool-decode-{old}", RESET, report_drained)
    assert fake_pool.deployments(old)["decode"] == 1
    assert fake_pool.drain_annotations(decode)["baton.dev/drain-since"] == since
    kill_at("PATCH", f"/deployments/pool-decode-{old}", ANSWERED_RESET, operator.start)
    until(lambda: fake_pool.deployments(old)["decode"] == 0, "the write whose answer was lost")
    kill_at("DELETE", f"/deployments/pool-decode-{old}", RESET, operator.start)
    assert "decode" in fake_pool.deployments(old)
    operator.start()
    until(lambda: "decode" not in fake_pool.deployments(old), "the end of the old Deployment")
    fake_pool.finish_drains(*fake_pool.node_pods(old))
    until(lambda: fake_pool.is_gone(old), "the end of the roll-out")
    assert fake_pool.deployments(fake_pool.revision()) == {"prefill": 1, "decode": 1}
