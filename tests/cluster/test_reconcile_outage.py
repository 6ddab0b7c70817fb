"""After an outage of the API server nodes have not reported yet: nothing is said or done by that.

The pods' statuses are what Kubernetes' node controller and kubelets would write.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.fake_pool import FakePool
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.operators import Operator, until

DOUBT = "waiting for nodes to report after the API server was away"
SERVING = [{"name": "node", "image": "node:1", "imageID": "", "ready": True, "restartCount": 0,
            "state": {"running": {}}}]  # fmt: skip


@pytest.fixture
def fake_pool(fake_pool: FakePool) -> FakePool:
    """With two decode nodes. No scheduler says that there is no room for them."""
    fake_pool.start(2, decode={"podTemplate": {"spec": {"schedulerName": "nobody"}}})
    return fake_pool


def silence(fake_pool: FakePool) -> None:
    """No node has reported for 40 s."""
    for pod in fake_pool.decode_pods():
        fake_pool.set_pod_status(pod, ready=False, containerStatuses=SERVING)


def report(fake_pool: FakePool) -> None:
    for pod in fake_pool.decode_pods():
        fake_pool.set_pod_status(pod, containerStatuses=SERVING)


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


@pytest.mark.parametrize("strike", [outage, pytest.param(restart, marks=pytest.mark.long)])
def test_nodes_that_have_not_reported_since_are_not_lost_and_nothing_is_done(
    fake_pool: FakePool,
    operator: Operator,
    proxy: FaultProxy,
    strike: Callable[[FakePool, Operator, FaultProxy], None],
) -> None:
    doubts, ready = operator.log().count(DOUBT), fake_pool.pool.condition("Ready")
    unready = fake_pool.pool.events("NotReady")
    strike(fake_pool, operator, proxy)

    def looked() -> bool:
        return operator.log().count(DOUBT) > doubts or fake_pool.pool.events("NotReady") != unready

    until(looked, "a look at silent nodes")
    assert fake_pool.pool.events("NotReady") == unready
    fake_pool.scale(1)
    again = operator.log().count(DOUBT)
    until(lambda: looked() and operator.log().count(DOUBT) > again, "another look")
    assert fake_pool.pool.condition("Ready") == ready
    assert not fake_pool.router.targets("drain")
    report(fake_pool)
    until(lambda: fake_pool.decode_replicas() == 1, "the edit")
    assert set(fake_pool.pool.events("NotReady")) == set(unready)
    assert fake_pool.pool.condition("Ready")["lastTransitionTime"] == ready["lastTransitionTime"]
    # It was drained as any other, not taken for one that holds nothing.
    assert fake_pool.router.targets("drain")


@pytest.mark.long
def test_nodes_that_never_report_are_lost_after_a_minute(
    fake_pool: FakePool, operator: Operator, proxy: FaultProxy
) -> None:
    outage(fake_pool, operator, proxy)
    until(lambda: fake_pool.pool.condition("DecodeReady")["reason"] == "NodeLost", "NodeLost")
    assert DOUBT in operator.log()
