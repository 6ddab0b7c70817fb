"""The leader's lease in a real API server, with the test's own clock."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import pytest

from baton_operator.kube.client import Api
from baton_operator.kube.connection import load
from baton_operator.kube.lease import DURATION_S, Lease
from baton_operator.names import OPERATOR
from tests.cluster.fault_proxy import RESET, SILENCE, Fault, FaultProxy
from tests.cluster.machine.client import Kubernetes
from tests.support.clock import Clock

WAIT_S = 120.0


class RunningClock(Clock):
    """A clock that advances in real time while `run` runs, but not while the test is stalled."""

    async def run(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            self.now += min(now - last, 0.1)
            last = now


@pytest.fixture(scope="module")
def proxy(
    control_plane: Kubernetes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane.kubeconfig, tmp_path_factory.mktemp("proxy")) as one:
        yield one


@pytest.fixture
async def api(proxy: FaultProxy) -> AsyncIterator[Api]:
    config = await load({"KUBECONFIG": str(proxy.kubeconfig)})
    one = Api(config, lambda verb, code: None, 5.0)
    yield one
    await one.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease(api: Api, namespace: str, identity: str, clock: Clock) -> Lease:
    return Lease(api, (namespace, OPERATOR), identity, clock, lambda: datetime.now(UTC))


def holder(control_plane: Kubernetes, namespace: str) -> str:
    body = json.loads(
        control_plane.kubectl("get", "lease", OPERATOR, "-n", namespace, "-o", "json")
    )
    name: str = body["spec"]["holderIdentity"]
    return name


def count_calls(proxy: FaultProxy, namespace: str, method: str) -> int:
    """How often the namespace's lease was read (GET) or written (PUT)."""
    calls = [call for call in list(proxy.calls) if call.method == method]
    return sum(f"/{namespace}/" in call.path for call in calls)


async def test_the_first_replica_takes_the_lease_and_the_second_waits(
    api: Api, proxy: FaultProxy, control_plane: Kubernetes, namespace: str, clock: Clock
) -> None:
    async with asyncio.timeout(WAIT_S):
        await lease(api, namespace, "first", clock).acquire_lease()
        assert holder(control_plane, namespace) == "first"
        before = count_calls(proxy, namespace, "GET")
        waiting = asyncio.create_task(lease(api, namespace, "second", clock).acquire_lease())
        # A third read shows that the second one was answered and that the lease was not taken.
        while count_calls(proxy, namespace, "GET") < before + 3:
            assert not waiting.done()
            await asyncio.sleep(0.05)
    waiting.cancel()
    assert holder(control_plane, namespace) == "first"


async def test_the_second_replica_takes_a_lease_that_is_not_renewed_for_its_duration(
    api: Api, control_plane: Kubernetes, namespace: str, clock: Clock
) -> None:
    first, second = (lease(api, namespace, name, clock) for name in ("first", "second"))
    await first.acquire_lease()
    waiting = asyncio.create_task(second.acquire_lease())
    async with asyncio.timeout(WAIT_S):
        # The second replica counts the duration from its first read.
        while not waiting.done():
            await asyncio.sleep(1)
            clock.now += DURATION_S + 1
        await waiting
        assert holder(control_plane, namespace) == "second"
        await first.renew_until_lost()  # it returns, because another replica leads


async def test_a_released_lease_is_free_at_once(
    api: Api, control_plane: Kubernetes, namespace: str, clock: Clock
) -> None:
    first, second = (lease(api, namespace, name, clock) for name in ("first", "second"))
    await first.acquire_lease()
    await first.release_lease()
    async with asyncio.timeout(WAIT_S):
        await second.acquire_lease()
    assert holder(control_plane, namespace) == "second"


@pytest.mark.parametrize("fault", [RESET, SILENCE], ids=["reset", "silence"])
async def test_a_leader_that_cannot_renew_stops_before_its_lease_is_free(
    api: Api, proxy: FaultProxy, namespace: str, fault: Fault
) -> None:
    clock = RunningClock()
    first = lease(api, namespace, "first", clock)
    await first.acquire_lease()
    start = clock()
    proxy.watch(lambda call: fault)
    running = asyncio.create_task(clock.run())
    keeping = asyncio.create_task(first.renew_until_lost())
    await asyncio.sleep(0.5)
    # After this jump, an overlong wait for an answer would end after the lease.
    clock.now += 2.9
    try:
        async with asyncio.timeout(WAIT_S):
            await keeping
    finally:
        proxy.watch(None)
        running.cancel()
    assert clock() - start < DURATION_S


async def test_a_leader_keeps_a_lease_that_it_renews(
    api: Api, proxy: FaultProxy, namespace: str, clock: Clock
) -> None:
    first = lease(api, namespace, "first", clock)
    await first.acquire_lease()
    keeping = asyncio.create_task(first.renew_until_lost())
    async with asyncio.timeout(WAIT_S):
        # Four times 4 s are longer than the lease.
        for _ in range(4):
            before = count_calls(proxy, namespace, "PUT")
            clock.now += 4
            while count_calls(proxy, namespace, "PUT") == before and not keeping.done():
                await asyncio.sleep(0.05)
    assert not keeping.done()
    keeping.cancel()
