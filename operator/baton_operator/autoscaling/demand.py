"""The demand of clients, from the routers' counters. Pure.

In: all routers' reports, each time that the index answers. Out: a `History`, and from it the
`Demand` of the last window. A counter starts at 0 when its router starts, and the report contains
the router's uptime. So a new router's counters count in full if it started since the last answer,
and not at all if it is older. An answer in which a router is missing or stale is ignored, and the
known data ages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton_operator.autoscaling.latency import percentile
from baton_operator.autoscaling.planner.records import Demand
from baton_protocol.store import RouterReport

WINDOW_S = 60.0
LEAST_WINDOW_S = 10.0  # a rate over a shorter window is unreliable
BIRTH_S = 5.0  # maximum age of a report in an answer
LATE_S = 3.0  # routers report once per second; a report this late comes from a silent router


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
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
class History:
    """`reports` are the newest complete set, by router, received at `at_s`."""

    at_s: float | None = None
    reports: Mapping[str, RouterReport] = field(default_factory=dict)
    growths: tuple[Growth, ...] = ()


def updated(
    history: History, reports: Sequence[RouterReport], routers: int, at_s: float
) -> History:
    """Add an answer. `routers`: number of ready routers."""
    fresh = [growth for growth in reports if _is_fresh(history, growth, at_s)]
    if not fresh or len(fresh) < routers:
        return history
    now = {report.router: report for report in fresh}
    if history.at_s is None or not 0.0 <= at_s - history.at_s <= WINDOW_S:
        return History(at_s=at_s, reports=now)
    if at_s == history.at_s:
        return replace(history, reports=now)
    span_s = at_s - history.at_s
    pairs = [(_before(history, report, span_s), report) for report in fresh]
    kept = tuple(growth for growth in history.growths if growth.at_s > at_s - 2 * WINDOW_S)
    return History(at_s=at_s, reports=now, growths=(*kept, _growth(pairs, at_s, span_s)))


def demand_of(
    history: History,
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
    idle = [one.idle_s for one in reports if not asleep or one.requests_total or one.held]
    growths = _window(history, longest_s)
    window_s = sum(one.span_s for one in growths)
    demand = Demand(
        window_s=max(window_s, LEAST_WINDOW_S),
        age_s=max(0.0, now_s - history.at_s),
        held=sum(report.held for report in reports),
        idle_s=min(idle, default=None),
    )
    if window_s < LEAST_WINDOW_S:
        return demand
    return replace(
        demand,
        requests=sum(one.requests for one in growths) / window_s,
        prompt_tokens=sum(one.prompt for one in growths) / window_s,
        uncached_prompt_tokens=sum(one.uncached for one in growths) / window_s,
        output_tokens=sum(one.output for one in growths) / window_s,
        ttft_s=percentile(_total([one.ttft for one in growths]), share),
        itl_s=percentile(_total([one.itl for one in growths]), share),
    )


def _is_fresh(history: History, report: RouterReport, at_s: float) -> bool:
    """Whether the router's uptime advanced since the last answer. A report stays in the index for
    some seconds after its router's end, with unchanged counters."""
    known = history.reports.get(report.router)
    if known is None or history.at_s is None or at_s == history.at_s:
        return True
    passed_s = report.uptime_s - known.uptime_s
    return passed_s > 0.0 and passed_s >= at_s - history.at_s - LATE_S


def _window(history: History, longest_s: float) -> tuple[Growth, ...]:
    """The newest growths that together cover `longest_s`, and at least LEAST_WINDOW_S."""
    found: list[Growth] = []
    for growth in reversed(history.growths):
        if sum(other.span_s for other in found) >= max(longest_s, LEAST_WINDOW_S):
            break
        found.append(growth)
    return tuple(found)


def _before(history: History, report: RouterReport, span_s: float) -> RouterReport:
    """The report from which the router's growth is counted."""
    known = history.reports.get(report.router)
    if known is not None:
        return known
    young = report.uptime_s <= span_s + BIRTH_S
    return RouterReport(router=report.router, uptime_s=0.0) if young else report


def _growth(
    pairs: Sequence[tuple[RouterReport, RouterReport]], at_s: float, span_s: float
) -> Growth:
    return Growth(
        at_s=at_s,
        span_s=span_s,
        requests=sum(max(0, b.requests_total - a.requests_total) for a, b in pairs),
        prompt=sum(max(0, b.prompt_tokens_total - a.prompt_tokens_total) for a, b in pairs),
        uncached=sum(max(0, b.uncached_tokens_total - a.uncached_tokens_total) for a, b in pairs),
        output=sum(max(0, b.output_tokens_total - a.output_tokens_total) for a, b in pairs),
        ttft=_total([_minus(b.ttft_counts, a.ttft_counts) for a, b in pairs]),
        itl=_total([_minus(b.itl_counts, a.itl_counts) for a, b in pairs]),
    )


def _minus(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    known = (*before, *(0 for _ in after))
    return tuple(max(0, b - a) for a, b in zip(known, after, strict=False))


def _total(counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max(map(len, counts), default=0)
    return tuple(sum(row[index] for row in counts if index < len(row)) for index in range(longest))
