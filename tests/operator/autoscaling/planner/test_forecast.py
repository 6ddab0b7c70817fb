"""The demand forecast: jumps within a window, significant growth, and answers that lag."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from baton_operator.autoscaling.planner.forecast import (
    Forecast,
    extrapolate,
    fit_slope,
    forecast_load,
    jump_factor,
)
from baton_operator.autoscaling.planner.inputs import Demand, PoolObservation, nodes_of_role
from baton_operator.autoscaling.planner.memory import DemandSample, PlannerMemory
from tests.support.planner.builders import NODE, NOW, demand, observed_pool

WINDOW_S, TICK_S = 60.0, 15.0


def memory_of(requests: list[float], output: float = 200.0) -> PlannerMemory:
    """Return a memory of samples TICK_S apart; the newest is of NOW."""
    first_s = NOW - TICK_S * (len(requests) - 1)
    samples = (
        DemandSample(
            at_s=first_s + TICK_S * turn,
            requests=rate,
            prompt=900.0 * rate,
            output=output * rate,
            live=rate,
        )
        for turn, rate in enumerate(requests)
    )
    return PlannerMemory(since_s=0.0, demand=tuple(samples))


def forecast_of(
    observed: Demand, memory: PlannerMemory, observation: PoolObservation | None = None
) -> Forecast:
    observation = observed_pool(2, 2, demand=observed) if observation is None else observation
    prefill, decode = (nodes_of_role(role, observation, 30.0) for role in ("prefill", "decode"))
    return forecast_load(observed, prefill, decode, memory, NODE.start_s)


def test_a_jump_is_seen_in_the_newest_part_of_the_window() -> None:
    # 2 requests/s, and 20 in the newest 15 of 60 s: the mean is 6.5.
    assert jump_factor(memory_of([2.0] * 6 + [6.5]), WINDOW_S) == pytest.approx(20.0 / 6.5)
    # 15 s later half of the window has 20.
    assert jump_factor(memory_of([2.0] * 6 + [6.5, 11.0]), WINDOW_S) == pytest.approx(20.0 / 11.0)


def test_noise_a_fall_and_windows_that_do_not_overlap_are_no_jumps() -> None:
    random = Random(5)
    noise = [10.0 * random.uniform(0.97, 1.03) for _ in range(200)]
    assert {jump_factor(memory_of(noise[: turn + 6]), WINDOW_S) for turn in range(194)} == {1.0}
    assert jump_factor(memory_of([20.0] * 6 + [6.0]), WINDOW_S) == 1.0
    assert jump_factor(memory_of([2.0] * 6 + [20.0]), TICK_S) == 1.0
    assert jump_factor(memory_of([2.0, 6.5]), WINDOW_S) == 1.0


def test_a_jump_raises_the_forecast_of_prompts_and_of_their_answers() -> None:
    observed = demand(6.5, output_tokens=420.0, window_s=WINDOW_S)
    forecast = forecast_of(observed, memory_of([2.0] * 6 + [6.5]))
    assert forecast.prompt == pytest.approx(20.0 * 900.0)
    assert forecast.output == pytest.approx(20.0 * 200.0)
    assert forecast.prompt_mean == pytest.approx(900.0)


def test_generated_tokens_count_if_they_exceed_the_estimate_from_requests() -> None:
    forecast = forecast_of(demand(2.0, output_tokens=9_000.0), memory_of([2.0] * 7))
    assert forecast.output == 9_000.0


def test_growth_is_extrapolated_from_the_middle_of_the_window_over_the_start_up() -> None:
    line = [(15.0 * turn, 100.0 + 15.0 * turn) for turn in range(20)]
    assert extrapolate(385.0, line, 60.0, WINDOW_S) == pytest.approx(385.0 + 60.0 + 30.0)
    assert extrapolate(385.0, line, 600.0, WINDOW_S) == pytest.approx(2 * 385.0)


@pytest.mark.parametrize(
    "values",
    [
        [10.0] * 20,
        [10.0, 12.0] * 10,
        [20.0 - turn for turn in range(20)],
        [2.0] * 10 + [20.0] * 10,  # a jump that has ended
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],  # too few points, as in a pool that has just started
    ],
    ids=["flat", "zigzag", "fall", "jump", "start"],
)
def test_rates_without_growth_are_not_extrapolated(values: list[float]) -> None:
    points = [(15.0 * turn, value) for turn, value in enumerate(values)]
    assert extrapolate(values[-1], points, 60.0, WINDOW_S) == values[-1]


def test_growth_is_extrapolated_once_half_of_the_points_show_it() -> None:
    values = [10.0] * 10 + [10.0 + 4.0 * turn for turn in range(1, 10)]
    points = [(15.0 * turn, value) for turn, value in enumerate(values)]
    ahead = extrapolate(values[-1], points, 60.0, WINDOW_S)
    assert ahead is not None
    assert ahead > 1.2 * values[-1]


def test_a_slope_has_an_error_and_needs_enough_points() -> None:
    line = [(float(t), 3.0 + 2.0 * t) for t in range(10)]
    assert fit_slope(line) == pytest.approx((2.0, 0.0), abs=1e-9)
    zigzag = [(float(t), 5.0 + (-1.0) ** t) for t in range(10)]
    slope, error = fit_slope(zigzag)
    assert abs(slope) < error
    assert fit_slope(line[:5]) == (0.0, 0.0)
    assert fit_slope([(1.0, 2.0)] * 8) == (0.0, 0.0)


def test_waiting_requests_that_nodes_and_routers_report_count_once() -> None:
    calm = observed_pool(2, 2, 10.0)
    waiting = tuple(
        replace(node, waiting=5, running=10) if node.role == "decode" else node
        for node in calm.nodes
    )
    observation = replace(calm, nodes=waiting)
    for live, expected in ((20, 30.0), (30, 30.0), (40, 40.0), (None, 30.0)):
        forecast = forecast_of(demand(10.0, live_requests=live), memory_of([10.0] * 7), observation)
        assert forecast.live == expected
