"""After an API server outage, nodes that have not reported yet cause no condition and no action.

The tests write pod statuses in place of Kubernetes' node controller and kubelets.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.fake_pool import FakePool
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.operators import Operator, until

DOUBT = "waiting for nodes to report after the API server was away"
RUNNING = {"ready": True, "restartCount": 0, "state": {"running": {}}}
CONTAINER_STATUSES = [{"name": "node", "image": "node:1", "imageID": "", **RUNNING}]


@pytest.fixture
def fake_pool(fake_pool: FakePool) -> FakePool:
    """A pool with two decode nodes, whose pods no scheduler reports as unschedulable."""
    fake_pool.start(2, decode={"podTemplate": {"spec": {"schedulerName": "nobody"}}})
    return fake_pool


def silence(fake_pool: FakePool) -> None:
    """Set the statuses of pods whose cluster nodes have not reported for 40 s."""
    for pod in fake_pool.decode_pods():
        fake_pool.set_pod_status(pod, ready=False, containerStatuses=CONTAINER_STATUSES)


def report_again(fake_pool: FakePool) -> None:
    for pod in fake_pool.decode_pods():
        fake_pool.set_pod_status(pod, containerStatuses=CONTAINER_STATUSES)


def outage(fake_pool: FakePool, operator: Operator, proxy: FaultProxy) -> None:
    proxy.set_down(True)
    silence(fake_pool)
    failed = len(proxy.calls)
    until(lambda: any(call.watches for call in proxy.calls[failed:]), "a watch that fails")
    proxy.set_down(False)


def restart(fake_pool: FakePool, operator: Operator, proxy: FaultProxy) -> None:
    operator.kill()
    silence(fake_pool)
    operator.start()


@pytest.mark.parametrize("interrupt", [outage, pytest.param(restart, marks=pytest.mark.long)])
def test_until_nodes_report_after_an_outage_they_are_neither_lost_nor_drained(
    fake_pool: FakePool,
    operator: Operator,
    proxy: FaultProxy,
    interrupt: Callable[[FakePool, Operator, FaultProxy], None],
) -> None:
    doubts, ready = operator.log().count(DOUBT), fake_pool.pool.condition("Ready")
    unready = fake_pool.pool.events("NotReady")
    interrupt(fake_pool, operator, proxy)

    def looked() -> bool:
        return operator.log().count(DOUBT) > doubts or fake_pool.pool.events("NotReady") != unready

    until(looked, "a look at silent nodes")
    assert fake_pool.pool.events("NotReady") == unready
    fake_pool.scale(1)
    doubts_before_scaling = operator.log().count(DOUBT)
    until(lambda: looked() and operator.log().count(DOUBT) > doubts_before_scaling, "another look")
    assert fake_pool.pool.condition("Ready") == ready
    assert not fake_pool.router.targets("drain")
    report_again(fake_pool)
    until(lambda: fake_pool.decode_replicas() == 1, "the edit")
    assert set(fake_pool.pool.events("NotReady")) == set(unready)
    assert fake_pool.pool.condition("Ready")["lastTransitionTime"] == ready["lastTransitionTime"]
    # The node was drained like any other, not removed as an unready one.
    assert fake_pool.router.targets("drain")


@pytest.mark.long
def test_nodes_that_never_report_are_lost_after_a_minute(
    fake_pool: FakePool, operator: Operator, proxy: FaultProxy
) -> None:
    outage(fake_pool, operator, proxy)
    until(lambda: fake_pool.pool.condition("DecodeReady")["reason"] == "NodeLost", "NodeLost")
    assert DOUBT in operator.log()
