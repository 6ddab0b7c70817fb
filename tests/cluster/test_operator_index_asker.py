"""The login of somebody else's store: from a Secret in a real API server to a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import pytest

from baton_kvstore.connection.endpoint import with_login
from baton_operator.api.pool import Pool
from baton_operator.controller.index_asker import IndexAsker
from baton_operator.controller.queue import WorkQueue
from baton_operator.kube.client import Api
from baton_operator.kube.connection import load
from baton_operator.state.cache import PoolKey
from baton_operator.state.index_reader import IndexReader
from tests.cluster.machine.client import Kubernetes
from tests.operator.state.test_index_reader import LOCAL, PASSWORD, external, redis_server, register
from tests.support.planner import observations as o
from tests.support.planner.observations import observed, status_of

WAIT_S = 120.0


class Desk(NamedTuple):
    """`calls` are verbs and codes of the API's answers."""

    asker: IndexAsker
    answered: asyncio.Queue[PoolKey]
    calls: list[tuple[str, str]]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as port:
        yield f"redis://127.0.0.1:{port}"


@pytest.fixture
async def desk(control_plane: Kubernetes) -> AsyncIterator[Desk]:
    config = await load({"KUBECONFIG": str(control_plane.kubeconfig)})
    calls: list[tuple[str, str]] = []
    api = Api(config, lambda verb, code: calls.append((verb, code)), 60.0)
    answered: asyncio.Queue[PoolKey] = asyncio.Queue()
    asker = IndexAsker(
        api, IndexReader(monotonic, networks=LOCAL), WorkQueue(monotonic), answered.put_nowait
    )
    running = asyncio.create_task(asker.run())
    yield Desk(asker, answered, calls)
    running.cancel()
    await asyncio.wait([running])
    await api.close()


def pool_with_login(url: str, namespace: str) -> Pool:
    pool = external(url, secretRef={"name": "far-login"})
    return msgspec.structs.replace(pool, namespace=namespace)


def give_login(control_plane: Kubernetes, namespace: str) -> None:
    secret = f"--from-literal=password={PASSWORD}"
    control_plane.kubectl("create", "secret", "generic", "far-login", secret, "-n", namespace)


async def test_the_index_is_asked_with_the_secrets_login_and_answers_once(
    desk: Desk, control_plane: Kubernetes, namespace: str, url: str
) -> None:
    pool, key = pool_with_login(url, namespace), PoolKey(namespace, "demo")
    await register(with_login(url, "", PASSWORD), pool)
    give_login(control_plane, namespace)
    desk.asker.follow(key, pool, observed(pool), status_of(observed(pool), pool))
    async with asyncio.timeout(WAIT_S):
        assert await desk.answered.get() == key
    answer = desk.asker.take_answer(key)
    assert answer is not None
    assert answer.nodes == (o.report(pool, "decode"),)
    assert desk.asker.take_answer(key) is None


async def test_a_secret_that_comes_later_is_read_then(
    desk: Desk, control_plane: Kubernetes, namespace: str, url: str
) -> None:
    pool, key = pool_with_login(url, namespace), PoolKey(namespace, "demo")
    await register(with_login(url, "", PASSWORD), pool)
    desk.asker.follow(key, pool, observed(pool), status_of(observed(pool), pool))
    async with asyncio.timeout(WAIT_S):
        while ("get", "404") not in desk.calls:
            await asyncio.sleep(0.05)
    assert desk.asker.take_answer(key) is None
    give_login(control_plane, namespace)
    async with asyncio.timeout(WAIT_S):
        assert await desk.answered.get() == key


async def test_a_pool_that_is_gone_is_not_asked(
    desk: Desk, control_plane: Kubernetes, namespace: str, url: str
) -> None:
    pool = pool_with_login(url, namespace)
    gone, other = PoolKey(namespace, "gone"), PoolKey(namespace, "demo")
    await register(with_login(url, "", PASSWORD), pool)
    give_login(control_plane, namespace)
    desk.asker.follow(gone, pool, observed(pool), status_of(observed(pool), pool))
    desk.asker.forget(gone)
    # It would be asked before this one.
    desk.asker.follow(other, pool, observed(pool), status_of(observed(pool), pool))
    async with asyncio.timeout(WAIT_S):
        assert await desk.answered.get() == other
    assert desk.answered.empty()
    assert desk.asker.take_answer(gone) is None
