"""How the server adds jobs to the load that the engine has not received, and when it reports."""

from __future__ import annotations

import asyncio
from typing import Any

from baton_node.server.load_throttle import SEND_EVERY_S, LoadThrottle
from baton_node.server.uncounted_jobs import UncountedJobs
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.store import NodeLoad
from tests.support.clock import Clock
from tests.support.nodes.processes import make_request
from tests.support.waiting import until

LOAD = NodeLoad(waiting=1, queued_tokens=10)


def run(prompt: int = 5, **job: Any) -> RunJob:
    return RunJob(make_request("r", b"p" * prompt, n=2), **job)


def added(*jobs: RunJob | PrefillJob, taken: int = 0) -> tuple[int, int]:
    """Return how many sequences and tokens the jobs add to the load."""
    uncounted = UncountedJobs()
    for job in jobs:
        uncounted.add_job(job)
    uncounted.drop_counted(taken)
    load = uncounted.add_to_load(LOAD)
    return load.waiting - LOAD.waiting, load.queued_tokens - LOAD.queued_tokens


def test_a_job_adds_its_open_choices_and_its_uncached_tokens() -> None:
    assert added(run(uncached=3)) == (2, 3)
    assert added(run(uncached=3, finished=(1,))) == (1, 3)
    assert added(run(uncached=3), run(uncached=0)) == (4, 3)


def test_without_an_uncached_count_all_tokens_of_a_job_count() -> None:
    assert added(run(prompt=5)) == (2, 5)


def test_tokens_that_the_prefill_node_computes_count_only_there() -> None:
    job = PrefillJob(make_request("r", b"prompt"), NodeId("d"), Epoch("e"), uncached=4)
    assert added(run(await_first=True, uncached=0)) == (2, 0)
    assert added(run(await_first=True)) == (2, 0)
    assert added(job) == (1, 4)


def test_jobs_that_the_engine_has_received_are_not_added() -> None:
    jobs = [run(uncached=1), run(uncached=2), run(uncached=4)]
    assert [added(*jobs, taken=taken)[1] for taken in range(4)] == [7, 6, 4, 0]
    uncounted = UncountedJobs()
    for job in jobs:
        uncounted.add_job(job)
    uncounted.drop_counted(3)
    assert uncounted.add_to_load(LOAD) is LOAD
    uncounted.add_job(run(uncached=8))
    uncounted.drop_counted(3)  # this load is older than the last job
    assert uncounted.add_to_load(LOAD).queued_tokens == 18


async def test_many_changes_are_reported_once_and_within_the_interval() -> None:
    reported_at: list[float] = []
    clock = Clock()

    def report() -> None:
        soon.note_sent()
        reported_at.append(clock.now)

    soon = LoadThrottle(report, clock)
    for _ in range(5):
        soon.request_load()
    await until(lambda: reported_at == [100.0])
    for _ in range(5):
        soon.request_load()
    clock.advance(SEND_EVERY_S)
    report()  # for another reason; it covers the changes, too
    await asyncio.sleep(5 * SEND_EVERY_S)
    assert len(reported_at) == 2
    soon.request_load()
    soon.cancel_timer()
    await asyncio.sleep(5 * SEND_EVERY_S)
    assert len(reported_at) == 2
