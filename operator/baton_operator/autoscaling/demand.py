"""The demand of clients, from the routers' counters. Pure.

In: all routers' reports, each time that the index answers. Out: a `ReportHistory`, and from it the
`Demand` of the last window. A counter starts at 0 when its router starts, and the report contains
the router's uptime. So a new router's counters count in full if it started since the last answer,
and not at all if it is older. An answer in which a router is missing or stale is ignored, and the
known data ages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton_operator.autoscaling.planner.inputs import Demand
from baton_protocol.store import LATENCY_BOUNDS_S, RouterReport

WINDOW_S = 60.0
LEAST_WINDOW_S = 10.0  # a rate over a shorter window is unreliable
BIRTH_S = 5.0  # maximum age of a report in an answer
LATE_S = 3.0  # routers report once per second; a report this late comes from a silent router


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterGrowth:
    """The increase of all counters over the `span_s` before `at_s`."""

    at_s: float
    span_s: float
    requests: int = 0
    prompt: int = 0
    uncached: int = 0
    output: int = 0
    ttft: tuple[int, ...] = ()
    itl: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHistory:
    """`reports` are the newest complete set, by router, received at `at_s`."""

    at_s: float | None = None
    reports: Mapping[str, RouterReport] = field(default_factory=dict)
    growths: tuple[CounterGrowth, ...] = ()


def add_reports(
    history: ReportHistory, reports: Sequence[RouterReport], routers: int, at_s: float
) -> ReportHistory:
    """Add an answer. `routers`: number of ready routers."""
    fresh = [report for report in reports if _is_fresh(history, report, at_s)]
    if not fresh or len(fresh) < routers:
        return history
    now = {report.router: report for report in fresh}
    if history.at_s is None or not 0.0 <= at_s - history.at_s <= WINDOW_S:
        return ReportHistory(at_s=at_s, reports=now)
    if at_s == history.at_s:
        return replace(history, reports=now)
    span_s = at_s - history.at_s
    pairs = [(_report_before(history, report, span_s), report) for report in fresh]
    kept = tuple(growth for growth in history.growths if growth.at_s > at_s - 2 * WINDOW_S)
    return ReportHistory(at_s=at_s, reports=now, growths=(*kept, _growth_of(pairs, at_s, span_s)))


def demand_of(
    history: ReportHistory,
    now_s: float,
    share: float,
    *,
    longest_s: float = WINDOW_S,
    asleep: bool = False,
) -> Demand | None:
    """The demand in the last window of `longest_s`, or up to one span more. `ttft_s` and `itl_s`
    are the percentile `share` of the measured times. None until routers have reported. Rates are
    None before LEAST_WINDOW_S. In a pool that is `asleep` the start of a router is not client
    activity.

    `live_requests` stays unset: routers count a request from its placement, even while it waits for
    a prefill node. The nodes' own numbers are more precise.
    """
    if history.at_s is None:
        return None
    reports = history.reports.values()
    idle_s = [
        report.idle_s for report in reports if not asleep or report.requests_total or report.held
    ]
    growths = _newest_growths(history, longest_s)
    window_s = sum(growth.span_s for growth in growths)
    demand = Demand(
        window_s=max(window_s, LEAST_WINDOW_S),
        age_s=max(0.0, now_s - history.at_s),
        held=sum(report.held for report in reports),
        idle_s=min(idle_s, default=None),
    )
    if window_s < LEAST_WINDOW_S:
        return demand
    return replace(
        demand,
        requests=sum(growth.requests for growth in growths) / window_s,
        prompt_tokens=sum(growth.prompt for growth in growths) / window_s,
        uncached_prompt_tokens=sum(growth.uncached for growth in growths) / window_s,
        output_tokens=sum(growth.output for growth in growths) / window_s,
        ttft_s=percentile(_add_counts([growth.ttft for growth in growths]), share),
        itl_s=percentile(_add_counts([growth.itl for growth in growths]), share),
    )


def _is_fresh(history: ReportHistory, report: RouterReport, at_s: float) -> bool:
    """Whether the router's uptime advanced since the last answer. A report stays in the index for
    some seconds after its router's end, with unchanged counters."""
    last = history.reports.get(report.router)
    if last is None or history.at_s is None or at_s == history.at_s:
        return True
    passed_s = report.uptime_s - last.uptime_s
    return passed_s > 0.0 and passed_s >= at_s - history.at_s - LATE_S


def _newest_growths(history: ReportHistory, longest_s: float) -> tuple[CounterGrowth, ...]:
    """The newest growths that together cover `longest_s`, and at least LEAST_WINDOW_S."""
    newest: list[CounterGrowth] = []
    for growth in reversed(history.growths):
        if sum(other.span_s for other in newest) >= max(longest_s, LEAST_WINDOW_S):
            break
        newest.append(growth)
    return tuple(newest)


def _report_before(history: ReportHistory, report: RouterReport, span_s: float) -> RouterReport:
    """The report from which the router's growth is counted."""
    last = history.reports.get(report.router)
    if last is not None:
        return last
    young = report.uptime_s <= span_s + BIRTH_S
    return RouterReport(router=report.router, uptime_s=0.0) if young else report


def _growth_of(
    pairs: Sequence[tuple[RouterReport, RouterReport]], at_s: float, span_s: float
) -> CounterGrowth:
    return CounterGrowth(
        at_s=at_s,
        span_s=span_s,
        requests=sum(max(0, b.requests_total - a.requests_total) for a, b in pairs),
        prompt=sum(max(0, b.prompt_tokens_total - a.prompt_tokens_total) for a, b in pairs),
        uncached=sum(max(0, b.uncached_tokens_total - a.uncached_tokens_total) for a, b in pairs),
        output=sum(max(0, b.output_tokens_total - a.output_tokens_total) for a, b in pairs),
        ttft=_add_counts([_subtract_counts(b.ttft_counts, a.ttft_counts) for a, b in pairs]),
        itl=_add_counts([_subtract_counts(b.itl_counts, a.itl_counts) for a, b in pairs]),
    )


def _subtract_counts(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    padded = (*before, *(0 for _ in after))
    return tuple(max(0, b - a) for a, b in zip(padded, after, strict=False))


def _add_counts(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max(map(len, counts), default=0)
    return tuple(sum(row[index] for row in counts if index < len(row)) for index in range(longest))


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Seconds, from a histogram with counts per bucket as in a RouterReport: linear interpolation,
    as if times were spread evenly within a bucket. Times beyond all bounds count as the last bound.
    None if nothing was counted."""
    left = share * sum(counts)
    if left <= 0.0:
        return None
    low = 0.0
    for high, count in zip(LATENCY_BOUNDS_S, counts, strict=False):
        if count and left <= count:
            return low + (high - low) * left / count
        left -= count
        low = high
    return low
