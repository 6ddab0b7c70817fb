"""What clients ask of a pool, from its routers' counters. Pure.

In: all routers' reports, each time that the index answers. Out: a `History`, and from it a `Demand`
of the last window. A counter begins at 0 with its router's start, which the report names: so a
start that was not seen before brings what it counted since, if it is as young as that, and nothing
if it is older. An answer in which a router is missing, or says what it said before, is no
observation: what is known grows old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton_operator.autoscaling.latency import percentile
from baton_operator.autoscaling.planner.records import Demand
from baton_protocol.store import RouterReport

WINDOW_S = 60.0
LEAST_WINDOW_S = 10.0  # of less a rate says nothing
BIRTH_S = 5.0  # a report may be so much older than the answer that has it
LATE_S = 3.0  # routers tell once per second: who is so late has fallen silent since


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Of all counters, over the `span_s` before `at_s`."""

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
    """`reports` are the newest complete ones, by router, heard at `at_s`."""

    at_s: float | None = None
    reports: Mapping[str, RouterReport] = field(default_factory=dict)
    growths: tuple[Growth, ...] = ()


def heard(history: History, reports: Sequence[RouterReport], routers: int, at_s: float) -> History:
    """`routers` is how many are ready, each worker of a pod one, and so have something to say."""
    fresh = [one for one in reports if _is_fresh(history, one, at_s)]
    if not fresh or len(fresh) < routers:
        return history
    now = {report.router: report for report in fresh}
    if history.at_s is None or not 0.0 <= at_s - history.at_s <= WINDOW_S:
        return History(at_s=at_s, reports=now)
    if at_s == history.at_s:
        return replace(history, reports=now)
    span_s = at_s - history.at_s
    pairs = [(_before(history, report, span_s), report) for report in fresh]
    kept = tuple(one for one in history.growths if one.at_s > at_s - 2 * WINDOW_S)
    return History(at_s=at_s, reports=now, growths=(*kept, _growth(pairs, at_s, span_s)))


def demand_of(
    history: History,
    now_s: float,
    share: float,
    *,
    longest_s: float = WINDOW_S,
    asleep: bool = False,
) -> Demand | None:
    """`share` of the measured times are within `ttft_s` and `itl_s`; the window is `longest_s`, up
    to one span more. None while no routers were heard. Rates are None before LEAST_WINDOW_S. Of a
    pool that is `asleep` a router's mere start is no word of a client's.

    Routers count a request as live from its placement on, also while it waits for a prefill node;
    the nodes know better who generates, and so say it.
    """
    if history.at_s is None:
        return None
    reports = history.reports.values()
    idle = [one.idle_s for one in reports if not asleep or one.requests_total or one.held]
    seen = _window(history, longest_s)
    window_s = sum(one.span_s for one in seen)
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
        requests=sum(one.requests for one in seen) / window_s,
        prompt_tokens=sum(one.prompt for one in seen) / window_s,
        uncached_prompt_tokens=sum(one.uncached for one in seen) / window_s,
        output_tokens=sum(one.output for one in seen) / window_s,
        ttft_s=percentile(_total([one.ttft for one in seen]), share),
        itl_s=percentile(_total([one.itl for one in seen]), share),
    )


def _is_fresh(history: History, report: RouterReport, at_s: float) -> bool:
    """Its router's clock went on since it was heard before. A report outlives its router's last
    word by some seconds, in which its counters stand still."""
    known = history.reports.get(report.router)
    if known is None or history.at_s is None or at_s == history.at_s:
        return True
    passed_s = report.uptime_s - known.uptime_s
    return passed_s > 0.0 and passed_s >= at_s - history.at_s - LATE_S


def _window(history: History, longest_s: float) -> tuple[Growth, ...]:
    """The newest growths that together are as long, and long enough to say anything."""
    found: list[Growth] = []
    for one in reversed(history.growths):
        if sum(other.span_s for other in found) >= max(longest_s, LEAST_WINDOW_S):
            break
        found.append(one)
    return tuple(found)


def _before(history: History, report: RouterReport, span_s: float) -> RouterReport:
    """What its growth counts from."""
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
    return tuple(sum(one[at] for one in counts if at < len(one)) for at in range(longest))
