"""A sick API server: the pool becomes what it should be all the same, and the operator lives on.

Between operator and API server stands a proxy that loses, refuses and delays; tests look at the API
server itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_operator.api.crd import crd
from tests.cluster.fault_proxy import ANSWERED_RESET, RESET, Answer, Call, Fault, FaultProxy
from tests.cluster.installed import definition
from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import ROUTES, SIM, ApiClient, Operator, Pool, print_log, until

CHILDREN = 17


@pytest.fixture(scope="module")
def plane(fresh_control_plane: Kubernetes) -> Iterator[Kubernetes]:
    with definition(fresh_control_plane, crd()):
        yield fresh_control_plane


@pytest.fixture(scope="module")
def api_client(
    plane: Kubernetes, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiClient]:
    with ApiClient(plane.kubeconfig, programs, tmp_path_factory.mktemp("api-client")) as one:
        yield one


@pytest.fixture(scope="module")
def proxy(plane: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    with FaultProxy(plane.kubeconfig, tmp_path_factory.mktemp("proxy")) as one:
        yield one


@pytest.fixture(scope="module")
def operator(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with Operator(proxy.kubeconfig, tmp_path_factory.mktemp("operator")) as one:
        yield one


@pytest.fixture(scope="module")
def only(operator: Operator, plane: Kubernetes, api_client: ApiClient) -> Iterator[Pool]:
    """One pool for all faults: after each it is as specified."""
    namespace = plane.new_namespace()
    one = Pool(plane, api_client, namespace)
    yield one
    one.delete()
    plane.delete_namespace(namespace)


@pytest.fixture
def mended(operator: Operator, proxy: FaultProxy, only: Pool) -> Iterator[Pool]:
    """As specified, before anything goes wrong."""
    only.apply(SIM)
    try:
        until(lambda: complete(only) and router_replicas(only) == 1, "all children")
        yield only
    finally:
        proxy.watch(None)
        proxy.set_down(False)
        print_log(operator)


def lives(operator: Operator) -> int:
    """How often kopf gave up a watch, so that the operator started all of them again."""
    return operator.log().count("restarting the operator in")


@pytest.fixture
def pool(operator: Operator, mended: Pool) -> Iterator[Pool]:
    """What goes wrong ends nothing that would have to begin anew."""
    before = lives(operator)
    yield mended
    assert lives(operator) == before


def complete(pool: Pool) -> bool:
    applied = pool.condition("Applied").get("status") == "True"
    return applied and len(pool.children()) == CHILDREN


def follows(pool: Pool, replicas: int) -> None:
    """An edit from now on reaches the router."""
    pool.patch({"router": {"replicas": replicas}})
    until(lambda: router_replicas(pool) == replicas, "the edit")


def router_replicas(pool: Pool) -> int:
    router = pool.child("Deployment", "router")
    return router["spec"]["replicas"] if router else 0


def failing(
    fault: Fault, which: Callable[[Call], bool], times: int
) -> Callable[[Call], Fault | None]:
    left = times

    def watch(call: Call) -> Fault | None:
        nonlocal left
        if left and which(call):
            left -= 1
            return fault
        return None

    return watch


def test_dropped_watches_are_taken_up_again(pool: Pool, proxy: FaultProxy) -> None:
    proxy.drop_watches()
    follows(pool, 2)
    pool.kubectl("delete", "service", "pool-router", "--wait=false")
    until(lambda: complete(pool), "the service")


def test_what_was_deleted_while_watches_were_down_is_noticed(pool: Pool, proxy: FaultProxy) -> None:
    """The server has forgotten the version from which the watch would go on, so that no event
    tells of the deletion."""
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
    expired = Answer(200, {}, error)
    proxy.watch(lambda call: RESET if "/services" in call.path else None)
    proxy.drop_watches()
    pool.kubectl("delete", "service", "pool-router")
    proxy.watch(failing(expired, lambda call: call.watches and "/services" in call.path, 1))
    until(lambda: complete(pool), "the service")


@pytest.mark.parametrize(
    "fault",
    [
        Answer(409),
        Answer(429, {"Retry-After": "1"}),
        Answer(500),
        Answer(503, {"Retry-After": "1"}),
        RESET,
        ANSWERED_RESET,
    ],
    ids=["409", "429", "500", "503", "reset", "answer lost"],
)
def test_failing_writes_are_tried_until_they_succeed(
    pool: Pool, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.watch(failing(fault, lambda call: call.writes, 3))
    follows(pool, 3)
    until(lambda: complete(pool), "all children")


@pytest.mark.parametrize(
    "fault", [Answer(500), Answer(429, {"Retry-After": "1"}), RESET], ids=["500", "429", "reset"]
)
def test_failing_reads_and_watches_are_tried_until_they_succeed(
    pool: Pool, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.watch(failing(fault, lambda call: not call.writes, 20))
    proxy.drop_watches()
    follows(pool, 3)


def test_retry_after_is_obeyed(pool: Pool, proxy: FaultProxy) -> None:
    router = "/deployments/pool-router"
    refused: list[Call] = []

    def watch(call: Call) -> Fault | None:
        if refused or router not in call.path:
            return None
        refused.append(call)
        return Answer(429, {"Retry-After": "3"})

    proxy.watch(watch)
    follows(pool, 2)
    begun = refused[0].at
    first, second, *_ = [call for call in proxy.requests_since(begun) if router in call.path]
    assert second.at - first.at >= 3


def test_random_faults_delay_and_change_nothing(pool: Pool, proxy: FaultProxy) -> None:
    chance = random.Random(7)
    faults: list[Fault] = [Answer(500), Answer(429), RESET, ANSWERED_RESET]
    # Nothing that only reads is a conflict.
    writes = [*faults, Answer(409)]

    def watch(call: Call) -> Fault | None:
        possible = writes if call.writes else faults
        return chance.choice(possible) if chance.random() < 0.3 else None

    proxy.watch(watch)
    for replicas in (2, 3, 4):
        follows(pool, replicas)
    proxy.watch(None)
    until(lambda: complete(pool), "all children")


@pytest.mark.parametrize(
    "seconds", [5, pytest.param(120, marks=pytest.mark.long)], ids=["short", "2 minutes"]
)
def test_an_outage_is_survived(pool: Pool, proxy: FaultProxy, seconds: int) -> None:
    before = {name: one["metadata"]["uid"] for name, one in pool.children().items()}
    proxy.set_down(True)
    pool.patch({"router": {"replicas": 2}})
    time.sleep(seconds)
    proxy.set_down(False)
    until(lambda: router_replicas(pool) == 2, "the edit")
    follows(pool, 3)
    after = {name: one["metadata"]["uid"] for name, one in pool.children().items()}
    assert after == before, "something was made anew"


def test_a_restart_of_the_api_server_is_survived(pool: Pool, plane: Kubernetes) -> None:
    plane.stop_apiserver()
    time.sleep(2)
    plane.start_apiserver()
    follows(pool, 2)
    pool.kubectl("delete", "service", "pool-router", "--wait=false")
    until(lambda: complete(pool), "the service")


def test_a_kind_that_is_not_installed_is_told_and_made_when_it_is(
    pool: Pool, plane: Kubernetes
) -> None:
    pool.apply({**SIM, "router": {"httpRoute": {"parentRefs": [{"name": "gate"}]}}})
    until(lambda: pool.condition("Applied")["status"] == "False", "condition Applied")
    assert "the cluster does not have HTTPRoute" in pool.condition("Applied")["message"]
    with definition(plane, ROUTES):
        until(lambda: pool.child("HTTPRoute", "router"), "the route")
        until(lambda: pool.condition("Applied")["status"] == "True", "condition Applied")
        pool.apply(SIM)
        until(lambda: not pool.child("HTTPRoute", "router"), "the route's end")


def test_a_watch_that_kopf_gives_up_is_begun_anew(
    operator: Operator, mended: Pool, proxy: FaultProxy
) -> None:
    before = lives(operator)
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError"}}
    proxy.watch(failing(Answer(200, {}, error), lambda call: call.watches, 1))
    proxy.drop_watches()
    until(lambda: lives(operator) > before, "the next life")
    follows(mended, 2)
    mended.kubectl("delete", "service", "pool-router", "--wait=false")
    until(lambda: complete(mended), "the service")
