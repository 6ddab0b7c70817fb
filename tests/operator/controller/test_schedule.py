"""When a schedule is due, with a fake clock, and waiting for it."""

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


def schedule(clock: Clock, jitter: float = 0.0) -> Schedule:
    return Schedule(clock, lambda: jitter)


def test_what_is_marked_often_is_due_once(clock: Clock) -> None:
    one = schedule(clock)
    for _ in range(10):
        one.add(0.0)
    assert one.due_s == 0.0
    one.take()
    one.done()
    assert one.due_s == float("inf")


def test_it_is_due_at_the_earliest_moment_asked_for(clock: Clock) -> None:
    one = schedule(clock)
    for after_s in (5.0, 2.0, 9.0):
        one.add(after_s)
    assert one.due_s == 2.0
    clock.advance(1.5)
    assert one.due_s == 0.5


def test_a_mark_while_it_is_dealt_with_is_for_another_time(clock: Clock) -> None:
    one = schedule(clock)
    one.add(0.0)
    one.take()
    one.add(0.5)
    one.done()
    assert one.due_s == 0.5


def test_failures_double_the_pause_up_to_the_most(clock: Clock) -> None:
    one, pauses = schedule(clock), []
    for _ in range(10):
        one.take()
        pauses.append(one.failed())
    assert pauses[:4] == [FIRST_RETRY_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_RETRY_S


def test_a_success_makes_the_next_failure_the_first(clock: Clock) -> None:
    one = schedule(clock)
    for _ in range(5):
        one.failed()
    one.done()
    assert one.failed() == FIRST_RETRY_S


def test_jitter_takes_off_a_quarter_at_most(clock: Clock) -> None:
    assert schedule(clock, 1.0).failed() == FIRST_RETRY_S * 0.75


def test_what_the_server_asks_for_is_the_least_pause(clock: Clock) -> None:
    assert schedule(clock, 1.0).failed(least_s=7.0) == 7.0


def test_a_mark_during_a_reconcile_that_fails_comes_before_the_retry(clock: Clock) -> None:
    one = schedule(clock)
    one.take()
    one.add(0.1)
    one.failed()
    assert one.due_s == 0.1


def test_no_mark_comes_before_what_the_server_asks_for(clock: Clock) -> None:
    one = schedule(clock)
    one.take()
    one.add(0.1)
    one.failed(least_s=7.0)
    one.add(1.0)
    assert one.due_s == 7.0
    clock.advance(7.0)
    one.take()
    one.done()
    one.add(3.0)
    assert one.due_s == 3.0


@given(st.lists(st.tuples(st.sampled_from("+td!"), st.floats(0, 9))))
def test_no_mark_is_ever_lost(steps: list[tuple[str, float]]) -> None:
    """Whatever happens in between: what was marked since it was last taken is due some time."""
    clock = Clock(0.0)
    one, marked = schedule(clock), False
    for act, after_s in steps:
        if act == "+":
            one.add(after_s)
            marked = True
        elif act == "t":
            clock.advance(after_s)
            if one.due_s == 0.0:
                one.take()
                marked = False
        elif act == "d":
            one.done()
        else:
            one.failed()
            marked = True
    assert (one.due_s < float("inf")) == marked


async def test_a_wait_ends_when_it_becomes_due() -> None:
    one = Schedule(asyncio.get_running_loop().time)
    one.add(0.02)
    async with asyncio.timeout(60):
        await one.wait()
    assert one.due_s == 0.0


async def test_a_wait_ends_for_what_is_due_earlier() -> None:
    one = Schedule(asyncio.get_running_loop().time)
    one.add(3600.0)
    waiting = asyncio.create_task(one.wait())
    await asyncio.sleep(0)
    one.add(0.0)
    async with asyncio.timeout(60):
        await waiting
