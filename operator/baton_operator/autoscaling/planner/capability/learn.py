"""A node's speeds and capacity, learnt from the nodes' reports. Pure.

In: samples, one per node and answer, and a prior (the benchmark that a node runs at its start).
Out: a `Learnt`, and from it a `Capability`.

Speeds and start times are moving averages of their logarithms; `step_time` fits the time of a
decode step and gives older samples less weight. The prior weighs as much as a few samples. A
sample's deviation is clipped to three mean deviations, so one outlier has little effect and a
lasting change does. Samples that are not positive and plausible are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, log

from baton_operator.autoscaling.planner.capability.step_time import StepFit, StepSample
from baton_operator.autoscaling.planner.records import Capability

PRIOR_WEIGHT = 5.0  # samples
MOST_WEIGHT = 50.0  # the newest sample moves a mean by at least 1/50
FAR = 3.0  # mean deviations
LEAST_DEVIATION = 0.02
SANE = 1e9  # upper bound for seconds, tokens and tokens per second; comparison rejects NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """What one node reported at one time; None for a value that it did not report."""

    batch: float | None = None  # mean number of sequences of the steps that took `step_s`
    kv_tokens: float | None = None
    step_s: float | None = None  # of a decode step
    prefill_tokens_per_s: float | None = None  # while it computed prompts
    start_s: float | None = None  # reported once, when it became ready
    kv_capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """Robust moving mean of a positive quantity's logarithm."""

    level: float
    deviation: float = 0.5
    weight: float = PRIOR_WEIGHT

    def with_sample(self, value: float) -> Mean:
        off = log(value) - self.level
        limit = FAR * self.deviation
        gain = 1.0 / (self.weight + 1.0)
        deviation = self.deviation + gain * (min(abs(off), limit) - self.deviation)
        return Mean(
            level=self.level + gain * max(-limit, min(limit, off)),
            deviation=max(LEAST_DEVIATION, deviation),
            weight=min(MOST_WEIGHT, self.weight + 1.0),
        )

    @property
    def value(self) -> float:
        return exp(self.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    prior: Capability
    prefill: Mean
    start: Mean
    step: StepFit
    kv_capacity: int | None
    samples: int = 0


def begin(prior: Capability) -> Learnt:
    """Only the prior, whose speeds and times must be above zero."""
    return Learnt(
        prior=prior,
        prefill=Mean(log(prior.prefill_tokens)),
        start=Mean(log(max(prior.start_s, 1e-3))),
        step=StepFit.of(prior.step_base_s, prior.step_per_seq_s, prior.step_per_kv_token_s),
        kv_capacity=prior.kv_capacity,
        samples=prior.samples,
    )


def learn(state: Learnt, samples: Iterable[NodeSample]) -> Learnt:
    for sample in samples:
        state = _with_sample(state, sample)
    return state


def capability(state: Learnt) -> Capability:
    base, per_seq, per_kv_token = state.step.coefficients
    return replace(
        state.prior,
        prefill_tokens=state.prefill.value,
        step_base_s=base,
        step_per_seq_s=per_seq,
        step_per_kv_token_s=per_kv_token,
        kv_capacity=state.kv_capacity,
        start_s=state.start.value,
        samples=state.samples,
    )


def _with_sample(state: Learnt, sample: NodeSample) -> Learnt:
    prefill, start, step, taken = state.prefill, state.start, state.step, state.samples
    if _positive(sample.prefill_tokens_per_s):
        prefill = prefill.with_sample(sample.prefill_tokens_per_s or 0.0)
    if _positive(sample.start_s):
        start = start.with_sample(sample.start_s or 0.0)
    if _positive(sample.step_s) and _positive(sample.batch) and _known(sample.kv_tokens):
        step = step.with_sample(
            StepSample(sample.batch or 0.0, sample.kv_tokens or 0.0, sample.step_s or 0.0)
        )
        taken += 1
    capacity = sample.kv_capacity if _positive(sample.kv_capacity) else state.kv_capacity
    return replace(
        state, prefill=prefill, start=start, step=step, samples=taken, kv_capacity=capacity
    )


def _known(value: float | None) -> bool:
    return value is not None and 0.0 <= value <= SANE


def _positive(value: float | None) -> bool:
    return value is not None and 1.0 / SANE <= value <= SANE
