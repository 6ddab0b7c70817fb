"""Computes the figures of a load on a server, under the names of vLLM's bench.

In: Outcomes. Out: a flat record, the source of the JSON and the text report. Times are in
milliseconds if the name says so, else in seconds. Failed requests count only in `failed` and
`failures`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton_cli.bench.metrics import percentile
from baton_cli.bench.stream import RequestOutcome
from baton_cli.errors import UsageError

Json = dict[str, Any]

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(frozen=True)
class MetricChoice:
    """The metrics whose percentiles are reported, and a good request's goals (ms by metric)."""

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goals: Mapping[str, float]

    @classmethod
    def read(
        cls, metrics: Sequence[str], percentiles: Sequence[str], goodput: Sequence[str]
    ) -> MetricChoice:
        """Parse the flags; raise UsageError for an unknown metric or an invalid number."""
        for name in metrics:
            _check_metric("--percentile-metrics", name, name)
        return cls(
            tuple(dict.fromkeys(metrics)),
            tuple(_percent(text) for text in percentiles),
            dict(_goal(text) for text in goodput),
        )


def figures(outcomes: Sequence[RequestOutcome], duration: float, wanted: MetricChoice) -> Json:
    """All figures of one run."""
    completed = [outcome for outcome in outcomes if not outcome.error]
    prompt, output = (
        sum(outcome.prompt_tokens for outcome in completed),
        sum(outcome.output_tokens for outcome in completed),
    )
    cached = [outcome.cached for outcome in completed if outcome.cached is not None]
    report: Json = {
        "duration": duration,
        "completed": len(completed),
        "failed": len(outcomes) - len(completed),
        "failures": dict(
            Counter(outcome.error for outcome in outcomes if outcome.error).most_common()
        ),
        "short": sum(outcome.output_tokens < outcome.requested_tokens for outcome in completed),
        "total_input_tokens": prompt,
        "total_cached_tokens": sum(cached) if cached else None,
        "total_output_tokens": output,
        "request_throughput": len(completed) / duration,
        "request_goodput": None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_concurrent_requests": most_at_once(outcomes),
    }
    if wanted.goals:
        good_count = sum(is_good(outcome, wanted.goals) for outcome in completed)
        report["request_goodput"] = good_count / duration
        report["good_requests"] = good_count
    for name in METRICS:
        report |= _spread(name, samples(completed, name), wanted)
    return report


def samples(outcomes: Sequence[RequestOutcome], metric: str) -> list[float]:
    """A metric's values in milliseconds: one per gap for itl, else at most one per request."""
    if metric == "itl":
        return [1e3 * gap for outcome in outcomes for gap in outcome.gaps]
    if metric == "tpot":
        return [1e3 * outcome.tpot for outcome in outcomes if outcome.tpot is not None]
    return [1e3 * (outcome.ttft if metric == "ttft" else outcome.latency) for outcome in outcomes]


def is_good(outcome: RequestOutcome, goals: Mapping[str, float]) -> bool:
    """Whether the request succeeded and all its samples meet the goals. A request with a single
    token has no tpot and no itl, and meets these goals."""
    return not outcome.error and all(
        value <= most for name, most in goals.items() for value in samples([outcome], name)
    )


def most_at_once(outcomes: Sequence[RequestOutcome]) -> int:
    """The most successful requests in flight at once. Requests do not overlap if one ends at the
    moment when the other starts."""
    good = [outcome for outcome in outcomes if not outcome.error]
    turns = sorted(
        [(outcome.start, 1) for outcome in good]
        + [(outcome.start + outcome.latency, -1) for outcome in good]
    )
    running = most = 0
    for _, turn in turns:
        running += turn
        most = max(most, running)
    return most


def details_of(outcomes: Sequence[RequestOutcome]) -> Json:
    """Each request's own figures in the order of the requests, in seconds."""
    return {
        "start_times": [outcome.start for outcome in outcomes],
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.gaps for outcome in outcomes],
        "e2els": [outcome.latency for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def _spread(name: str, values: list[float], wanted: MetricChoice) -> Json:
    """Mean, median, standard deviation and percentiles; all are None if there are no values."""
    ordered = sorted(values)
    figures: Json = {
        f"mean_{name}_ms": statistics.fmean(ordered) if ordered else None,
        f"median_{name}_ms": percentile(ordered, 50) if ordered else None,
        f"std_{name}_ms": statistics.pstdev(ordered) if ordered else None,
    }
    if name in wanted.metrics:
        for percent in wanted.percentiles:
            value = percentile(ordered, percent) if ordered else None
            figures[f"p{percent:g}_{name}_ms"] = value
    return figures


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise UsageError(f"--metric-percentiles {text}: give numbers from 0 to 100")
    return value


def _goal(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    _check_metric("--goodput", name, text)
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise UsageError(f"--goodput {text}: give milliseconds, as in {name}:500")
    return name, value


def _check_metric(option: str, name: str, given: str) -> None:
    if name not in METRICS:
        raise UsageError(f"{option} {given}: {name!r} is not one of {', '.join(METRICS)}")
