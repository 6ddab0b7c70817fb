"""Demand from the counters of routers: rates, restarts, silent routers and percentiles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from baton_operator.autoscaling.demand import (
    LEAST_WINDOW_S,
    WINDOW_S,
    ReportHistory,
    add_reports,
    demand_of,
    percentile,
)
from baton_operator.autoscaling.planner.inputs import Demand
from baton_protocol.store import LATENCY_BOUNDS_S, RouterReport

LOOK_S = 5.0


def report(
    router: str = "a", uptime_s: float = 1000.0, total: int = 0, **more: Any
) -> RouterReport:
    """Return a router's report with each counter at `total`."""
    counters = dict.fromkeys(
        ("requests_total", "prompt_tokens_total", "uncached_tokens_total", "output_tokens_total"),
        total,
    )
    return RouterReport(router=router, uptime_s=uptime_s, **(counters | more))


def later(reports: tuple[RouterReport, ...], number: int) -> tuple[RouterReport, ...]:
    """Return the reports with the uptime that they have at the look of this number."""
    passed = LOOK_S * number
    return tuple(structs.replace(report, uptime_s=report.uptime_s + passed) for report in reports)


def history_of(*answers: tuple[RouterReport, ...], routers: int = 0) -> ReportHistory:
    """Return the history of answers that arrive every LOOK_S, the first at 0."""
    history = ReportHistory()
    for number, reports in enumerate(answers):
        history = add_reports(history, later(reports, number), routers, LOOK_S * number)
    return history


def demand_now(history: ReportHistory, after_s: float = 0.0, **more: Any) -> Demand:
    assert history.at_s is not None
    current = demand_of(history, history.at_s + after_s, 0.99, **more)
    assert current is not None
    return current


def test_without_reports_demand_is_unknown_and_not_zero() -> None:
    assert demand_of(ReportHistory(), 0.0, 0.99) is None
    assert demand_of(add_reports(ReportHistory(), (), 0, 0.0), 0.0, 0.99) is None


def test_rates_are_the_increase_of_counters_in_the_window() -> None:
    demand = demand_now(history_of(*((report(total=1000 + 50 * n),) for n in range(4))))
    assert (demand.window_s, demand.age_s) == (15.0, 0.0)
    rates = (demand.requests, demand.prompt_tokens)
    assert rates == (10.0, 10.0)
    assert (demand.uncached_prompt_tokens, demand.output_tokens) == (10.0, 10.0)


def test_in_the_first_ten_seconds_held_requests_are_known_and_rates_are_not() -> None:
    demand = demand_now(history_of((report(held=2),), (report(total=50, held=3),)))
    assert (demand.requests, demand.output_tokens, demand.ttft_s) == (None, None, None)
    assert demand.held == 3
    assert demand_now(history_of(*((report(total=n),) for n in range(3)))).requests is not None
    assert LEAST_WINDOW_S == 10.0


def test_counts_older_than_the_window_are_ignored() -> None:
    burst = [(report(total=0),), (report(total=9000),)]
    rest = [(report(total=9000),)] * 13
    assert demand_now(history_of(*burst, *rest[:10])).requests == 9000 / 55
    demand = demand_now(history_of(*burst, *rest))
    assert (demand.requests, demand.window_s) == (0.0, WINDOW_S)
    for longest_s in (0.0, 10.0):
        assert demand_now(history_of(*burst, *rest[:3]), longest_s=longest_s).requests == 0.0


def test_routers_add_up_and_the_shortest_idle_time_counts() -> None:
    answers = (
        (report("a", total=10 * n, idle_s=9.0, held=1), report("b", total=90 * n, idle_s=4.0))
        for n in range(3)
    )
    demand = demand_now(history_of(*answers))
    assert (demand.requests, demand.held, demand.idle_s) == (20.0, 1, 4.0)


def test_a_restarted_router_counts_from_zero() -> None:
    old = [(report("a-1", total=5000 + 50 * n),) for n in range(3)]
    new = [(report("a-2", uptime_s=4.0 - 15.0, total=50 + 50 * n),) for n in range(3)]
    # The counts of the old router after its last report are lost.
    assert demand_now(history_of(*old, *new)).requests == (50 + 50 + 50 + 50 + 50) / 25


def test_counts_from_before_a_router_s_first_report_are_ignored() -> None:
    first = [(report("a", total=50 * n),) for n in range(3)]
    both = [
        (report("a", total=150 + 50 * n), report("b", uptime_s=900.0, total=100_000))
        for n in range(2)
    ]
    assert demand_now(history_of(*first, *both)).requests == 10.0


def test_a_silent_router_makes_the_demand_stale_and_not_zero() -> None:
    both = [(report("a", total=50 * n), report("b", total=50 * n)) for n in range(4)]
    history = history_of(*both, routers=2)
    for number in range(4, 20):
        alone = later((report("a", total=50 * number),), number)
        history = add_reports(history, alone, 2, LOOK_S * number)
    demand = demand_of(history, LOOK_S * 19, 0.99)
    assert demand is not None
    assert (demand.age_s, demand.requests) == (80.0, 20.0)


def test_a_leftover_report_of_a_lost_router_is_ignored() -> None:
    history = history_of(*((report(total=50 * n),) for n in range(4)), routers=1)
    last = later((report(total=150),), 3)
    assert add_reports(history, last, 1, 20.0) == history
    [leftover] = last
    barely = structs.replace(leftover, uptime_s=leftover.uptime_s + 1.0, output_tokens_total=160)
    assert add_reports(history, (barely,), 1, 20.0) == history


def test_a_removed_router_does_not_make_the_demand_stale() -> None:
    both = [(report("a", total=50 * n), report("b", total=50 * n)) for n in range(4)]
    history = history_of(*both, routers=2)
    history = add_reports(history, later((report("a", total=200),), 4), 1, 20.0)
    assert demand_now(history).age_s == 0.0
    assert demand_now(history).requests == (3 * 100 + 50) / 20


def test_after_a_long_silence_the_history_restarts() -> None:
    history = history_of(*((report(total=50 * n),) for n in range(4)))
    history = add_reports(history, later((report(total=10_000_000),), 16), 1, 80.0)
    assert demand_now(history).requests is None
    assert demand_now(history).age_s == 0.0


def test_a_second_answer_at_the_same_time_changes_no_rate() -> None:
    history = history_of(*((report(total=50 * n),) for n in range(4)))
    again = add_reports(history, (report(total=150, held=7),), 1, 15.0)
    assert demand_now(again).requests == 10.0
    assert demand_now(again).held == 7


def test_the_start_of_a_router_does_not_wake_a_pool() -> None:
    started = (report(uptime_s=3.0, idle_s=3.0),)
    assert demand_now(history_of(started)).idle_s == 3.0
    assert demand_now(history_of(started), asleep=True).idle_s is None
    waits = (report(uptime_s=3.0, idle_s=0.0, held=1),)
    assert demand_now(history_of(waits), asleep=True).idle_s == 0.0


def test_latencies_are_those_of_the_window() -> None:
    def counts(**at: int) -> tuple[int, ...]:
        return tuple(at.get(f"b{n}", 0) for n in range(len(LATENCY_BOUNDS_S) + 1))

    slow = report(ttft_counts=counts(b20=100))
    later = [report(ttft_counts=counts(b20=100, b0=n), itl_counts=counts(b3=n)) for n in (5, 9)]
    demand = demand_now(history_of((slow,), *((answer,) for answer in later)))
    assert demand.ttft_s is not None
    assert demand.ttft_s <= LATENCY_BOUNDS_S[0]
    assert demand.itl_s is not None
    assert LATENCY_BOUNDS_S[2] < demand.itl_s <= LATENCY_BOUNDS_S[3]


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((), 0.99, None),
        ((0, 0), 0.99, None),
        ((4,), 0.5, LATENCY_BOUNDS_S[0] / 2),
        ((0, 10), 1.0, LATENCY_BOUNDS_S[1]),
        ((50, 50), 0.5, LATENCY_BOUNDS_S[0]),
        ((0,) * len(LATENCY_BOUNDS_S) + (3,), 0.9, LATENCY_BOUNDS_S[-1]),
    ],
)
def test_a_percentile_lies_within_its_bounds(
    counts: tuple[int, ...], share: float, value: float | None
) -> None:
    assert percentile(counts, share) == value


@given(
    counts=st.lists(st.integers(0, 1000), min_size=1, max_size=len(LATENCY_BOUNDS_S) + 1),
    shares=st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)),
)
def test_a_higher_percentile_is_never_lower(counts: list[int], shares: tuple[float, float]) -> None:
    low, high = (percentile(counts, share) for share in sorted(shares))
    assert (low is None) == (high is None) == (sum(counts) == 0)
    assert low is None or high is None or 0.0 <= low <= high <= LATENCY_BOUNDS_S[-1]


@given(steps=st.lists(st.tuples(st.integers(0, 500), st.booleans()), min_size=3, max_size=14))
def test_nothing_is_counted_twice_or_below_zero(steps: list[tuple[int, bool]]) -> None:
    """A router counts requests, and sometimes restarts just before its report is read."""
    history, born, total, grown = ReportHistory(), -1000.0, 0, 0
    for number, (more, restarts) in enumerate(steps):
        at_s = LOOK_S * number
        born, total = (at_s - 1.0, more) if restarts else (born, total + more)
        if number:
            grown += more
        answer = report(f"a-{born}", uptime_s=at_s - born, total=total)
        history = add_reports(history, (answer,), 1, at_s)
    demand = demand_now(history, longest_s=1e9)
    assert demand.requests is not None
    assert demand.requests * demand.window_s == pytest.approx(grown)
