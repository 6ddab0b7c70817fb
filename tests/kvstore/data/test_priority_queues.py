"""PriorityQueues with a fake clock: the order of operations, and the limit of write-behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from baton_kvstore.data.priority_queues import PriorityQueues
from baton_kvstore.data.transfers import Format, Get, Put
from baton_protocol.store import Marker, Priority
from tests.support.clock import Clock
from tests.support.stores.kvstore import EPOCH, FINGERPRINT, LAYOUT, PATIENCE_S, chunk_name

FORMAT = Format(LAYOUT, FINGERPRINT, EPOCH, 3600.0)
MARKER = Marker(instance=0, run_id="r", payload_bytes=LAYOUT.chunk_bytes, shards=1, depth=0)
HANDOFF, PREFIX, BEHIND = Priority.HANDOFF, Priority.PREFIX, Priority.BEHIND


def nothing(*_: object) -> None:
    pass


def put(priority: Priority, number: int = 0) -> Put:
    return Put(FORMAT, chunk_name(number), 16, 0, nothing, nothing, nothing, priority)


def get(priority: Priority) -> Get:
    return Get(FORMAT, chunk_name(0), MARKER, 0, nothing, nothing, priority)


def filled(queues: PriorityQueues, *priorities: Priority) -> PriorityQueues:
    for number, priority in enumerate(priorities):
        assert queues.push_operation(put(priority, number))
    return queues


def taken(queues: PriorityQueues) -> Priority | None:
    """Take an operation without waiting."""
    operation = queues.take_operation(queues.changes, 0.0)
    return None if operation is None else operation.priority


def test_hand_offs_go_before_prefixes_before_write_behind_each_in_fifo_order() -> None:
    queues = filled(
        PriorityQueues(1, 30.0, Clock()), BEHIND, PREFIX, HANDOFF, BEHIND, PREFIX, HANDOFF
    )
    assert queues.queued == 6
    order = []
    for _ in range(6):
        operation = queues.take_operation(queues.changes, 0.0)
        assert isinstance(operation, Put)
        order.append((operation.priority, operation.hash))
        queues.finish_operation()
    assert order == [
        (priority, chunk_name(number))
        for priority, number in zip(
            (HANDOFF, HANDOFF, PREFIX, PREFIX, BEHIND, BEHIND), (2, 5, 1, 4, 0, 3), strict=True
        )
    ]


@pytest.mark.parametrize(("threads", "most"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_write_behind_never_takes_the_last_free_thread(threads: int, most: int) -> None:
    queues = filled(PriorityQueues(threads, 30.0, Clock()), *[BEHIND] * 9)
    assert [taken(queues) for _ in range(threads)].count(BEHIND) == most
    queues.finish_operation()
    assert taken(queues) is BEHIND
    assert taken(queues) is None


def test_with_two_threads_write_behind_waits_while_one_is_busy() -> None:
    queues = filled(PriorityQueues(2, 30.0, Clock()), PREFIX, BEHIND)
    assert taken(queues) is PREFIX
    assert taken(queues) is None
    filled(queues, HANDOFF)
    assert taken(queues) is HANDOFF
    queues.finish_operation()
    assert taken(queues) is None
    queues.finish_operation()
    assert taken(queues) is BEHIND


def test_an_operation_that_waited_too_long_goes_first() -> None:
    clock = Clock()
    queues = filled(PriorityQueues(2, 30.0, clock), BEHIND, PREFIX)
    clock.advance(31.0)
    filled(queues, HANDOFF, HANDOFF)
    assert [taken(queues) for _ in range(4)] == [PREFIX, BEHIND, HANDOFF, HANDOFF]


def test_only_puts_other_than_write_behind_are_counted_as_waiting() -> None:
    queues = filled(PriorityQueues(2, 30.0, Clock()), BEHIND)
    queues.push_operation(get(HANDOFF))
    assert not queues.puts_wait
    filled(queues, PREFIX)
    assert queues.puts_wait
    assert [taken(queues), queues.puts_wait] == [HANDOFF, True]
    assert [taken(queues), queues.puts_wait] == [PREFIX, False]


def test_closed_queues_accept_nothing_and_still_hand_out_their_operations() -> None:
    queues = filled(PriorityQueues(2, 30.0, Clock()), BEHIND, BEHIND, BEHIND)
    queues.close()
    assert not queues.push_operation(put(HANDOFF))
    assert [taken(queues) for _ in range(4)] == [BEHIND, BEHIND, BEHIND, None]


@pytest.mark.parametrize("event", ["push", "wake", "close"])
def test_a_waiting_thread_wakes_on_every_event(event: str) -> None:
    queues = PriorityQueues(2, 30.0)
    found: list[object] = []
    seen = queues.changes
    taker = threading.Thread(target=lambda: found.append(queues.take_operation(seen, None)))
    taker.start()
    operation = put(PREFIX)
    events: dict[str, Callable[[], object]] = {
        "push": partial(queues.push_operation, operation),
        "wake": queues.wake,
        "close": queues.close,
    }
    events[event]()
    taker.join(PATIENCE_S)
    assert found == [operation if event == "push" else None]


def test_a_change_before_the_wait_is_not_missed() -> None:
    queues = PriorityQueues(2, 30.0)
    seen = queues.changes
    queues.wake()
    assert (
        queues.take_operation(seen, None) is None
    )  # if the change were missed, this would never return
