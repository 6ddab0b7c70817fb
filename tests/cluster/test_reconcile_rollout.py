"""Nodes of an older spec give way to new ones in step, and never before these are ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from baton_operator.builders.pods import DRAIN_S
from tests.cluster.drain_stage import Router
from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, Call, Fault, FaultProxy
from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import Operator, Pool, Window, tell, until
from tests.cluster.rollout_stage import OTHER, RolloutStage


@pytest.fixture(scope="module")
def operator(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with Operator(proxy.kubeconfig, tmp_path_factory.mktemp("operator")) as one:
        yield one


@pytest.fixture
def stage(
    operator: Operator,
    control_plane: Kubernetes,
    window: Window,
    namespace: str,
    index: int,
    router: Router,
) -> Iterator[RolloutStage]:
    pool = Pool(control_plane, window, namespace)
    one = RolloutStage(pool, window, f"redis://127.0.0.1:{index}", router)
    yield one
    one.pool.delete()
    tell(operator)


def test_old_nodes_go_as_new_ones_get_ready_in_both_roles(stage: RolloutStage) -> None:
    old = stage.start(nodes=2)
    [old_prefill], [first, second] = stage.of(old, "prefill"), stage.of(old, "decode")
    stage.say(first, requests=3)
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
    until(lambda: len(stage.events("RolledOut")) == 1, "its event")


def test_nothing_old_goes_while_one_role_is_behind(stage: RolloutStage) -> None:
    old = stage.start()
    new = stage.roll()
    stage.made(new, "decode")
    stage.serve(new, "decode")
    until(lambda: "1 of 2 ready" in stage.pool.condition("Updated")["message"], "the status")
    assert stage.deployments(old) == {"prefill": 1, "decode": 1}
    assert not stage.router.told


def test_requests_that_no_new_node_can_take_over_have_the_time_that_the_spec_says(
    stage: RolloutStage,
) -> None:
    # Long enough for a look at it.
    old = stage.start(rollout={"maxDrainSeconds": 20})
    [decode], [prefill] = stage.of(old, "decode"), stage.of(old, "prefill")
    stage.say(decode, requests=1)
    new = stage.roll()
    stage.made(new, "prefill")
    stage.made(new, "decode")
    stage.serve(new, fingerprint=OTHER)
    stage.drained(prefill)
    until(lambda: stage.words(decode), "the drain")
    assert stage.words(decode) == {"deadline_s": 20, "reason": "roll-out", "replaced_by": new}
    assert stage.notes(decode)["baton.dev/drain-seconds"] == "20"
    stage.say(decode, requests=1, state="draining")
    # Its request never ends.
    until(lambda: stage.is_over(old), "the end of the roll-out")


def test_without_a_word_in_the_spec_it_is_as_long_as_a_request_may_take(
    stage: RolloutStage,
) -> None:
    old = stage.start(router={"extraArgs": ["--request-timeout=77"]})
    new = stage.roll()
    stage.made(new, "prefill")
    stage.made(new, "decode")
    stage.serve(new, fingerprint=OTHER)
    [decode] = stage.of(old, "decode")
    until(lambda: stage.words(decode), "the drain")
    assert stage.words(decode)["deadline_s"] == 77


def test_new_nodes_that_do_not_get_ready_stop_it_and_the_spec_set_back_ends_it(
    stage: RolloutStage,
) -> None:
    old = stage.start()
    new = stage.roll()
    until(lambda: stage.blocked() == ("True", "NewNodesFailing"), "condition RolloutBlocked")
    # No node of the cluster runs pods.
    message = stage.pool.condition("RolloutBlocked")["message"]
    assert message.startswith("Unschedulable: pool-")
    assert stage.pool.condition("Ready")["status"] == "True"
    until(lambda: len(stage.events("RolloutBlocked")) == 1, "its event")
    assert stage.deployments(old) == {"prefill": 1, "decode": 1}
    stage.pool.patch({"engine": {"blockSize": 16}})
    until(lambda: stage.is_over(new), "the end of the failed revision")
    assert stage.revision() == old
    assert not stage.router.told
    assert stage.pool.condition("Ready")["status"] == "True"


def test_a_spec_set_back_in_the_middle_uses_again_what_drains(stage: RolloutStage) -> None:
    old = stage.start(nodes=2)
    for node in stage.of(old, "decode"):
        stage.say(node, requests=1)
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


def test_without_gpus_for_one_more_of_each_role_it_does_not_begin(stage: RolloutStage) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    old = stage.start(prefill=gpu, decode=gpu, gpuBudget=3)
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


def test_old_nodes_that_are_not_ready_for_long_make_room(stage: RolloutStage) -> None:
    old = stage.start(nodes=3)
    for node in stage.of(old):
        stage.kubelet(node, ready=False)
    stage.router.status = 404
    new = stage.roll()
    until(lambda: stage.deployments(new) == {"prefill": 1, "decode": 3}, "all new ones at once")
    until(lambda: not stage.of(old), "the end of the old ones")


class Killer:
    """Kills the operator at its first such write: before the API server sees it, or with it done
    and unanswered."""

    def __init__(self, operator: Operator, method: str, path: str, fault: Fault) -> None:
        self._operator = operator
        self._method = method
        self._path = path
        self._fault = fault
        self.done = threading.Event()

    def __call__(self, call: Call) -> Fault | None:
        wanted = call.method == self._method and self._path in call.path
        if self.done.is_set() or not wanted:
            return None
        self._operator.kill()
        self.done.set()
        return self._fault


@pytest.mark.timeout(900)  # it starts 8 operators
def test_an_operator_killed_at_each_step_is_followed_by_one_that_ends_the_roll_out(
    stage: RolloutStage, proxy: FaultProxy, operator: Operator
) -> None:
    old = stage.start()
    [decode] = stage.of(old, "decode")

    def killed(method: str, path: str, fault: Fault, act: Callable[[], object]) -> None:
        killer = Killer(operator, method, path, fault)
        proxy.watch(killer)
        act()
        until(killer.done.is_set, f"{method} of {path}")
        proxy.watch(None)

    def serve_new() -> None:
        new = stage.revision()
        stage.made(new, "prefill")
        stage.made(new, "decode")
        stage.serve(new)
        operator.start()

    def edit() -> None:
        stage.pool.patch({"engine": {"blockSize": 32}})

    def drained() -> None:
        stage.say(decode, state="draining")
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
