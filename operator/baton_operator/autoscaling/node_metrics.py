"""Gauges, and samples to learn from, from the nodes' reports. Pure.

In: the nodes' reports, each time that the index answers. Out: a `Gauge` per node, which ages if its
node is silent, and a `NodeSample` per node that worked between two answers. Nodes do not report how
busy they are; it is derived from their counters and measured speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from baton_operator.autoscaling.planner.capability import NodeSample
from baton_operator.autoscaling.planner.inputs import Capability
from baton_protocol.store import NodeLoad, NodeReport, Role

# A node's step time is a moving average over about ten steps; after fewer it shows older steps.
ENOUGH_STEPS = 10
# A node measures a batch of one at its start. Until larger batches are measured, this many requests
# are assumed to double a step's time. On every GPU more are needed, so nodes are added too early
# rather than too late.
DOUBLING_BATCH = 64


@dataclass(frozen=True, slots=True)
class Gauge:
    """A node's newest report, received at `at_s`. `busy`: share of the time since the previous
    report in which its engine worked; None for the first report. `fetched`: bytes per second that
    it read from the store in that time. `asleep_at_s`: the last report in which it slept."""

    at_s: float
    report: NodeReport
    busy: float | None = None
    fetched: float | None = None
    asleep_at_s: float | None = None


Gauges = Mapping[str, Gauge]


def add_reports(gauges: Gauges, reports: Sequence[NodeReport], at_s: float) -> dict[str, Gauge]:
    """Nodes without a report keep their last gauge."""
    fresh: dict[str, Gauge] = {
        report.node: _gauge_of(gauges.get(report.node), report, at_s) for report in reports
    }
    return {**gauges, **fresh}


def samples_between(before: Gauges, after: Gauges) -> list[NodeSample]:
    """A sample of each node with two reports of the same start."""
    pairs = ((before.get(name), gauge) for name, gauge in after.items())
    return [
        _sample_of(a.report, b.report) for a, b in pairs if a is not None and _is_same_start(a, b)
    ]


def prior_of(gauges: Gauges) -> Capability | None:
    """The nodes' own measurements; None until prefill and decode speed are both known."""
    reports = [gauge.report for gauge in gauges.values()]
    prefill = _median_of(reports, "prefill", lambda report: report.speeds.prefill_tokens_per_s)
    step_ms = _median_of(reports, "decode", lambda report: report.speeds.decode_step_ms)
    if not prefill or not step_ms:
        return None
    capacity = _median_of(reports, "decode", kv_capacity)
    return Capability(
        prefill_tokens=prefill,
        step_base_s=step_ms / 1e3,
        step_per_seq_s=step_ms / 1e3 / DOUBLING_BATCH,
        kv_capacity=round(capacity) if capacity else None,
    )


def sum_store_reads(gauges: Gauges) -> float | None:
    """Bytes per second that all nodes read; None if no node reports it."""
    rates = [gauge.fetched for gauge in gauges.values() if gauge.fetched is not None]
    return sum(rates) if rates else None


def kv_tokens(report: NodeReport) -> int:
    """KV tokens in use by live requests."""
    load = report.load
    return report.layout.tokens_in(max(0, load.total_blocks - load.free_blocks))


def kv_capacity(report: NodeReport) -> int:
    """The node's KV capacity in tokens."""
    return report.layout.tokens_in(report.load.total_blocks)


def _median_of(
    reports: Sequence[NodeReport], role: Role, value: Callable[[NodeReport], float]
) -> float | None:
    """The median of the role's nodes, or of all nodes if none of the role reports it."""
    measured = [(report.role, value(report)) for report in reports if value(report) > 0.0]
    own = [number for other_role, number in measured if other_role == role]
    return median(own or [number for _, number in measured]) if measured else None


def _tokens_per_row(a: NodeLoad, b: NodeLoad) -> float:
    """How many tokens a sequence got of a step between two reports: more than one with drafts."""
    tokens = b.generated_tokens_total - a.generated_tokens_total
    rows = tokens - (b.accepted_drafts_total - a.accepted_drafts_total)
    return max(1.0, tokens / rows) if rows > 0 else 1.0


def _is_same_start(before: Gauge, after: Gauge) -> bool:
    """Whether `after` is a newer report of the same start of the node."""
    return after.at_s > before.at_s and after.report.epoch == before.report.epoch


def _gauge_of(before: Gauge | None, report: NodeReport, at_s: float) -> Gauge:
    slept = before.asleep_at_s if before is not None else None
    after = Gauge(at_s, report, asleep_at_s=at_s if report.wakes else slept)
    if before is None or not _is_same_start(before, after):
        return after
    load, speeds = report.load, report.speeds
    computed = load.computed_prompt_tokens_total - before.report.load.computed_prompt_tokens_total
    steps = load.engine_steps_total - before.report.load.engine_steps_total
    prompts_s = computed / speeds.prefill_tokens_per_s if speeds.prefill_tokens_per_s else 0.0
    # `decode_step_ms` is the time of steps without prompts; prompts are counted above.
    steps_s = steps * speeds.decode_step_ms / 1e3
    span_s = at_s - before.at_s
    fetched = load.fetched_bytes_total - before.report.load.fetched_bytes_total
    busy = min(1.0, max(0.0, prompts_s, steps_s) / span_s)
    return replace(after, busy=busy, fetched=max(0, fetched) / span_s)


def _sample_of(before: NodeReport, after: NodeReport) -> NodeSample:
    a, b = before.load, after.load
    decoded = b.engine_steps_total - a.engine_steps_total >= ENOUGH_STEPS
    steady = decoded and after.role == "decode" and a.running > 0 and b.running > 0
    computed = b.computed_prompt_tokens_total > a.computed_prompt_tokens_total
    return NodeSample(
        batch=(a.running + b.running) / 2.0 if steady else None,
        kv_tokens=(kv_tokens(before) + kv_tokens(after)) / 2.0 if steady else None,
        step_s=after.speeds.decode_step_ms / 1e3 / _tokens_per_row(a, b) if steady else None,
        prefill_tokens_per_s=after.speeds.prefill_tokens_per_s if computed else None,
        kv_capacity=kv_capacity(after) if after.role == "decode" else None,
    )
