"""Nodes of a pool go to sleep, wake up and take other weights under load: streams move, each answer
is an undisturbed one, and memory stays level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import TORCH_MODEL
from tests.support.clients.http import Json, exchange
from tests.support.engines.tiny_models import with_other_weights
from tests.support.faults.cases import Sizes
from tests.support.faults.chaos_run import Clients, known_answers
from tests.support.faults.drains import RunningRequests, node_entry
from tests.support.pools.leaks import settle
from tests.support.pools.processes import Cluster, Node

LONG = Sizes(target=64, others=48, answer=500)
DECODES = ("decode-0", "decode-1")
SEED, CLIENTS, REQUESTS = 11, 4, 12
CYCLES = 50
MIB = 1 << 20
# A tiny model has about 0.1 MiB. Kernels and caches of shapes grow during the first cycles.
WARM_CYCLES, SPARE = 16, 24 * MIB


def post(node: Node, path: str, body: Json | None = None) -> Json:
    answer = exchange(node.url, path, body if body is not None else b"")
    assert answer.status == 200, answer.body
    return answer.body


def wait_for(pool: Cluster, name: str, state: str) -> None:
    """Wait for a node's state in /pool, from which a node that gets another engine is gone for a
    while."""

    def arrived() -> bool:
        return (name, state) in [(node["id"], node["state"]) for node in pool.pool()["nodes"]]

    pool.wait(arrived, f"{state} {name}")


@pytest.fixture(autouse=True)
def awake(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that shares a pool, its nodes are awake and hold no resources."""
    yield
    for name in ("pool", "torch_pool"):
        if name in request.fixturenames:
            pool: Cluster = request.getfixturevalue(name)
            for node in pool.nodes.values():
                post(node, "/wake_up")
            pool.repair()
            settle(pool)


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
def test_the_streams_of_a_node_that_goes_to_sleep_move(
    pool: Cluster, undisturbed: Cluster, level: int
) -> None:
    pool.witness.forget()
    sleeper, other = (pool.nodes[name] for name in DECODES)
    requests = RunningRequests(pool, undisturbed, f"sleep {level}", LONG)
    assert post(sleeper, f"/sleep?level={level}")["is_sleeping"]
    wait_for(pool, sleeper.name, "asleep")
    requests.check()
    paths = [requests.decode_nodes(case) for case in requests.moved()]
    assert [sleeper.name, other.name] in paths
    assert not any(sleeper.name in path[1:] for path in paths)
    assert requests.retries.of("drained") > 0

    post(sleeper, "/wake_up")
    wait_for(pool, sleeper.name, "ready")
    post(other, "/sleep")
    pool.witness.forget()
    requests = RunningRequests(pool, undisturbed, f"awake {level}", LONG)
    requests.check()
    assert {pool.witness.where(case.prompt, "decode") for case in requests.cases} == {sleeper.name}


def resident(node: Node) -> int:
    return sum(each.memory_info().rss for each in psutil.Process(node.pid).children())


@pytest.mark.long
def test_after_fifty_cycles_under_load_no_answer_has_changed_and_memory_is_level(
    torch_pool: Cluster, torch_undisturbed: Cluster
) -> None:
    pool = torch_pool
    known = known_answers(torch_undisturbed.url, SEED, REQUESTS)
    course: dict[str, list[int]] = {name: [] for name in DECODES}
    with Clients(pool, [known], SEED, CLIENTS) as clients:
        for turn, name in enumerate(islice(cycle(DECODES), 2 * CYCLES)):
            node = pool.nodes[name]
            post(node, f"/sleep?level={1 + turn // 2 % 2}")
            wait_for(pool, name, "asleep")
            course[name].append(resident(node))
            post(node, "/wake_up")
            wait_for(pool, name, "ready")
            clients.await_answers(count=CLIENTS)
    for asleep in course.values():
        for level in (asleep[::2], asleep[1::2]):
            steady = level[WARM_CYCLES // 2 :]
            assert max(steady[-4:]) < max(steady[:4]) + SPARE, course


@pytest.mark.long
def test_weights_are_updated_node_by_node_and_each_answer_is_of_one_version(
    tiny_model: Callable[[str], Path], torch_flags: list[str], torch_undisturbed: Cluster
) -> None:
    other = with_other_weights(tiny_model(TORCH_MODEL))
    flags = [str(other) if word == str(tiny_model(TORCH_MODEL)) else word for word in torch_flags]
    with Cluster(0, 1, flags=flags, store=False) as updated:
        kinds = [known_answers(each.url, SEED, REQUESTS) for each in (torch_undisturbed, updated)]
    assert kinds[0] != kinds[1]
    # Streams of the last node of the old version end there, so they need time.
    pool = Cluster(1, 2, flags=[*torch_flags, "--drain-timeout=120"])
    with pool, Clients(pool, kinds, SEED, CLIENTS) as clients:
        clients.await_answers(kind=0, count=CLIENTS)
        before = {node["fingerprint"] for node in pool.pool()["nodes"]}
        for name in (*DECODES, "prefill-0"):
            model = node_entry(pool, name)["model"]
            post(pool.nodes[name], "/update_weights", {"path": str(other)})
            wait_for(pool, name, "ready")
            assert node_entry(pool, name)["model"] == model
            assert node_entry(pool, name)["fingerprint"] not in before
        clients.await_answers(kind=1, count=2 * CLIENTS)
