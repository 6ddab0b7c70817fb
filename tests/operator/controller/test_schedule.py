"""Schedule: when it is due, with a fake clock, and waiting for it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.controller.pool_task import FIRST_RETRY_S, LONGEST_RETRY_S, Schedule
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


def new_schedule(clock: Clock, jitter: float = 0.0) -> Schedule:
    return Schedule(clock, lambda: jitter)


def test_many_marks_are_due_once(clock: Clock) -> None:
    schedule = new_schedule(clock)
    for _ in range(10):
        schedule.add(0.0)
    assert schedule.due_s == 0.0
    schedule.take()
    schedule.done()
    assert schedule.due_s == float("inf")


def test_the_earliest_mark_decides_when_it_is_due(clock: Clock) -> None:
    schedule = new_schedule(clock)
    for after_s in (5.0, 2.0, 9.0):
        schedule.add(after_s)
    assert schedule.due_s == 2.0
    clock.advance(1.5)
    assert schedule.due_s == 0.5


def test_a_mark_after_take_stays_due(clock: Clock) -> None:
    schedule = new_schedule(clock)
    schedule.add(0.0)
    schedule.take()
    schedule.add(0.5)
    schedule.done()
    assert schedule.due_s == 0.5


def test_failures_double_the_pause_up_to_its_limit(clock: Clock) -> None:
    schedule, pauses = new_schedule(clock), []
    for _ in range(10):
        schedule.take()
        pauses.append(schedule.failed())
    assert pauses[:4] == [FIRST_RETRY_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_RETRY_S


def test_a_success_resets_the_pause(clock: Clock) -> None:
    schedule = new_schedule(clock)
    for _ in range(5):
        schedule.failed()
    schedule.done()
    assert schedule.failed() == FIRST_RETRY_S


def test_jitter_shortens_the_pause_by_at_most_a_quarter(clock: Clock) -> None:
    assert new_schedule(clock, 1.0).failed() == FIRST_RETRY_S * 0.75


def test_the_pause_is_at_least_the_one_that_the_server_requests(clock: Clock) -> None:
    assert new_schedule(clock, 1.0).failed(least_s=7.0) == 7.0


def test_a_mark_during_a_failed_reconcile_is_due_before_the_retry(clock: Clock) -> None:
    schedule = new_schedule(clock)
    schedule.take()
    schedule.add(0.1)
    schedule.failed()
    assert schedule.due_s == 0.1


def test_no_mark_is_due_before_the_pause_that_the_server_requests(clock: Clock) -> None:
    schedule = new_schedule(clock)
    schedule.take()
    schedule.add(0.1)
    schedule.failed(least_s=7.0)
    schedule.add(1.0)
    assert schedule.due_s == 7.0
    clock.advance(7.0)
    schedule.take()
    schedule.done()
    schedule.add(3.0)
    assert schedule.due_s == 3.0


@given(st.lists(st.tuples(st.sampled_from("+td!"), st.floats(0, 9))))
def test_no_mark_is_ever_lost(steps: list[tuple[str, float]]) -> None:
    """After any sequence of calls, a mark since the last `take` is due at some time."""
    clock = Clock(0.0)
    schedule, marked = new_schedule(clock), False
    for act, after_s in steps:
        if act == "+":
            schedule.add(after_s)
            marked = True
        elif act == "t":
            clock.advance(after_s)
            if schedule.due_s == 0.0:
                schedule.take()
                marked = False
        elif act == "d":
            schedule.done()
        else:
            schedule.failed()
            marked = True
    assert (schedule.due_s < float("inf")) == marked


async def test_a_wait_ends_when_the_schedule_is_due() -> None:
    schedule = Schedule(asyncio.get_running_loop().time)
    schedule.add(0.02)
    async with asyncio.timeout(60):
        await schedule.wait()
    assert schedule.due_s == 0.0


async def test_a_wait_ends_at_an_earlier_mark() -> None:
    schedule = Schedule(asyncio.get_running_loop().time)
    schedule.add(3600.0)
    waiting = asyncio.create_task(schedule.wait())
    await asyncio.sleep(0)
    schedule.add(0.0)
    async with asyncio.timeout(60):
        await waiting
