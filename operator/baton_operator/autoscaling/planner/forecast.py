"""The load now, and when a node that is added now would serve.

In: fresh demand, the nodes, and earlier samples. Out: a `Forecast`, per second.

Jumps: the mean of a window lags by half a window. If samples come more often than windows, the
difference of two means gives the newest part of the window. It is used if it is significantly
higher.

Trends: growth that is beyond doubt is extrapolated over a node's start time, only upwards, and at
most to the double. A straight line is fitted by least squares through the last minutes, and through
half of them, since growth may just have begun; through fewer points only if it is surer. A trend is
a guess; the next decision corrects its error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from baton_operator.autoscaling.planner.inputs import Demand, RoleNodes
from baton_operator.autoscaling.planner.memory import PlannerMemory

LOOKBACK_S = 600.0  # seconds of samples for the usual answer length

JUMP = 1.3  # a jump: at least this many times the requests of before, and
SURE_JUMP = 4.0  # at least this many standard deviations of a Poisson count more
TINY_S = 0.1  # a window is only roughly a multiple of the interval

TREND_S = 240.0  # seconds over which a trend is fitted
FEWEST = 6  # samples that make a trend
SURE = 4.0  # standard errors that a slope is above zero
SURE_EARLY = 5.0  # the same for half of the time
COVERED = 0.8  # share of the time that samples must cover
MOST_GROWTH = 2.0

Points = Sequence[tuple[float, float]]  # (time, value), the newest last


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Rates in tokens per second; `*_ahead` are those at the end of the start time. `live`:
    requests that generate or wait to. `answer`: the usual length in tokens. `context`: mean KV
    tokens of a live request."""

    prompt: float | None
    prompt_ahead: float | None
    prompt_mean: float | None  # uncached tokens of one request
    queued: float  # prompt tokens in queues
    output: float | None
    output_ahead: float | None
    live: float | None
    live_ahead: float | None
    answer: float
    context: float | None


def forecast_load(
    demand: Demand, prefill: RoleNodes, decode: RoleNodes, memory: PlannerMemory, start_s: float
) -> Forecast:
    """`memory` already contains the current sample."""
    jump = jump_factor(memory, demand.window_s)
    requests = _times(demand.requests, jump)
    prompt = _times(demand.uncached_prompt_tokens, jump)
    mean = _ratio(demand.uncached_prompt_tokens, demand.requests)
    answer = _usual_answer(memory)
    live = live_requests(demand, decode)
    held = float(demand.held or 0)

    def ahead(now: float | None, name: str, window_s: float) -> float | None:
        return extrapolate(now, memory.demand_points(name), start_s, window_s)

    return Forecast(
        prompt=prompt,
        prompt_ahead=ahead(prompt, "prompt", demand.window_s),
        prompt_mean=mean,
        queued=(prefill.total(lambda node: node.queued_tokens) or 0.0) + held * (mean or 0.0),
        output=_at_least(demand.output_tokens, _times(requests, answer)),
        output_ahead=_at_least(
            ahead(demand.output_tokens, "output", demand.window_s),
            _times(ahead(requests, "requests", demand.window_s), answer),
        ),
        live=live,
        live_ahead=ahead(live, "live", 0.0),
        answer=answer,
        context=_mean_context(demand, decode),
    )


def jump_factor(memory: PlannerMemory, window_s: float) -> float:
    """The ratio of the requests in the window's newest part to the window's mean; 1 unless they
    jumped upwards. With means w over W seconds, D apart: w(t) W - w(t - D) W is the number of
    requests in the newest D seconds minus the number in the D seconds before the window."""
    points = memory.demand_points("requests")
    if len(points) < 2:
        return 1.0
    (before_s, before), (now_s, now) = points[-2:]
    apart_s = now_s - before_s
    old = [value for at_s, value in points if at_s <= now_s - window_s + TINY_S]
    if not old or apart_s >= window_s or now <= 0.0:
        return 1.0
    newest = (old[-1] + (now - before) * window_s / apart_s) * apart_s
    usual = max(old[-1], before) * apart_s
    if newest <= JUMP * usual + SURE_JUMP * sqrt(usual + 1.0):
        return 1.0
    return max(1.0, newest / apart_s / now)


def extrapolate(now: float | None, points: Points, start_s: float, window_s: float) -> float | None:
    """The rate in `start_s`. Each of the points is the mean of the `window_s` before its time, and
    so of the window's middle."""
    if now is None or len(points) < FEWEST:
        return now
    slope = max(
        _sure_slope(points, TREND_S, window_s, SURE),
        _sure_slope(points, TREND_S / 2.0, window_s, SURE_EARLY),
    )
    return min(now + slope * (start_s + window_s / 2.0), now * MOST_GROWTH)


def _sure_slope(points: Points, over_s: float, window_s: float, sure: float) -> float:
    """The slope; 0 if it is not significant or the samples cover too little time, because a new
    operator sees a pool fill. Samples that are closer than their windows saw the same requests, so
    fewer of them count for the slope's error."""
    recent = [point for point in points if point[0] >= points[-1][0] - over_s]
    covered_s = recent[-1][0] - recent[0][0]
    if covered_s < COVERED * over_s:
        return 0.0
    slope, error = fit_slope(recent)
    error *= sqrt(max(1.0, window_s * (len(recent) - 1) / covered_s))
    # After a jump the whole still has a slope; its newer half has none.
    still, _ = fit_slope(recent[-max(FEWEST, len(recent) // 2) :])
    return slope if slope > sure * error and still >= slope / 2.0 else 0.0


def fit_slope(points: Points) -> tuple[float, float]:
    """Slope and its standard error; (0, 0) where there are too few points or they are of one
    time."""
    count = len(points)
    if count < FEWEST:
        return 0.0, 0.0
    mean_t = sum(t for t, _ in points) / count
    mean_v = sum(v for _, v in points) / count
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    if spread <= 0.0:
        return 0.0, 0.0
    slope = sum((t - mean_t) * (v - mean_v) for t, v in points) / spread
    rest = sum((v - mean_v - slope * (t - mean_t)) ** 2 for t, v in points)
    return slope, sqrt(rest / (count - 2) / spread)


def live_requests(demand: Demand, decode: RoleNodes) -> float | None:
    """Requests that generate or wait for room: the larger of the two reports, None without any."""
    running = decode.total(lambda node: node.running)
    waiting = decode.total(lambda node: node.waiting) or 0.0
    reports = [float(requests) for requests in (demand.live_requests,) if requests is not None]
    if running is not None:
        reports.append(running + waiting)
    return max(reports) if reports else None


def _usual_answer(memory: PlannerMemory) -> float:
    """Median output tokens of a request over many samples. After a jump the newest samples are too
    low, because their answers are not generated yet."""
    since_s = memory.demand[-1].at_s - LOOKBACK_S
    lengths = [
        sample.output / sample.requests
        for sample in memory.demand
        if sample.at_s >= since_s and sample.requests and sample.output is not None
    ]
    return median(lengths) if lengths else 0.0


def _mean_context(demand: Demand, decode: RoleNodes) -> float | None:
    """Mean KV tokens of a running request. Without a report, estimate them in the middle of an
    answer: the mean prompt plus half of the mean answer."""
    running = decode.total(lambda node: node.running)
    kv = decode.total(lambda node: node.kv_tokens)
    if running and kv:
        return kv / running
    if demand.live_requests and demand.live_kv_tokens:
        return demand.live_kv_tokens / demand.live_requests
    prompt = _ratio(demand.prompt_tokens, demand.requests)
    answer = _ratio(demand.output_tokens, demand.requests)
    return None if prompt is None else prompt + (answer or 0.0) / 2.0


def _at_least(measured: float | None, expected: float | None) -> float | None:
    """`measured`, or `expected` if larger: answers lag behind their prompts, and a full pool
    produces less than clients request."""
    return measured if measured is None or expected is None else max(measured, expected)


def _times(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
