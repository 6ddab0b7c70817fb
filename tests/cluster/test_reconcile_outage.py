"""After an outage of the API server nodes have not reported yet: nothing is said or done by that.

The pods' statuses are what Kubernetes' node controller and kubelets would write.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.operators import Operator, until
from tests.cluster.stage import Stage

DOUBT = "nodes have not reported since the API server was away"
SERVING = [{"name": "node", "image": "node:1", "imageID": "", "ready": True, "restartCount": 0,
            "state": {"running": {}}}]  # fmt: skip


@pytest.fixture
def stage(stage: Stage) -> Stage:
    """With two decode nodes. No scheduler says that there is no room for them."""
    stage.begin(2, decode={"podTemplate": {"spec": {"schedulerName": "nobody"}}})
    return stage


def silence(stage: Stage) -> None:
    """No node has reported for 40 s."""
    for pod in stage.nodes():
        stage.kubelet(pod, ready=False, containerStatuses=SERVING)


def report(stage: Stage) -> None:
    for pod in stage.nodes():
        stage.kubelet(pod, containerStatuses=SERVING)


def outage(stage: Stage, operator: Operator, proxy: FaultProxy) -> None:
    proxy.down(True)
    silence(stage)
    failed = len(proxy.calls)
    until(lambda: any(call.watches for call in proxy.calls[failed:]), "a watch that fails")
    proxy.down(False)


def restart(stage: Stage, operator: Operator, proxy: FaultProxy) -> None:
    operator.kill()
    silence(stage)
    operator.start()


@pytest.mark.parametrize("strike", [outage, pytest.param(restart, marks=pytest.mark.long)])
def test_nodes_that_have_not_reported_since_are_not_lost_and_nothing_is_done(
    stage: Stage,
    operator: Operator,
    proxy: FaultProxy,
    strike: Callable[[Stage, Operator, FaultProxy], None],
) -> None:
    doubts, ready = operator.log().count(DOUBT), stage.pool.condition("Ready")
    unready = stage.pool.events("NotReady")
    strike(stage, operator, proxy)

    def looked() -> bool:
        return operator.log().count(DOUBT) > doubts or stage.pool.events("NotReady") != unready

    until(looked, "a look at silent nodes")
    assert stage.pool.events("NotReady") == unready
    stage.scale(1)
    again = operator.log().count(DOUBT)
    until(lambda: looked() and operator.log().count(DOUBT) > again, "another look")
    assert stage.pool.condition("Ready") == ready
    assert not stage.router.acts("drain")
    report(stage)
    until(lambda: stage.replicas() == 1, "the edit")
    assert set(stage.pool.events("NotReady")) == set(unready)
    assert stage.pool.condition("Ready")["lastTransitionTime"] == ready["lastTransitionTime"]
    # It was drained as any other, not taken for one that holds nothing.
    assert stage.router.acts("drain")


@pytest.mark.long
def test_nodes_that_never_report_are_lost_after_a_minute(
    stage: Stage, operator: Operator, proxy: FaultProxy
) -> None:
    outage(stage, operator, proxy)
    until(lambda: stage.pool.condition("DecodeReady")["reason"] == "NodeLost", "NodeLost")
    assert DOUBT in operator.log()
