"""The work queue, with a clock of the test's own."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from baton_operator.controller.queue import FIRST_RETRY_S, LONGEST_RETRY_S, Schedule, WorkQueue

NEVER = 1e9


def schedule(jitter: float = 0.0) -> Schedule[str]:
    return Schedule(lambda: jitter)


def test_a_key_marked_often_is_handed_out_once() -> None:
    queue = schedule()
    for _ in range(10):
        queue.add("a", 1.0)
    assert queue.take(1.0) == "a"
    queue.done("a")
    assert queue.take(NEVER) is None


def test_a_key_is_due_at_the_earliest_moment_asked_for() -> None:
    queue = schedule()
    queue.add("a", 5.0)
    queue.add("a", 2.0)
    queue.add("a", 9.0)
    assert queue.next_due() == 2.0
    assert queue.take(1.9) is None
    assert queue.take(2.0) == "a"
    queue.done("a")
    assert queue.next_due() is None


def test_the_one_that_is_due_longest_comes_first() -> None:
    queue = schedule()
    for key, at in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        queue.add(key, at)
    assert [queue.take(9.0) for _ in range(3)] == ["early", "middle", "late"]


def test_nobody_else_gets_a_key_that_is_being_worked_on() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 0.0)
    assert queue.take(1.0) is None
    queue.done("a")
    assert queue.take(1.0) == "a"


def test_another_key_is_handed_out_meanwhile() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.0)
    queue.add("b", 0.5)
    assert queue.take(1.0) == "b"


def test_failures_double_the_pause_up_to_the_most() -> None:
    queue = schedule()
    pauses = []
    for _ in range(10):
        queue.add("a", 0.0)
        queue.take(NEVER)
        pauses.append(queue.failed("a", 0.0, 0.0, LONGEST_RETRY_S))
    assert pauses[:4] == [FIRST_RETRY_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_RETRY_S


def test_a_success_makes_the_next_failure_the_first() -> None:
    queue = schedule()
    for _ in range(5):
        queue.failed("a", 0.0, 0.0, LONGEST_RETRY_S)
    queue.done("a")
    assert queue.failed("a", 0.0, 0.0, LONGEST_RETRY_S) == FIRST_RETRY_S


def test_jitter_takes_off_a_quarter_at_most() -> None:
    assert schedule(1.0).failed("a", 0.0, 0.0, LONGEST_RETRY_S) == FIRST_RETRY_S * 0.75


def test_what_the_server_asks_for_is_the_least_pause() -> None:
    assert schedule(1.0).failed("a", 0.0, 7.0, LONGEST_RETRY_S) == 7.0


def test_a_mark_during_a_look_that_fails_comes_before_the_retry() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.1)
    queue.failed("a", 0.0, 0.0, LONGEST_RETRY_S)
    assert queue.next_due() == 0.1


def test_no_mark_comes_before_what_the_server_asks_for() -> None:
    queue = schedule()
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.1)
    queue.failed("a", 0.0, 7.0, LONGEST_RETRY_S)
    queue.add("a", 1.0)
    assert queue.next_due() == 7.0
    queue.take(7.0)
    queue.done("a")
    queue.add("a", 3.0)
    assert queue.next_due() == 3.0


def test_depth_counts_what_is_due() -> None:
    queue = schedule()
    queue.add("a", 1.0)
    queue.add("b", 5.0)
    assert queue.depth(2.0) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("+td!"), st.floats(0, 9))))
def test_no_mark_is_ever_lost(steps: list[tuple[str, str, float]]) -> None:
    """Whatever happens in between: a key marked since it was last handed out is handed out."""
    queue = schedule()
    marked: set[str] = set()
    busy: set[str] = set()
    for key, act, at in steps:
        if act == "+":
            queue.add(key, at)
            marked.add(key)
        elif act == "t":
            if (taken := queue.take(at)) is not None:
                assert taken not in busy
                busy.add(taken)
                marked.discard(taken)
        elif key in busy:
            busy.discard(key)
            if act == "d":
                queue.done(key)
            else:
                queue.failed(key, at, 0.0, LONGEST_RETRY_S)
                marked.add(key)
    for key in busy:
        queue.done(key)
    left = set()
    while (taken := queue.take(NEVER)) is not None:
        left.add(taken)
        queue.done(taken)
    assert left == marked


async def test_workers_share_what_is_due() -> None:
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    waiting = [asyncio.create_task(queue.take()) for _ in range(3)]
    await asyncio.sleep(0)
    for key in "abc":
        queue.add(key, 0.0)
    async with asyncio.timeout(60):
        assert {await one for one in waiting} == set("abc")


async def test_a_worker_wakes_up_for_what_becomes_due() -> None:
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    queue.add("a", 0.02)
    async with asyncio.timeout(60):
        assert await queue.take() == "a"


async def test_a_worker_wakes_up_for_what_is_due_earlier() -> None:
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    queue.add("late", 3600.0)
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("early", 0.0)
    async with asyncio.timeout(60):
        assert await waiting == "early"
