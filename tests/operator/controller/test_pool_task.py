"""The tasks of several pools: when each one reconciles, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic

import pytest

from baton_operator.controller.pool_task import PoolTasks
from baton_operator.controller.reconcile import Incomplete, PoolGone, Reconciler
from baton_operator.kube.client import (
    ApiUnavailable,
    Conflict,
    Refused,
    ServerFailed,
    TooManyRequests,
)
from baton_operator.metrics import Metrics, Result
from baton_operator.state.cache import PoolKey
from tests.support.waiting import until

DEADLINE_S = 60.0
A, B, C = (PoolKey("serving", name) for name in "abc")


class Work(Reconciler):
    """Stands in for the work on one pool. Its reconciles fail with `errors` first, and end only
    when `go` is set."""

    def __init__(self, errors: list[Exception] | None = None, again_s: float | None = None) -> None:
        self.errors = errors or []
        self.again_s = again_s
        self.go = asyncio.Event()
        self.go.set()
        self.started_at: list[float] = []
        self.running = 0
        self.most = 0
        self.polling = False
        self.ended = False

    async def reconcile(self) -> float | None:
        self.started_at.append(monotonic())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            if self.errors:
                raise self.errors.pop(0)
            return self.again_s
        finally:
            self.running -= 1

    async def poll_index(self) -> None:
        self.polling = True
        try:
            await asyncio.Event().wait()
        finally:
            self.polling = False

    def forget_pool(self) -> None:
        self.ended = True


class Counted(Metrics):
    """Records the results of all reconciles."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Result] = []

    def count_reconcile(self, result: Result) -> None:
        self.results.append(result)


class Pools:
    """`existing` has the pools that the operator sees; each new task of a pool takes its next
    Work."""

    def __init__(self, slots: int = 4) -> None:
        self.existing: dict[PoolKey, list[Work]] = {}
        metrics = Counted()
        self.results = metrics.results
        self.tasks = PoolTasks(self.work_of, slots, metrics, monotonic)

    def work_of(self, key: PoolKey) -> Work | None:
        return self.existing[key].pop(0) if self.existing.get(key) else None

    def add(self, key: PoolKey, *works: Work) -> None:
        self.existing[key] = list(works)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.tasks.run(list(self.existing)))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def reconciled(work: Work, count: int) -> Callable[[], bool]:
    return lambda: len(work.started_at) == count and not work.running


async def test_every_existing_pool_is_reconciled_at_the_start() -> None:
    pools, works = Pools(), [Work(), Work()]
    for key, work in zip((A, B), works, strict=True):
        pools.add(key, work)
    async with pools.run():
        for work in works:
            await until(reconciled(work, 1))
            assert work.polling


async def test_a_pool_created_later_gets_a_task_and_an_unknown_one_does_not() -> None:
    pools, work = Pools(), Work()
    async with pools.run():
        pools.tasks.wake_pool(A)
        pools.add(A, work)
        pools.tasks.wake_pool(A)
        await until(reconciled(work, 1))


async def test_no_pool_is_reconciled_before_the_tasks_run() -> None:
    pools, work = Pools(), Work()
    pools.add(A, work)
    pools.tasks.wake_pool(A, 0.0)
    await asyncio.sleep(0.05)
    assert not work.started_at
    async with pools.run():
        await until(reconciled(work, 1))


async def test_a_burst_of_events_causes_one_reconcile_and_events_during_it_one_more() -> None:
    pools, work = Pools(), Work()
    work.go.clear()
    pools.add(A, work)
    async with pools.run():
        for _ in range(10):
            pools.tasks.wake_pool(A)
        await until(lambda: work.running == 1)
        for _ in range(10):
            pools.tasks.wake_pool(A, 0.0)
        await asyncio.sleep(0.05)
        assert len(work.started_at) == 1
        work.go.set()
        await until(reconciled(work, 2))
        await asyncio.sleep(0.1)
        assert (len(work.started_at), work.most) == (2, 1)


async def test_a_slow_pool_does_not_delay_others() -> None:
    pools, slow, quick = Pools(slots=2), Work(), Work()
    slow.go.clear()
    pools.add(A, slow)
    pools.add(B, quick)
    async with pools.run():
        await until(lambda: slow.running == 1)
        for count in (1, 2, 3):
            await until(reconciled(quick, count))
            pools.tasks.wake_pool(B, 0.0)
        assert pools.tasks.longest_s() > 0.0


async def test_the_slots_limit_the_number_of_concurrent_reconciles() -> None:
    pools, works = Pools(slots=2), [Work() for _ in range(3)]
    for key, work in zip((A, B, C), works, strict=True):
        work.go.clear()
        pools.add(key, work)
    async with pools.run():
        await until(lambda: sum(work.running for work in works) == 2)
        await until(lambda: pools.tasks.depth() == 1)
        assert sum(work.running for work in works) == 2
        for work in works:
            work.go.set()
        for work in works:
            await until(reconciled(work, 1))
        assert pools.tasks.depth() == 0


async def test_the_pool_that_has_waited_longest_gets_the_next_slot() -> None:
    pools, slow, others = Pools(slots=1), Work(), {key: Work() for key in (B, C)}
    slow.go.clear()
    pools.add(A, slow)
    async with pools.run():
        await until(lambda: slow.running == 1)
        for key, work in reversed(others.items()):
            pools.add(key, work)
            pools.tasks.wake_pool(key, 0.0)
            await until(lambda: pools.tasks.depth() == len(pools.existing) - 1)
        slow.go.set()
        for work in others.values():
            await until(reconciled(work, 1))
        assert others[C].started_at < others[B].started_at


async def test_a_pool_is_reconciled_again_after_the_delay_that_its_reconcile_returns() -> None:
    pools, work = Pools(), Work(again_s=0.01)
    pools.add(A, work)
    async with pools.run():
        await until(lambda: len(work.started_at) > 3)


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (Incomplete("one"), "refused"),
        (Refused(422, "no"), "refused"),
        (Conflict("changed"), "conflict"),
        (ApiUnavailable("away"), "unavailable"),
        (ServerFailed("apply", 500, "hook"), "unavailable"),
        (TooManyRequests("busy", 0.1), "throttled"),
        (KeyError("a bug"), "error"),
    ],
)
async def test_a_failed_reconcile_is_counted_and_retried(error: Exception, result: str) -> None:
    pools, work = Pools(), Work([error])
    pools.add(A, work)
    async with pools.run():
        await until(lambda: pools.results == [result, "done"])
    first, second = work.started_at
    assert second - first >= 0.1


async def test_a_failing_pool_does_not_delay_others() -> None:
    pools, broken, healthy = Pools(slots=1), Work([Conflict("again")] * 99), Work()
    pools.add(A, broken)
    pools.add(B, healthy)
    async with pools.run():
        for count in (1, 2, 3):
            await until(reconciled(healthy, count))
            pools.tasks.wake_pool(B, 0.0)


async def test_the_task_of_a_deleted_pool_ends_with_its_index_poller() -> None:
    pools, work = Pools(), Work([PoolGone()])
    pools.add(A, work)
    async with pools.run():
        await until(lambda: work.ended and not work.polling)
        assert pools.results == ["done"]
        pools.tasks.wake_pool(A, 0.0)
        await asyncio.sleep(0.05)
        assert len(work.started_at) == 1


async def test_a_new_pool_with_the_name_of_a_deleted_one_gets_its_own_task() -> None:
    pools, first, second = Pools(), Work([PoolGone()]), Work()
    pools.add(A, first, second)
    async with pools.run():
        await until(reconciled(second, 1))
        assert first.ended
        assert not second.ended


async def test_all_tasks_end_with_the_operator() -> None:
    pools, work = Pools(), Work()
    work.go.clear()
    pools.add(A, work)
    async with pools.run():
        await until(lambda: work.running == 1)
    assert (work.running, work.polling, work.ended) == (0, False, True)
    pools.tasks.wake_pool(A)
    assert pools.tasks.depth() == 0


@pytest.mark.parametrize("count", [0, 2])
async def test_all_tasks_end_when_every_newer_task_is_cancelled(count: int) -> None:
    """kopf does this when it fails: without kopf, the tasks would see no more events."""
    pools, works = Pools(), [Work() for _ in range(count)]
    for key, work in zip((A, B), works, strict=False):
        pools.add(key, work, Work())
    running = asyncio.create_task(pools.tasks.run(list(pools.existing)))
    known = asyncio.all_tasks()
    for work in works:
        await until(reconciled(work, 1))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - known:
        task.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([running])
    assert all(work.ended for work in works)
    assert asyncio.all_tasks() <= known
