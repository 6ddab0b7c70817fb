"""Demand now, and when a node that is added now would serve.

In: fresh demand, the nodes, and earlier samples. Out: an `Outlook`, per second.

The mean of a window lags by half a window. If samples come more often than windows, the difference
of two means gives the newest part of the window. It is used if it is significantly higher. Growth
is extrapolated over a node's start time, only upwards, and at most to the double.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from statistics import median

from baton_operator.autoscaling.planner.demand.trend import grown
from baton_operator.autoscaling.planner.memory import Memory
from baton_operator.autoscaling.planner.node_counts import RoleCounts
from baton_operator.autoscaling.planner.records import Demand

LOOKBACK_S = 600.0  # seconds of samples for the usual answer length
JUMP = 1.3  # a jump: at least this many times the requests of before, and
SURE_JUMP = 4.0  # at least this many standard deviations of a Poisson count more
TINY_S = 0.1  # a window is only roughly a multiple of the interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
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


def outlook(
    demand: Demand, prefill: RoleCounts, decode: RoleCounts, memory: Memory, start_s: float
) -> Outlook:
    """`memory` already contains the current sample."""
    jump = jump_of(memory, demand.window_s)
    requests = _times(demand.requests, jump)
    prompt = _times(demand.uncached_prompt_tokens, jump)
    mean = _ratio(demand.uncached_prompt_tokens, demand.requests)
    answer = _usual_answer(memory)
    live = live_of(demand, decode)
    held = float(demand.held or 0)

    def ahead(now: float | None, name: str, window_s: float) -> float | None:
        return grown(now, memory.points(name), start_s, window_s)

    return Outlook(
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
        context=_context(demand, decode),
    )


def _times(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor


def _at_least(known: float | None, expected: float | None) -> float | None:
    """`known`, or `expected` if larger: answers lag behind their prompts, and a full pool produces
    less than clients request."""
    return known if known is None or expected is None else max(known, expected)


def jump_of(memory: Memory, window_s: float) -> float:
    """The ratio of the requests in the window's newest part to the window's mean; 1 unless they
    jumped upwards. With means w over W seconds, D apart: w(t) W - w(t - D) W is the number of
    requests in the newest D seconds minus the number in the D seconds before the window."""
    seen = [(sample.at_s, sample.requests) for sample in memory.seen if sample.requests is not None]
    if len(seen) < 2:
        return 1.0
    (before_s, before), (now_s, now) = seen[-2:]
    apart_s = now_s - before_s
    old = [value for at_s, value in seen if at_s <= now_s - window_s + TINY_S]
    if not old or apart_s >= window_s or now <= 0.0:
        return 1.0
    newest = (old[-1] + (now - before) * window_s / apart_s) * apart_s
    usual = max(old[-1], before) * apart_s
    if newest <= JUMP * usual + SURE_JUMP * sqrt(usual + 1.0):
        return 1.0
    return max(1.0, newest / apart_s / now)


def _usual_answer(memory: Memory) -> float:
    """Median output tokens of a request over many samples. After a jump the newest samples are too
    low, because their answers are not generated yet."""
    since = memory.seen[-1].at_s - LOOKBACK_S
    lengths = [
        sample.output / sample.requests
        for sample in memory.seen
        if sample.at_s >= since and sample.requests and sample.output is not None
    ]
    return median(lengths) if lengths else 0.0


def live_of(demand: Demand, decode: RoleCounts) -> float | None:
    """Requests that generate or wait for room: the larger of the two reports, None without any."""
    running = decode.total(lambda node: node.running)
    waiting = decode.total(lambda node: node.waiting) or 0.0
    known = [float(requests) for requests in (demand.live_requests,) if requests is not None]
    if running is not None:
        known.append(running + waiting)
    return max(known) if known else None


def _context(demand: Demand, decode: RoleCounts) -> float | None:
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


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
