"""The router's benchmark: what it says of its passes, and which goals it holds them to."""

from __future__ import annotations

import json

import pytest

from benchmarks.router_overhead import (
    IDS,
    MOCK,
    NODE,
    OURS,
    Cell,
    Figures,
    Place,
    added,
    goals,
    medians,
    table,
)
from benchmarks.support.mock_backend import event
from benchmarks.support.router_load import Timing


def found(**cpu: float) -> dict[Place, Figures]:
    """Rows in which ours adds 1 ms for one client and 9 for 32; CPU by name."""
    rows: dict[Place, Figures] = {}
    for delay in (0.0, 10.0):
        for clients, more in ((1, 1.0), (32, 9.0)):
            rows[delay, clients, NODE] = Figures(2.0, 4.0, 6.0, 0.5)
            for name in (OURS, IDS):
                rows[delay, clients, name] = Figures(2 + more, 4 + more, 9.0, cpu.get(name, 2.0))
    for name in ("dynamo", "vllm-router"):
        if name in cpu:
            rows[0.0, 32, MOCK] = Figures(1.0, 1.0, 1.0, 0.2)
            rows[0.0, 32, name] = Figures(1.5, 2.0, 3.0, cpu[name])
    return rows


def test_a_cell_tells_the_median_of_its_passes() -> None:
    cell = Cell()
    cell.add([Timing(1.0, 10.0), Timing(3.0, 30.0)], cpu_s=0.004)
    cell.add([Timing(5.0, 50.0)], cpu_s=0.001)
    cell.add([Timing(4.0, 40.0)], cpu_s=0.009)
    assert medians(cell) == pytest.approx((4.0, 4.0, 40.0, 2.0))


def test_each_is_compared_with_what_is_behind_it() -> None:
    rows = found(**{"vllm-router": 1.0, "dynamo": 2.0})
    assert added(rows, (0.0, 1, OURS)) == Figures(1.0, 1.0, 3.0, 1.5)
    assert added(rows, (0.0, 32, "vllm-router")) == Figures(0.5, 1.0, 2.0, 0.8)
    for name in ("dynamo", NODE, MOCK):
        assert added(rows, (0.0, 32, name)) is None


def test_goals_without_rivals_are_those_of_latency() -> None:
    assert [met for _, met in goals(found())] == [True] * 4
    slow = found() | {(10.0, 32, OURS): Figures(2.0, 14.0, 9.0, 2.0)}
    assert [met for _, met in goals(slow)] == [True, True, True, False]


def test_goals_with_rivals_are_ratios_of_cpu_too() -> None:
    even = goals(found(**{OURS: 3.0, "dynamo": 2.0, IDS: 3.1, "vllm-router": 1.0}))
    assert even[-2:] == [
        ("CPU of baton 1.50x dynamo's (goal 1.5x)", True),
        ("CPU of baton, ids 3.10x vllm-router's (goal 3.0x)", False),
    ]


def test_the_table_has_a_line_for_each_side() -> None:
    rows = found(dynamo=1.0)
    lines = table(rows)
    assert len(lines) == 1 + len(rows)
    assert lines[2].split() == ["0", "1", "baton", "3.00", "5.00", "1.00", "1.00", "9.0", "2.00"]


def test_the_mock_backend_s_last_event_ends_its_choice() -> None:
    chunks = [json.loads(event(index, 3).removeprefix(b"data: ")) for index in range(3)]
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None, None, "length"]
    assert all(event(index, 3).endswith(b"}\n\n") for index in range(3))
