"""After an outage of the API server nodes have not reported yet: nothing is said or done by that.

The pods' statuses are what Kubernetes' node controller and kubelets would write.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.drain_stage import Router, Stage
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import Body, Operator, Pool, Window, tell, until

DOUBT = "nodes have not reported since the API server was away"
SERVING = [{"name": "node", "image": "node:1", "imageID": "", "ready": True, "restartCount": 0,
            "state": {"running": {}}}]  # fmt: skip


@pytest.fixture(scope="module")
def operator(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with Operator(proxy.kubeconfig, tmp_path_factory.mktemp("operator")) as one:
        yield one


class Placed(Stage):
    """No scheduler says of its nodes that there is no room for them."""

    def spec(self, decode: int) -> Body:
        template = {"spec": {"schedulerName": "nobody"}}
        spec = super().spec(decode)
        return spec | {"decode": spec["decode"] | {"podTemplate": template}}


@pytest.fixture
def stage(
    operator: Operator,
    control_plane: Kubernetes,
    window: Window,
    namespace: str,
    index: int,
    router: Router,
) -> Iterator[Stage]:
    one = Placed(
        Pool(control_plane, window, namespace), window, f"redis://127.0.0.1:{index}", router
    )
    one.begin(2)
    yield one
    one.pool.delete()
    tell(operator)


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
    time.sleep(1)  # a try to watch fails
    proxy.down(False)


def restart(stage: Stage, operator: Operator, proxy: FaultProxy) -> None:
    operator.kill()
    silence(stage)
    operator.start()


@pytest.mark.parametrize("strike", [outage, restart])
def test_nodes_that_have_not_reported_since_are_not_lost_and_nothing_is_done(
    stage: Stage,
    operator: Operator,
    proxy: FaultProxy,
    strike: Callable[[Stage, Operator, FaultProxy], None],
) -> None:
    doubts, ready = operator.log().count(DOUBT), stage.pool.condition("Ready")
    unready = stage.events("NotReady")
    strike(stage, operator, proxy)

    def looked() -> bool:
        return operator.log().count(DOUBT) > doubts or stage.events("NotReady") != unready

    until(looked, "a look at silent nodes")
    assert stage.events("NotReady") == unready
    stage.scale(1)
    again = operator.log().count(DOUBT)
    until(lambda: looked() and operator.log().count(DOUBT) > again, "another look")
    assert stage.pool.condition("Ready") == ready
    assert not stage.router.acts("drain")
    report(stage)
    until(lambda: stage.replicas() == 1, "the edit")
    assert set(stage.events("NotReady")) == set(unready)
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
