"""Demand from routers' counters: rates, restarts, silence, percentiles."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from baton_operator.autoscaling.demand import LEAST_WINDOW_S, WINDOW_S, History, demand_of, heard
from baton_operator.autoscaling.latency import percentile
from baton_operator.autoscaling.planner.records import Demand
from baton_protocol.store import LATENCY_BOUNDS_S, RouterReport

LOOK_S = 5.0


def report(
    router: str = "a", uptime_s: float = 1000.0, total: int = 0, **more: Any
) -> RouterReport:
    """Each counter is at `total`."""
    counters = dict.fromkeys(
        ("requests_total", "prompt_tokens_total", "uncached_tokens_total", "output_tokens_total"),
        total,
    )
    return RouterReport(router=router, uptime_s=uptime_s, **(counters | more))


def later(reports: tuple[RouterReport, ...], number: int) -> tuple[RouterReport, ...]:
    """The same at the look of that number: their `uptime_s` is that of the first."""
    passed = LOOK_S * number
    return tuple(structs.replace(one, uptime_s=one.uptime_s + passed) for one in reports)


def seen(*answers: tuple[RouterReport, ...], routers: int = 0) -> History:
    """One each LOOK_S, the first at 0."""
    history = History()
    for number, reports in enumerate(answers):
        history = heard(history, later(reports, number), routers, LOOK_S * number)
    return history


def asked(history: History, after_s: float = 0.0, **more: Any) -> Demand:
    assert history.at_s is not None
    found = demand_of(history, history.at_s + after_s, 0.99, **more)
    assert found is not None
    return found


def test_without_reports_demand_is_unknown_and_not_zero() -> None:
    assert demand_of(History(), 0.0, 0.99) is None
    assert demand_of(heard(History(), (), 0, 0.0), 0.0, 0.99) is None


def test_rates_are_the_increase_of_counters_in_the_window() -> None:
    demand = asked(seen(*((report(total=1000 + 50 * n),) for n in range(4))))
    assert (demand.window_s, demand.age_s) == (15.0, 0.0)
    rates = (demand.requests, demand.prompt_tokens)
    assert rates == (10.0, 10.0)
    assert (demand.uncached_prompt_tokens, demand.output_tokens) == (10.0, 10.0)


def test_before_ten_seconds_were_seen_rates_are_not_known_but_who_waits_is() -> None:
    demand = asked(seen((report(held=2),), (report(total=50, held=3),)))
    assert (demand.requests, demand.output_tokens, demand.ttft_s) == (None, None, None)
    assert demand.held == 3
    assert asked(seen(*((report(total=n),) for n in range(3)))).requests is not None
    assert LEAST_WINDOW_S == 10.0


def test_what_is_older_than_the_window_does_not_count() -> None:
    burst = [(report(total=0),), (report(total=9000),)]
    rest = [(report(total=9000),)] * 13
    assert asked(seen(*burst, *rest[:10])).requests == 9000 / 55
    demand = asked(seen(*burst, *rest))
    assert (demand.requests, demand.window_s) == (0.0, WINDOW_S)
    for longest_s in (0.0, 10.0):
        assert asked(seen(*burst, *rest[:3]), longest_s=longest_s).requests == 0.0


def test_several_routers_add_up_and_the_least_idle_counts() -> None:
    answers = (
        (report("a", total=10 * n, idle_s=9.0, held=1), report("b", total=90 * n, idle_s=4.0))
        for n in range(3)
    )
    demand = asked(seen(*answers))
    assert (demand.requests, demand.held, demand.idle_s) == (20.0, 1, 4.0)


def test_a_restarted_router_is_another_one_and_counts_from_zero() -> None:
    old = [(report("a-1", total=5000 + 50 * n),) for n in range(3)]
    new = [(report("a-2", uptime_s=4.0 - 15.0, total=50 + 50 * n),) for n in range(3)]
    # What the old one counted after it was last heard is lost.
    assert asked(seen(*old, *new)).requests == (50 + 50 + 50 + 50 + 50) / 25


def test_a_router_that_is_older_than_it_was_heard_brings_no_past() -> None:
    first = [(report("a", total=50 * n),) for n in range(3)]
    both = [
        (report("a", total=150 + 50 * n), report("b", uptime_s=900.0, total=100_000))
        for n in range(2)
    ]
    assert asked(seen(*first, *both)).requests == 10.0


def test_a_router_that_fell_silent_makes_what_is_known_old_and_not_zero() -> None:
    both = [(report("a", total=50 * n), report("b", total=50 * n)) for n in range(4)]
    history = seen(*both, routers=2)
    for number in range(4, 20):
        alone = later((report("a", total=50 * number),), number)
        history = heard(history, alone, 2, LOOK_S * number)
    demand = demand_of(history, LOOK_S * 19, 0.99)
    assert demand is not None
    assert (demand.age_s, demand.requests) == (80.0, 20.0)


def test_a_report_that_outlives_its_router_is_not_one_of_no_requests() -> None:
    history = seen(*((report(total=50 * n),) for n in range(4)), routers=1)
    last = later((report(total=150),), 3)
    assert heard(history, last, 1, 20.0) == history
    [one] = last
    barely = structs.replace(one, uptime_s=one.uptime_s + 1.0, output_tokens_total=160)
    assert heard(history, (barely,), 1, 20.0) == history


def test_a_router_that_has_gone_is_not_missed() -> None:
    both = [(report("a", total=50 * n), report("b", total=50 * n)) for n in range(4)]
    history = seen(*both, routers=2)
    history = heard(history, later((report("a", total=200),), 4), 1, 20.0)
    assert asked(history).age_s == 0.0
    assert asked(history).requests == (3 * 100 + 50) / 20


def test_after_a_long_silence_the_history_restarts() -> None:
    history = seen(*((report(total=50 * n),) for n in range(4)))
    history = heard(history, later((report(total=10_000_000),), 16), 1, 80.0)
    assert asked(history).requests is None
    assert asked(history).age_s == 0.0


def test_a_second_answer_at_the_same_time_changes_no_rate() -> None:
    history = seen(*((report(total=50 * n),) for n in range(4)))
    again = heard(history, (report(total=150, held=7),), 1, 15.0)
    assert asked(again).requests == 10.0
    assert asked(again).held == 7


def test_the_start_of_a_router_does_not_wake_a_pool() -> None:
    started = (report(uptime_s=3.0, idle_s=3.0),)
    assert asked(seen(started)).idle_s == 3.0
    assert asked(seen(started), asleep=True).idle_s is None
    waits = (report(uptime_s=3.0, idle_s=0.0, held=1),)
    assert asked(seen(waits), asleep=True).idle_s == 0.0


def test_measured_times_are_those_of_the_window() -> None:
    def counts(**at: int) -> tuple[int, ...]:
        return tuple(at.get(f"b{n}", 0) for n in range(len(LATENCY_BOUNDS_S) + 1))

    slow = report(ttft_counts=counts(b20=100))
    later = [report(ttft_counts=counts(b20=100, b0=n), itl_counts=counts(b3=n)) for n in (5, 9)]
    demand = asked(seen((slow,), *((one,) for one in later)))
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
def test_a_higher_share_is_never_faster(counts: list[int], shares: tuple[float, float]) -> None:
    low, high = (percentile(counts, share) for share in sorted(shares))
    assert (low is None) == (high is None) == (sum(counts) == 0)
    assert low is None or high is None or 0.0 <= low <= high <= LATENCY_BOUNDS_S[-1]


@given(steps=st.lists(st.tuples(st.integers(0, 500), st.booleans()), min_size=3, max_size=14))
def test_nothing_is_counted_twice_or_below_zero(steps: list[tuple[int, bool]]) -> None:
    """A router that counts, and begins anew now and then just before it is heard."""
    history, born, total, grown = History(), -1000.0, 0, 0
    for number, (more, restarts) in enumerate(steps):
        at_s = LOOK_S * number
        born, total = (at_s - 1.0, more) if restarts else (born, total + more)
        if number:
            grown += more
        one = report(f"a-{born}", uptime_s=at_s - born, total=total)
        history = heard(history, (one,), 1, at_s)
    demand = asked(history, longest_s=1e9)
    assert demand.requests is not None
    assert demand.requests * demand.window_s == pytest.approx(grown)
