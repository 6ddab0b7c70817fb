"""The login of an external store: from a Secret in a real API server to a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from time import monotonic

import msgspec
import pytest

from baton_kvstore.connection.endpoint import with_login
from baton_operator.api.pool import Pool
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.kube.client import Api
from baton_operator.kube.connection import load
from baton_operator.state.cache import PoolKey
from baton_operator.state.index_reader import IndexReader
from tests.cluster.machine.client import Kubernetes
from tests.operator.index_servers import LOCAL, PASSWORD, external, redis_server, register
from tests.support.planner import observations as o
from tests.support.planner.observations import observed, status_of

WAIT_S = 120.0


class Pollers:
    """An IndexPoller for each followed pool, each in its own task. `calls` holds the verbs and
    codes of API answers, `answered` the pools with a new answer."""

    def __init__(self, api: Api, calls: list[tuple[str, str]]) -> None:
        self.api = api
        self.calls = calls
        self.answered: asyncio.Queue[PoolKey] = asyncio.Queue()
        self.tasks: dict[PoolKey, asyncio.Task[None]] = {}

    def follow(self, key: PoolKey, pool: Pool) -> IndexPoller:
        answered = partial(self.answered.put_nowait, key)
        reader = IndexReader(monotonic, networks=LOCAL)
        poller = IndexPoller(key, self.api, reader, answered, monotonic)
        poller.schedule_read(pool, observed(pool), status_of(observed(pool), pool))
        self.tasks[key] = asyncio.create_task(poller.run())
        return poller

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.wait(self.tasks.values())
        await self.api.close()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as port:
        yield f"redis://127.0.0.1:{port}"


@pytest.fixture
async def pollers(control_plane: Kubernetes) -> AsyncIterator[Pollers]:
    config = await load({"KUBECONFIG": str(control_plane.kubeconfig)})
    calls: list[tuple[str, str]] = []
    pollers = Pollers(Api(config, lambda verb, code: calls.append((verb, code)), 60.0), calls)
    yield pollers
    await pollers.close()


def pool_with_login(url: str, namespace: str) -> Pool:
    pool = external(url, secretRef={"name": "far-login"})
    return msgspec.structs.replace(pool, namespace=namespace)


def give_login(control_plane: Kubernetes, namespace: str) -> None:
    secret = f"--from-literal=password={PASSWORD}"
    control_plane.kubectl("create", "secret", "generic", "far-login", secret, "-n", namespace)


async def test_the_index_is_read_with_the_secret_s_login_and_an_answer_is_taken_once(
    pollers: Pollers, control_plane: Kubernetes, namespace: str, url: str
) -> None:
    pool, key = pool_with_login(url, namespace), PoolKey(namespace, "demo")
    await register(with_login(url, "", PASSWORD), pool)
    give_login(control_plane, namespace)
    poller = pollers.follow(key, pool)
    async with asyncio.timeout(WAIT_S):
        assert await pollers.answered.get() == key
    answer = poller.take_answer()
    assert answer is not None
    assert answer.nodes == (o.report(pool, "decode"),)
    assert poller.take_answer() is None


async def test_a_secret_that_is_created_later_is_read(
    pollers: Pollers, control_plane: Kubernetes, namespace: str, url: str
) -> None:
    pool, key = pool_with_login(url, namespace), PoolKey(namespace, "demo")
    await register(with_login(url, "", PASSWORD), pool)
    poller = pollers.follow(key, pool)
    async with asyncio.timeout(WAIT_S):
        while ("get", "404") not in pollers.calls:
            await asyncio.sleep(0.05)
    assert poller.take_answer() is None
    give_login(control_plane, namespace)
    async with asyncio.timeout(WAIT_S):
        assert await pollers.answered.get() == key


async def test_the_index_of_a_deleted_pool_is_not_read(
    pollers: Pollers, control_plane: Kubernetes, namespace: str, url: str
) -> None:
    pool = pool_with_login(url, namespace)
    deleted, other = PoolKey(namespace, "gone"), PoolKey(namespace, "demo")
    await register(with_login(url, "", PASSWORD), pool)
    give_login(control_plane, namespace)
    poller = pollers.follow(deleted, pool)
    pollers.tasks[deleted].cancel()  # as the pool's task does at its end
    # The deleted pool's poller would answer before this one.
    pollers.follow(other, pool)
    async with asyncio.timeout(WAIT_S):
        assert await pollers.answered.get() == other
    assert pollers.answered.empty()
    assert poller.take_answer() is None
