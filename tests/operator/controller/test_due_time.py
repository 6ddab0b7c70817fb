"""DueTime: when it is due, with a fake clock, and waiting for it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.controller.due_time import FIRST_RETRY_S, LONGEST_RETRY_S, DueTime
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


def new_due_time(clock: Clock, jitter: float = 0.0) -> DueTime:
    return DueTime(clock, lambda: jitter)


def test_many_marks_are_due_once(clock: Clock) -> None:
    due_time = new_due_time(clock)
    for _ in range(10):
        due_time.request(0.0)
    assert due_time.due_s == 0.0
    due_time.begin()
    due_time.succeed()
    assert due_time.due_s == float("inf")


def test_the_earliest_mark_decides_when_it_is_due(clock: Clock) -> None:
    due_time = new_due_time(clock)
    for after_s in (5.0, 2.0, 9.0):
        due_time.request(after_s)
    assert due_time.due_s == 2.0
    clock.advance(1.5)
    assert due_time.due_s == 0.5


def test_a_request_after_the_begin_stays_due(clock: Clock) -> None:
    due_time = new_due_time(clock)
    due_time.request(0.0)
    due_time.begin()
    due_time.request(0.5)
    due_time.succeed()
    assert due_time.due_s == 0.5


def test_failures_double_the_pause_up_to_its_limit(clock: Clock) -> None:
    due_time, pauses = new_due_time(clock), []
    for _ in range(10):
        due_time.begin()
        pauses.append(due_time.fail())
    assert pauses[:4] == [FIRST_RETRY_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_RETRY_S


def test_a_success_resets_the_pause(clock: Clock) -> None:
    due_time = new_due_time(clock)
    for _ in range(5):
        due_time.fail()
    due_time.succeed()
    assert due_time.fail() == FIRST_RETRY_S


def test_jitter_shortens_the_pause_by_at_most_a_quarter(clock: Clock) -> None:
    assert new_due_time(clock, 1.0).fail() == FIRST_RETRY_S * 0.75


def test_the_pause_is_at_least_the_one_that_the_server_requests(clock: Clock) -> None:
    assert new_due_time(clock, 1.0).fail(least_s=7.0) == 7.0


def test_a_mark_during_a_failed_reconcile_is_due_before_the_retry(clock: Clock) -> None:
    due_time = new_due_time(clock)
    due_time.begin()
    due_time.request(0.1)
    due_time.fail()
    assert due_time.due_s == 0.1


def test_no_mark_is_due_before_the_pause_that_the_server_requests(clock: Clock) -> None:
    due_time = new_due_time(clock)
    due_time.begin()
    due_time.request(0.1)
    due_time.fail(least_s=7.0)
    due_time.request(1.0)
    assert due_time.due_s == 7.0
    clock.advance(7.0)
    due_time.begin()
    due_time.succeed()
    due_time.request(3.0)
    assert due_time.due_s == 3.0


@given(st.lists(st.tuples(st.sampled_from("+td!"), st.floats(0, 9))))
def test_no_mark_is_ever_lost(steps: list[tuple[str, float]]) -> None:
    """After any sequence of calls, a mark since the last `begin` is due at some time."""
    clock = Clock(0.0)
    due_time, marked = new_due_time(clock), False
    for act, after_s in steps:
        if act == "+":
            due_time.request(after_s)
            marked = True
        elif act == "t":
            clock.advance(after_s)
            if due_time.due_s == 0.0:
                due_time.begin()
                marked = False
        elif act == "d":
            due_time.succeed()
        else:
            due_time.fail()
            marked = True
    assert (due_time.due_s < float("inf")) == marked


async def test_a_wait_ends_when_it_is_due() -> None:
    due_time = DueTime(asyncio.get_running_loop().time)
    due_time.request(0.02)
    async with asyncio.timeout(60):
        await due_time.wait_until_due()
    assert due_time.due_s == 0.0


async def test_a_wait_ends_at_an_earlier_mark() -> None:
    due_time = DueTime(asyncio.get_running_loop().time)
    due_time.request(3600.0)
    waiting = asyncio.create_task(due_time.wait_until_due())
    await asyncio.sleep(0)
    due_time.request(0.0)
    async with asyncio.timeout(60):
        await waiting
