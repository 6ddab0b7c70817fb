"""The router's benchmark: its medians, its table, and the goals that it checks."""

from __future__ import annotations

import json

import pytest

from benchmarks.router.overhead import (
    ANSWER_TOKENS,
    BUSY,
    IDS,
    MOCK,
    NODE,
    OURS,
    REQUESTS,
    Cell,
    Figures,
    Load,
    Place,
    added,
    goals,
    medians,
    table,
)
from benchmarks.support.router.load_generator import Timing
from benchmarks.support.router.mock_backend import event


def rows_with(**cpu: float) -> dict[Place, Figures]:
    """Return rows in which our router adds 1 ms for one client and 9 ms for 32; `cpu` sets the CPU
    time by router."""
    rows: dict[Place, Figures] = {}
    for load in REQUESTS:
        more = 1.0 if load.clients == 1 else 9.0
        rows[load, NODE] = Figures(2.0, 4.0, 6.0, 0.5)
        for name in (OURS, IDS):
            rows[load, name] = Figures(2 + more, 4 + more, 9.0, cpu.get(name, 2.0))
    for name in ("dynamo", "vllm-router"):
        if name in cpu:
            rows[BUSY, MOCK] = Figures(1.0, 1.0, 1.0, 0.2)
            rows[BUSY, name] = Figures(1.5, 2.0, 3.0, cpu[name])
    return rows


def test_a_cell_has_the_median_of_its_passes() -> None:
    cell = Cell()
    cell.add([Timing(1.0, 10.0), Timing(3.0, 30.0)], cpu_s=0.004)
    cell.add([Timing(5.0, 50.0)], cpu_s=0.001)
    cell.add([Timing(4.0, 40.0)], cpu_s=0.009)
    assert medians(cell) == pytest.approx((4.0, 4.0, 40.0, 2.0))


def test_each_router_is_compared_with_the_backend_behind_it() -> None:
    rows = rows_with(**{"vllm-router": 1.0, "dynamo": 2.0})
    assert added(rows, (Load(0.0, 1), OURS)) == Figures(1.0, 1.0, 3.0, 1.5)
    assert added(rows, (BUSY, "vllm-router")) == Figures(0.5, 1.0, 2.0, 0.8)
    for name in ("dynamo", NODE, MOCK):
        assert added(rows, (BUSY, name)) is None


def test_without_other_routers_the_goals_are_latencies() -> None:
    assert [met for _, met in goals(rows_with())] == [True] * len(REQUESTS)
    slow = rows_with() | {(Load(10.0, 32), OURS): Figures(2.0, 14.0, 9.0, 2.0)}
    assert [text for text, met in goals(slow) if not met] == ["10 ms, 32 clients: p99 +10.00 ms"]


def test_spread_clients_start_a_share_of_a_request_apart() -> None:
    spread = Load(10.0, 32, spread=True)
    assert spread.apart_s * 32 == pytest.approx(0.01 * ANSWER_TOKENS)
    assert {load.apart_s for load in REQUESTS if not load.spread} == {0.0}
    assert str(spread) == "10 ms, 32 clients spread"


def test_with_other_routers_the_goals_include_ratios_of_cpu_time() -> None:
    even = goals(rows_with(**{OURS: 3.0, "dynamo": 2.0, IDS: 3.1, "vllm-router": 1.0}))
    assert even[-2:] == [
        ("CPU of baton 1.50x dynamo's (goal 1.5x)", True),
        ("CPU of baton, ids 3.10x vllm-router's (goal 3.0x)", False),
    ]


def test_the_table_has_a_line_for_each_row() -> None:
    rows = rows_with(dynamo=1.0)
    lines = table(rows)
    assert len(lines) == 1 + len(rows)
    row = "0 ms, 1 client baton 3.00 5.00 1.00 1.00 9.0 2.00"
    assert " ".join(lines[2].split()) == row


def test_the_last_event_of_the_mock_backend_ends_its_choice() -> None:
    chunks = [json.loads(event(index, 3).removeprefix(b"data: ")) for index in range(3)]
    assert [one["choices"][0]["finish_reason"] for one in chunks] == [None, None, "length"]
    assert all(event(index, 3).endswith(b"}\n\n") for index in range(3))
