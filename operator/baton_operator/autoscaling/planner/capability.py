"""What one node can do, learnt from the nodes' reports.

In: samples, one per node and answer, and a prior (the benchmark that a node runs at its start).
Out: a `Learnt`, and from it a `Capability`.

Speeds and start times are moving averages of their logarithms. The time of a decode step, `base +
batch per_seq + kv per_kv_token`, is a least-squares fit in which older samples fade. The prior
weighs as much as a few samples. A sample's deviation is clipped to three mean deviations, so one
outlier has little effect and a lasting change does. Samples that are not positive and plausible are
ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, log
from typing import NamedTuple

from baton_operator.autoscaling.planner.inputs import Capability

PRIOR_WEIGHT = 5.0  # samples
MOST_WEIGHT = 50.0  # the newest sample moves a mean by at least 1/50
FAR = 3.0  # mean deviations
LEAST_DEVIATION = 0.02  # of a logarithm, or as a share of the expected time
SANE = 1e9  # upper bound for seconds, tokens and tokens per second; comparison rejects NaN

# The fit of a decode step.
Three = tuple[float, float, float]
FADE = 0.995  # per sample: about the newest 200 count
RIDGE = 1e-4  # of the samples' weight
LEAST_SCALE = 1e-9
LEAST_BASE_S = 1e-6  # a step takes time
# Which of the three coefficients may differ from zero: one, two or all of them.
CHOICES = tuple(chosen for count in (1, 2, 3) for chosen in combinations(range(3), count))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """What one node reported at one time; None for a value that it did not report."""

    batch: float | None = None  # mean number of sequences of the steps that took `step_s`
    kv_tokens: float | None = None
    step_s: float | None = None  # of a decode step, by the tokens that a sequence got of it
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

    @staticmethod
    def from_prior(prior: Capability) -> Learnt:
        """Speeds and times of the prior must be above zero."""
        return Learnt(
            prior=prior,
            prefill=Mean(log(prior.prefill_tokens)),
            start=Mean(log(max(prior.start_s, 1e-3))),
            step=StepFit.of(prior.step_base_s, prior.step_per_seq_s, prior.step_per_kv_token_s),
            kv_capacity=prior.kv_capacity,
            samples=prior.samples,
        )

    def with_samples(self, samples: Iterable[NodeSample]) -> Learnt:
        learnt = self
        for sample in samples:
            learnt = _with_sample(learnt, sample)
        return learnt

    @property
    def capability(self) -> Capability:
        base, per_seq, per_kv_token = self.step.coefficients
        return replace(
            self.prior,
            prefill_tokens=self.prefill.value,
            step_base_s=base,
            step_per_seq_s=per_seq,
            step_per_kv_token_s=per_kv_token,
            kv_capacity=self.kv_capacity,
            start_s=self.start.value,
            samples=self.samples,
        )


def _with_sample(learnt: Learnt, sample: NodeSample) -> Learnt:
    prefill, start, step, count = learnt.prefill, learnt.start, learnt.step, learnt.samples
    if _is_positive(sample.prefill_tokens_per_s):
        prefill = prefill.with_sample(sample.prefill_tokens_per_s or 0.0)
    if _is_positive(sample.start_s):
        start = start.with_sample(sample.start_s or 0.0)
    if (
        _is_positive(sample.step_s)
        and _is_positive(sample.batch)
        and _is_plausible(sample.kv_tokens)
    ):
        step = step.with_sample(
            StepSample(sample.batch or 0.0, sample.kv_tokens or 0.0, sample.step_s or 0.0)
        )
        count += 1
    capacity = sample.kv_capacity if _is_positive(sample.kv_capacity) else learnt.kv_capacity
    return replace(
        learnt, prefill=prefill, start=start, step=step, samples=count, kv_capacity=capacity
    )


def _is_plausible(value: float | None) -> bool:
    return value is not None and 0.0 <= value <= SANE


def _is_positive(value: float | None) -> bool:
    return value is not None and 1.0 / SANE <= value <= SANE


class StepSample(NamedTuple):
    batch: float
    kv_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """The fit of a decode step's time. `products` are the weighted sums of x x', `answers` of x y,
    x = (1, batch, kv). Each coefficient is scaled by the mean batch and KV, so that the prior, and
    the small part of it that never fades, pull equally at all three. If all batches of a pool are
    alike, the coefficients cannot be told apart and stay near their previous values."""

    prior: Three
    coefficients: Three
    products: tuple[Three, Three, Three] = ((0.0,) * 3,) * 3
    answers: Three = (0.0, 0.0, 0.0)
    prior_weight: float = PRIOR_WEIGHT
    deviation: float = 0.5  # mean, as a share of the expected time

    @staticmethod
    def of(base_s: float, per_seq_s: float, per_kv_token_s: float) -> StepFit:
        prior = (max(base_s, LEAST_BASE_S), per_seq_s, per_kv_token_s)
        return StepFit(prior=prior, coefficients=prior)

    def with_sample(self, sample: StepSample) -> StepFit:
        x = (1.0, sample.batch, sample.kv_tokens)
        expected = sum(factor * value for factor, value in zip(self.coefficients, x, strict=True))
        off = sample.step_s / expected - 1.0
        limit = FAR * self.deviation
        y = expected * max(0.1, 1.0 + max(-limit, min(limit, off)))
        rate = max(0.02, 1.0 / (1.0 + self.products[0][0]))
        deviation = self.deviation + rate * (min(abs(off), limit) - self.deviation)
        rows = [tuple(FADE * self.products[i][j] + x[i] * x[j] for j in range(3)) for i in range(3)]
        updated = replace(
            self,
            products=(_three(rows[0]), _three(rows[1]), _three(rows[2])),
            answers=_three([FADE * self.answers[i] + x[i] * y for i in range(3)]),
            prior_weight=self.prior_weight * FADE,
            deviation=max(LEAST_DEVIATION, deviation),
        )
        return replace(updated, coefficients=_least_squares(updated))


def _least_squares(fit: StepFit) -> Three:
    """The coefficients with the least squares, none of them below zero: the best of the solutions
    in which a chosen part of the coefficients may differ from zero (`CHOICES`)."""
    scale = _scale(fit)
    matrix, right = _equations(fit, scale)
    best, least_loss = None, float("inf")
    for chosen in CHOICES:
        solution = _solve_for(chosen, matrix, right)
        # Up to a constant, the sum of squares at the minimum is minus this product.
        loss = -sum(right[i] * solution[i] for i in range(3))
        if min(solution) >= 0.0 and loss < least_loss:
            best, least_loss = solution, loss
    if best is None:
        return fit.coefficients
    base, per_seq, per_kv_token = (best[i] / scale[i] for i in range(3))
    return max(base, LEAST_BASE_S), per_seq, per_kv_token


def _scale(fit: StepFit) -> Three:
    """The mean sample; multiplying by it gives all three coefficients the same unit."""
    _, batch, kv_tokens = fit.products[0]
    weight = fit.products[0][0]
    return 1.0, max(batch / weight, LEAST_SCALE), max(kv_tokens / weight, LEAST_SCALE)


def _equations(fit: StepFit, scale: Three) -> tuple[list[list[float]], list[float]]:
    """Matrix and right-hand side of the least squares of scaled coefficients, prior included."""
    pull = fit.prior_weight + RIDGE * fit.products[0][0]
    matrix = [[fit.products[i][j] / scale[i] / scale[j] for j in range(3)] for i in range(3)]
    for i in range(3):
        matrix[i][i] += pull
    right = [fit.answers[i] / scale[i] + pull * fit.prior[i] * scale[i] for i in range(3)]
    return matrix, right


def _solve_for(
    chosen: Sequence[int], matrix: Sequence[Sequence[float]], right: Sequence[float]
) -> Three:
    """The solution in which the coefficients that are not chosen are zero."""
    values = _solve_equations(
        [[matrix[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen]
    )
    by_index = dict(zip(chosen, values, strict=True))
    return _three([by_index.get(i, 0.0) for i in range(3)])


def _solve_equations(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a positive definite system of up to three equations."""
    size = len(right)
    for i in range(size):
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (right[i] - rest) / matrix[i][i]
    return solution


def _three(values: Sequence[float]) -> Three:
    return values[0], values[1], values[2]
