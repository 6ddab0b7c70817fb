"""Which operator manages a pool, for each record in its status."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from baton_operator.api.status import OperatorStatus
from baton_operator.api.times import stamp
from baton_operator.controller.ownership import GONE_S, HEARTBEAT_S, Ownership
from tests.support.clock import Clock

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
ME, HOLDER, THIRD = "a/baton-operator", "b/baton-operator", "c/baton-operator"


def at(after_s: float) -> str:
    return stamp(NOW + timedelta(seconds=after_s))


def record(name: str, time_s: float = 0.0, **more: Any) -> OperatorStatus:
    return OperatorStatus(name=name, time=at(time_s), **more)


ROWS: list[tuple[str, OperatorStatus | None, bool, OperatorStatus | None]] = [
    ("nobody", None, True, record(ME)),
    ("ours, fresh", record(ME, -30), True, None),
    ("ours, due", record(ME, -HEARTBEAT_S), True, record(ME)),
    ("ours, from a clock that is ahead", record(ME, 3600), True, record(ME)),
    ("ours, and another operator that lives", record(ME, -30, other=HOLDER, other_time=at(0)),
     True, None),
    ("another's", record(HOLDER, -30), False, record(HOLDER, -30, other=ME, other_time=at(0))),
    ("another's, by a slow clock", record(HOLDER, -3600), False,
     record(HOLDER, -3600, other=ME, other_time=at(0))),
    ("another's, with our fresh mark", record(HOLDER, 0, other=ME, other_time=at(-10)),
     False, None),
    ("another's, with our old mark", record(HOLDER, 0, other=ME, other_time=at(-HEARTBEAT_S)),
     False, record(HOLDER, 0, other=ME, other_time=at(0))),
    ("another's, with a third's mark", record(HOLDER, 0, other=THIRD, other_time=at(-10)),
     False, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "acts", "written"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_an_operator_acts_only_on_a_pool_that_no_other_holds(
    known: OperatorStatus | None, acts: bool, written: OperatorStatus | None
) -> None:
    turn = Ownership(ME, Clock()).turn(known, NOW)
    assert (turn.acts, turn.record) == (acts, written)
    assert 0 < turn.again_s <= HEARTBEAT_S + 1


def test_a_holder_is_gone_when_its_mark_stays_the_same_on_our_own_clock() -> None:
    clock = Clock()
    one = Ownership(ME, clock)
    for moment in range(3):
        assert not one.turn(record(HOLDER, moment), NOW).acts
        clock.advance(GONE_S - 1)
        assert not one.turn(record(HOLDER, moment), NOW).acts
    clock.advance(1)
    assert one.turn(record(HOLDER, 2), NOW).record == record(ME)


def test_a_third_operator_takes_the_place_of_a_second_that_is_gone() -> None:
    clock = Clock()
    one = Ownership(ME, clock)
    for moment in range(4):
        turn = one.turn(record(HOLDER, moment, other=THIRD, other_time=at(0)), NOW)
        assert not turn.acts
        clock.advance(GONE_S / 3)
    assert turn.record == record(HOLDER, 3, other=ME, other_time=at(0))
