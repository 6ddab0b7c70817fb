"""What routers are told of jobs that the engine has not heard of, and when."""

from __future__ import annotations

import asyncio
from typing import Any

from baton_node.server.unacknowledged_jobs import SAY_EVERY_S, Soon, UnacknowledgedJobs
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
    """Sequences and tokens beside those of the load."""
    untaken = UnacknowledgedJobs()
    for job in jobs:
        untaken.given(job)
    untaken.taken(taken)
    load = untaken.added_to(LOAD)
    return load.waiting - LOAD.waiting, load.queued_tokens - LOAD.queued_tokens


def test_a_job_counts_as_its_router_has_booked_it() -> None:
    assert added(run(uncached=3)) == (2, 3)
    assert added(run(uncached=3, finished=(1,))) == (1, 3)
    assert added(run(uncached=3), run(uncached=0)) == (4, 3)


def test_of_a_router_that_does_not_say_all_counts() -> None:
    assert added(run(prompt=5)) == (2, 5)


def test_what_a_partner_computes_is_the_partners() -> None:
    job = PrefillJob(make_request("r", b"prompt"), NodeId("d"), Epoch("e"), uncached=4)
    assert added(run(await_first=True, uncached=0)) == (2, 0)
    assert added(run(await_first=True)) == (2, 0)
    assert added(job) == (1, 4)


def test_what_the_engine_has_heard_of_is_in_its_own_load() -> None:
    jobs = [run(uncached=1), run(uncached=2), run(uncached=4)]
    assert [added(*jobs, taken=taken)[1] for taken in range(4)] == [7, 6, 4, 0]
    untaken = UnacknowledgedJobs()
    for job in jobs:
        untaken.given(job)
    untaken.taken(3)
    assert untaken.added_to(LOAD) is LOAD
    untaken.given(run(uncached=8))
    untaken.taken(3)  # an older load says nothing of it
    assert untaken.added_to(LOAD).queued_tokens == 18


async def test_many_changes_are_said_once_and_soon() -> None:
    said: list[float] = []
    clock = Clock()

    def say() -> None:
        soon.said()
        said.append(clock.now)

    soon = Soon(say, clock)
    for _ in range(5):
        soon.changed()
    await until(lambda: said == [100.0])
    for _ in range(5):
        soon.changed()
    clock.advance(SAY_EVERY_S)  # what is said meanwhile for another reason says it too
    say()
    await asyncio.sleep(5 * SAY_EVERY_S)
    assert len(said) == 2
    soon.changed()
    soon.close()
    await asyncio.sleep(5 * SAY_EVERY_S)
    assert len(said) == 2
