"""Under faults of the API server, a pool still reaches its spec, and the operator keeps running.

A proxy between operator and API server loses, refuses and delays requests. The tests themselves
read from the API server directly.
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
def shared_pool(operator: Operator, plane: Kubernetes, api_client: ApiClient) -> Iterator[Pool]:
    """One pool for all faults. After each test it matches its spec."""
    namespace = plane.new_namespace()
    one = Pool(plane, api_client, namespace)
    yield one
    one.delete()
    plane.delete_namespace(namespace)


@pytest.fixture
def healthy_pool(operator: Operator, proxy: FaultProxy, shared_pool: Pool) -> Iterator[Pool]:
    """The shared pool, once it matches its spec; the fixture ends all faults afterwards."""
    shared_pool.apply(SIM)
    try:
        until(
            lambda: is_complete(shared_pool) and router_replicas(shared_pool) == 1, "all children"
        )
        yield shared_pool
    finally:
        proxy.watch(None)
        proxy.set_down(False)
        print_log(operator)


def count_restarts(operator: Operator) -> int:
    """How often kopf gave up a watch, upon which the operator restarts all watches."""
    return operator.log().count("restarting the operator in")


@pytest.fixture
def pool(operator: Operator, healthy_pool: Pool) -> Iterator[Pool]:
    """The shared pool; after the test, checks that no watch was given up."""
    before = count_restarts(operator)
    yield healthy_pool
    assert count_restarts(operator) == before


def is_complete(pool: Pool) -> bool:
    applied = pool.condition("Applied").get("status") == "True"
    return applied and len(pool.children()) == CHILDREN


def check_edit(pool: Pool, replicas: int) -> None:
    """Check that an edit made now reaches the router's Deployment."""
    pool.patch({"router": {"replicas": replicas}})
    until(lambda: router_replicas(pool) == replicas, "the edit")


def router_replicas(pool: Pool) -> int:
    router = pool.child("Deployment", "router")
    return router["spec"]["replicas"] if router else 0


def fail_first(
    fault: Fault, which: Callable[[Call], bool], times: int
) -> Callable[[Call], Fault | None]:
    remaining = times

    def watch(call: Call) -> Fault | None:
        nonlocal remaining
        if remaining and which(call):
            remaining -= 1
            return fault
        return None

    return watch


def test_dropped_watches_are_resumed(pool: Pool, proxy: FaultProxy) -> None:
    proxy.drop_watches()
    check_edit(pool, 2)
    pool.kubectl("delete", "service", "pool-router", "--wait=false")
    until(lambda: is_complete(pool), "the service")


def test_a_deletion_during_a_broken_watch_is_noticed(pool: Pool, proxy: FaultProxy) -> None:
    """The server no longer has the version from which the watch would resume, so no event reports
    the deletion."""
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
    expired = Answer(200, {}, error)
    proxy.watch(lambda call: RESET if "/services" in call.path else None)
    proxy.drop_watches()
    pool.kubectl("delete", "service", "pool-router")
    proxy.watch(fail_first(expired, lambda call: call.watches and "/services" in call.path, 1))
    until(lambda: is_complete(pool), "the service")


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
def test_failing_writes_are_retried_until_they_succeed(
    pool: Pool, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.watch(fail_first(fault, lambda call: call.writes, 3))
    check_edit(pool, 3)
    until(lambda: is_complete(pool), "all children")


@pytest.mark.parametrize(
    "fault", [Answer(500), Answer(429, {"Retry-After": "1"}), RESET], ids=["500", "429", "reset"]
)
def test_failing_reads_and_watches_are_retried_until_they_succeed(
    pool: Pool, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.watch(fail_first(fault, lambda call: not call.writes, 20))
    proxy.drop_watches()
    check_edit(pool, 3)


def test_retry_after_is_obeyed(pool: Pool, proxy: FaultProxy) -> None:
    router = "/deployments/pool-router"
    refused: list[Call] = []

    def watch(call: Call) -> Fault | None:
        if refused or router not in call.path:
            return None
        refused.append(call)
        return Answer(429, {"Retry-After": "3"})

    proxy.watch(watch)
    check_edit(pool, 2)
    start = refused[0].at
    first, second, *_ = [call for call in proxy.requests_since(start) if router in call.path]
    assert second.at - first.at >= 3


def test_random_faults_only_delay_edits(pool: Pool, proxy: FaultProxy) -> None:
    chance = random.Random(7)
    faults: list[Fault] = [Answer(500), Answer(429), RESET, ANSWERED_RESET]
    # Only writes can conflict.
    writes = [*faults, Answer(409)]

    def watch(call: Call) -> Fault | None:
        possible = writes if call.writes else faults
        return chance.choice(possible) if chance.random() < 0.3 else None

    proxy.watch(watch)
    for replicas in (2, 3, 4):
        check_edit(pool, replicas)
    proxy.watch(None)
    until(lambda: is_complete(pool), "all children")


@pytest.mark.parametrize(
    "seconds", [5, pytest.param(120, marks=pytest.mark.long)], ids=["short", "2 minutes"]
)
def test_edits_are_applied_after_an_outage_without_new_objects(
    pool: Pool, proxy: FaultProxy, seconds: int
) -> None:
    before = {name: one["metadata"]["uid"] for name, one in pool.children().items()}
    proxy.set_down(True)
    pool.patch({"router": {"replicas": 2}})
    time.sleep(seconds)
    proxy.set_down(False)
    until(lambda: router_replicas(pool) == 2, "the edit")
    check_edit(pool, 3)
    after = {name: one["metadata"]["uid"] for name, one in pool.children().items()}
    assert after == before, "an object was recreated"


def test_the_operator_works_on_after_a_restart_of_the_api_server(
    pool: Pool, plane: Kubernetes
) -> None:
    plane.stop_apiserver()
    time.sleep(2)
    plane.start_apiserver()
    check_edit(pool, 2)
    pool.kubectl("delete", "service", "pool-router", "--wait=false")
    until(lambda: is_complete(pool), "the service")


def test_a_missing_kind_is_reported_and_its_object_is_created_once_it_is_installed(
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


def test_a_watch_that_kopf_gives_up_is_restarted(
    operator: Operator, healthy_pool: Pool, proxy: FaultProxy
) -> None:
    before = count_restarts(operator)
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError"}}
    proxy.watch(fail_first(Answer(200, {}, error), lambda call: call.watches, 1))
    proxy.drop_watches()
    until(lambda: count_restarts(operator) > before, "the restart")
    check_edit(healthy_pool, 2)
    healthy_pool.kubectl("delete", "service", "pool-router", "--wait=false")
    until(lambda: is_complete(healthy_pool), "the service")
