"""Load profiles have the rates and mixes that they describe, and depend only on their seed."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.support.autoscaling.load_profiles import (
    ANSWER_HEAVY,
    CHAT,
    PROMPT_HEAVY,
    Load,
    loads,
)
from benchmarks.support.autoscaling.pool_nodes import SimRequest

LOADS = {load.name: load for load in loads(quick=True)}


def rate(requests: tuple[SimRequest, ...], from_s: float, to_s: float) -> float:
    return sum(from_s <= request.at_s < to_s for request in requests) / (to_s - from_s)


# The day takes seconds to draw; the test below draws one.
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(load, id=name, marks=[pytest.mark.long] if name == "day" else [])
        for name, load in LOADS.items()
    ],
)
def test_a_load_depends_only_on_its_seed(load: Load) -> None:
    first = load.requests(1)
    assert first == load.requests(1)
    assert first != load.requests(2)
    assert [request.at_s for request in first] == sorted(request.at_s for request in first)
    assert all(0 < request.uncached <= request.prompt and request.output > 1 for request in first)


def test_a_day_has_a_quiet_night_and_two_peaks() -> None:
    load = LOADS["day"]
    requests, hour_s = load.requests(1), load.length_s / 24
    night, morning, noon, evening = (
        rate(requests, (hour - 1) * hour_s, (hour + 1) * hour_s) for hour in (2.0, 10.5, 14.5, 19.0)
    )
    assert night < 2.5
    assert morning == pytest.approx(11.0, rel=0.15)
    assert noon < morning
    assert evening == pytest.approx(14.5, rel=0.15)


def test_a_burst_is_ten_times_the_rate_before_and_after() -> None:
    requests = LOADS["burst"].requests(1)
    before, high, after = (
        rate(requests, 0, 600),
        rate(requests, 630, 1200),
        rate(requests, 1230, 2100),
    )
    assert high / before == pytest.approx(10.0, rel=0.2)
    assert high / after == pytest.approx(10.0, rel=0.2)


def test_the_mix_shifts_in_the_middle_and_the_rate_stays() -> None:
    load = LOADS["shift"]
    requests, middle_s = load.requests(1), load.length_s / 2
    early = [request for request in requests if request.at_s < middle_s - 150]
    late = [request for request in requests if request.at_s > middle_s + 150]
    for part, mix in ((early, PROMPT_HEAVY), (late, ANSWER_HEAVY)):
        assert statistics.fmean(request.prompt for request in part) == pytest.approx(
            mix.prompt, rel=0.05
        )
        assert statistics.fmean(request.output for request in part) == pytest.approx(
            mix.output, rel=0.05
        )
    assert len(early) == pytest.approx(len(late), rel=0.25)  # slow noise


def test_a_part_of_the_prompts_is_cached() -> None:
    requests = LOADS["steady"].requests(1)
    uncached = sum(request.uncached for request in requests) / sum(
        request.prompt for request in requests
    )
    assert uncached == pytest.approx(1 - CHAT.next_turns * CHAT.cached, rel=0.03)
