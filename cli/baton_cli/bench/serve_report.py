"""Formats the figures of a load on a server as vLLM's bench does: one figure per line.

In: the figures. Out: text.
"""

from __future__ import annotations

from typing import Any

from baton_cli.bench.serve_metrics import METRICS, Json, MetricChoice

WIDTH = 50
LABEL_WIDTH = 40


def serve_text(report: Json, wanted: MetricChoice) -> str:
    """Format the report. Failures come last, where readers look first."""
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        _line("Successful requests:", report["completed"]),
        _line("Failed requests:", report["failed"]),
        _line("Maximum request concurrency:", report["max_concurrency"]),
        _line("Request rate configured (RPS):", report["request_rate"]),
        _line("Benchmark duration (s):", report["duration"]),
        _line("Total input tokens:", report["total_input_tokens"]),
        _line("Of these from a cache:", report["total_cached_tokens"]),
        _line("Total generated tokens:", report["total_output_tokens"]),
        _line("Request throughput (req/s):", report["request_throughput"]),
        _line("Request goodput (req/s):", report["request_goodput"]),
        _line("Output token throughput (tok/s):", report["output_throughput"]),
        _line("Total token throughput (tok/s):", report["total_token_throughput"]),
        _line("Peak concurrent requests:", report["max_concurrent_requests"]),
    ]
    for name in wanted.metrics:
        lines += _metric_lines(name, report, wanted)
    lines.append("=" * WIDTH)
    if report["short"]:
        lines.append(
            f"{report['short']} answers were shorter than requested; --ignore-eos makes every "
            "answer full length"
        )
    lines += [f"failed {count} times: {reason}" for reason, count in report["failures"].items()]
    return "\n".join(line for line in lines if line)


def _metric_lines(name: str, report: Json, wanted: MetricChoice) -> list[str]:
    short = name.upper()
    columns = [("Mean", "mean"), ("Median", "median")]
    columns += [(f"P{percentile:g}", f"p{percentile:g}") for percentile in wanted.percentiles]
    return [
        METRICS[name].center(WIDTH, "-"),
        *(_line(f"{label} {short} (ms):", report[f"{key}_{name}_ms"]) for label, key in columns),
    ]


def _line(label: str, value: Any) -> str:
    """Format one figure; "" if it is None."""
    if value is None:
        return ""
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:{LABEL_WIDTH}}{shown}"
