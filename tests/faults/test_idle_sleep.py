"""Pools that sleep while they are idle, with real nodes, two routers and a store: whatever a
request meets, its answer is an undisturbed one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import cycle

import pytest

from tests.support.clients.http import Json, exchange
from tests.support.pools.processes import SIM, Cluster

pytestmark = pytest.mark.integration

AFTER_S = 0.4
SEED, ROUNDS = 5, 16


class SleepyCluster(Cluster):
    states = frozenset({"ready", "asleep"})

    def asleep(self) -> set[str]:
        return {node["id"] for node in self.pool()["nodes"] if node["state"] == "asleep"}

    def await_sleep(self) -> None:
        self.wait(lambda: self.asleep() == set(self.nodes), "go to sleep")


@pytest.fixture(scope="module")
def sleepy() -> Iterator[SleepyCluster]:
    flags = [f"--sleep-after={AFTER_S}", "--sleep-level=2", "--handoff=always"]
    with SleepyCluster(1, 2, flags=SIM, router_flags=flags, routers=2) as cluster:
        yield cluster


def choices_of(url: str, number: int) -> list[Json]:
    body = {"prompt": f"{number}: {'sleep and wake ' * 20}", "max_tokens": 24, "seed": number}
    got = exchange(url, "/v1/completions", body | {"temperature": 1.0})
    assert got.status == 200, got.body
    choices: list[Json] = got.body["choices"]
    return choices


def test_requests_that_come_as_the_pool_goes_to_sleep_are_answered_by_either_router(
    sleepy: SleepyCluster, undisturbed: Cluster
) -> None:
    rng, asleep = random.Random(SEED), 0
    for number, router in zip(range(ROUNDS), cycle(sleepy.routers)):
        asleep += bool(sleepy.asleep())
        assert choices_of(router.url, number) == choices_of(undisturbed.url, number)
        time.sleep(rng.uniform(0.9, 1.6) * AFTER_S)
    assert asleep, "no request met a node that slept"


def test_a_pool_of_which_a_sleeping_node_is_killed_answers(
    sleepy: SleepyCluster, undisturbed: Cluster
) -> None:
    sleepy.await_sleep()
    sleepy.nodes["decode-1"].kill()
    assert choices_of(sleepy.url, ROUNDS) == choices_of(undisturbed.url, ROUNDS)
    sleepy.repair()


def test_a_router_that_starts_leaves_a_sleeping_pool_asleep_until_it_has_a_request(
    sleepy: SleepyCluster, undisturbed: Cluster
) -> None:
    sleepy.await_sleep()
    sleepy.router.kill()
    sleepy.router.start()
    sleepy.await_ready()
    assert sleepy.asleep() == set(sleepy.nodes)
    assert choices_of(sleepy.url, ROUNDS + 1) == choices_of(undisturbed.url, ROUNDS + 1)
