"""An operator after an idle year or a busy week, on a fake clock: its numbers stay correct, and it
keeps nothing about pools that were deleted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from random import Random

import msgspec
import pytest

from baton_operator.autoscaling.planner.capability import Learnt, NodeSample
from baton_operator.autoscaling.planner.load_model import MOST, servers_for
from baton_operator.controller.due_time import LONGEST_RETRY_S, DueTime
from baton_operator.controller.pool_task import PoolTasks
from baton_operator.controller.reconcile import PoolGone, Reconciler
from baton_operator.metrics import Metrics
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.index_reader import IndexReader
from baton_operator.state.index_timing import LOOK_S
from baton_operator.state.lookups import Lookups
from tests.operator.autoscaling.planner.test_capability import PRIOR, sample
from tests.operator.autoscaling.test_autoscaler import HEAVY, Operator
from tests.operator.state.bodies import pod, pool
from tests.support.clock import Clock
from tests.support.growth import WEEK_S, YEAR_S, grown, nan_paths, sizes
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner.observations import observed, status_of
from tests.support.waiting import until

HOUR_LOOKS = int(3600 / LOOK_S)


# --- planner --------------------------------------------------------------------------------------


def look_for(operator: Operator, looks: int) -> None:
    """Run looks with changing load; the state must not grow in the second half of them."""
    rng, snapshots = Random(5), []
    rate = 0.0
    for number in range(looks):
        if number % 60 == 0:
            rate = rng.choice((0.0, 100.0, HEAVY / 4, HEAVY))
        counts = operator.looks(1, rate)
        assert all(1 <= count <= 4 for count in counts)
        if number + 1 in (looks // 2, looks):
            snapshots.append(sizes(operator.autoscaler))
    assert grown(*snapshots) == {}
    assert nan_paths(operator.autoscaler) == []


def test_the_planner_s_memory_stays_within_its_windows_for_40_minutes() -> None:
    look_for(Operator(), HOUR_LOOKS * 2 // 3)


@pytest.mark.long
def test_the_planner_s_memory_stays_within_its_windows_for_six_hours() -> None:
    look_for(Operator(), 6 * HOUR_LOOKS)


def test_a_planner_plans_as_before_after_a_year_without_looks() -> None:
    operator = Operator()
    operator.looks(16, HEAVY)
    before = operator.looks(40)
    operator.seconds += YEAR_S
    assert operator.silence(1) == before  # stale demand changes no count
    assert operator.looks(200) == (1, 1)
    assert operator.looks(16, HEAVY) == (4, 1)
    assert nan_paths(operator.autoscaler) == []


def test_the_true_values_are_learnt_after_a_year_of_samples() -> None:
    """After this many samples the prior has no weight left: each sample takes 0.5 % of it."""
    random = Random(3)
    learnt = Learnt.from_prior(PRIOR)
    learnt = replace(learnt, step=replace(learnt.step, prior_weight=0.0))
    learnt = learnt.with_samples(sample(random) for _ in range(2_000))
    found = learnt.capability
    assert found.prefill_tokens == pytest.approx(20_000.0, rel=0.03)
    assert found.step_base_s == pytest.approx(0.012, rel=0.2)
    same = NodeSample(batch=1.0, kv_tokens=0.0, step_s=0.02, prefill_tokens_per_s=1e-9, start_s=1e9)
    learnt = learnt.with_samples([same] * 2_000)
    found = learnt.capability
    figures = (found.prefill_tokens, found.step_base_s, found.step_per_seq_s, found.start_s)
    assert all(math.isfinite(figure) and figure >= 0.0 for figure in figures)
    assert nan_paths(learnt) == []


@pytest.mark.parametrize("load", [1e-300, 0.5, 999.9999999999999, 1000.0, 1e6, 1e300])
def test_every_load_needs_a_limited_number_of_servers(load: float) -> None:
    for wait_s in (0.0, 1e-12, 1e12):
        assert 1 <= servers_for(load, 1.0, wait_s, 0.95) <= MOST


# --- pools that are created and deleted -----------------------------------------------------------


class DeletedPool(Reconciler):
    """A pool that is deleted before its second reconcile."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake_pool = wake
        self.left = 1

    async def reconcile(self) -> float | None:
        if not self.left:
            raise PoolGone
        self.left -= 1
        self.wake_pool()
        return None

    async def poll_index(self) -> None:
        await asyncio.Event().wait()

    def forget_pool(self) -> None:
        pass


async def test_no_task_of_a_deleted_pool_is_kept() -> None:
    existing: set[PoolKey] = set()

    def work_of(key: PoolKey) -> DeletedPool | None:
        if key not in existing:
            return None
        existing.discard(key)
        return DeletedPool(partial(tasks.wake_pool, key, 0.0))

    tasks = PoolTasks(work_of, 4, Metrics(), asyncio.get_running_loop().time)
    running = asyncio.create_task(tasks.run(()))
    looks = []
    for stretch in range(2):
        for number in range(500):
            key = PoolKey("serving", f"pool-{stretch}-{number}")
            existing.add(key)
            tasks.wake_pool(key, 0.0)
            if number % 50 == 0:
                await asyncio.sleep(0)
        looks.append(sizes(tasks))
        await until(lambda: not sizes(tasks)["PoolTasks._tasks"])
        looks.append(sizes(tasks))
    running.cancel()
    await asyncio.wait([running])
    assert looks[0]["PoolTasks._tasks"]
    assert grown(looks[1], looks[3]) == {}


def test_a_pool_that_fails_for_a_week_is_retried_every_minute() -> None:
    clock = Clock(0.0)
    due_time, tries, snapshots = DueTime(clock, lambda: 0.0), 0, []
    while clock.now < WEEK_S:
        due_time.begin()
        delay_s = due_time.fail()
        due_time.request(2 * LONGEST_RETRY_S)  # a mark in the meantime
        clock.advance(delay_s)
        assert due_time.due_s == 0.0
        tries += 1
        if tries in (1_000, 10_000):
            snapshots.append(sizes(due_time))
    assert tries > WEEK_S / LONGEST_RETRY_S
    assert grown(*snapshots) == {}


async def test_no_lookup_of_a_host_name_is_kept() -> None:
    """Pools in 60 namespaces look up the host name of their index."""
    store = {"external": {"indexUrl": "redis://127.0.0.1:1", "dataUrls": ["redis://d"]}}
    lookups, looks = Lookups(lambda host, port: (ip_address("127.0.0.1"),)), []
    for number in range(60):
        namespace = f"team-{number}"
        one = msgspec.structs.replace(sample_pool("sim", kvStore=store), namespace=namespace)
        reader = IndexReader(Clock(), answer_s=0.5, lookups=lookups)
        seen = observed(one)
        await reader.read(one, seen, status_of(seen, one))
        if number in (29, 59):
            looks.append(sizes(lookups))
    lookups.close()
    assert grown(*looks) == {}


def test_the_cache_keeps_nothing_about_deleted_pools() -> None:
    clock = Clock()
    cache = Cache(lambda key: None, clock)
    looks = []
    for number in range(1_000):
        body = pool(10 * number, uid=f"pool-{number}")
        cache.see_pool(body)
        for turn in range(4):
            event = pod(10 * number + turn, ready=turn % 2 == 0, uid=f"pod-{number}")
            child = cache.see_child(event, ours=turn == 1)
            clock.now += 100.0
        cache.lose_child(PoolKey("ns", "pool"), child.key, child.uid)
        cache.lose_pool(PoolKey("ns", "pool"), f"pool-{number}")
        if number in (499, 999):
            looks.append(sizes(cache))
    assert grown(*looks) == {}
    assert not cache.pools()
