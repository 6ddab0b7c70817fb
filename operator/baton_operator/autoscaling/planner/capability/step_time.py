"""A decode step's time as `base + batch per_seq + kv per_kv_token`, fitted as samples come.

In: samples. Out: three coefficients, none below zero. Kept are the sums of least squares, older
samples fading. Each coefficient counts by what it is worth at the mean batch and KV, so that the
prior, and the little of it that never fades, pull equally at all three: a pool whose batches are
all alike cannot tell them apart, and then they stay near what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

Three = tuple[float, float, float]
FADE = 0.995  # the newest 200 samples or so count
PRIOR_WEIGHT = 5.0  # samples
RIDGE = 1e-4  # of the samples' weight
FAR = 3.0  # mean deviations
LEAST_DEVIATION = 0.02  # of the expected time
LEAST_SCALE = 1e-9
LEAST_BASE_S = 1e-6  # a step takes time


class StepSample(NamedTuple):
    batch: float
    kv_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """`products` are the weighted sums of x x', `answers` of x y, x = (1, batch, kv)."""

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
        expected = sum(one * value for one, value in zip(self.coefficients, x, strict=True))
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
        return replace(updated, coefficients=_solved(updated))


def _solved(fit: StepFit) -> Three:
    """The least squares with no coefficient below zero: the best of the feasible solutions over
    each choice of coefficients that are not zero (with three there are seven)."""
    weight = fit.products[0][0]
    means = [fit.products[0][j] / weight for j in range(3)]
    scale = (1.0, max(means[1], LEAST_SCALE), max(means[2], LEAST_SCALE))
    pull = fit.prior_weight + RIDGE * weight
    matrix = [[fit.products[i][j] / scale[i] / scale[j] for j in range(3)] for i in range(3)]
    right = [fit.answers[i] / scale[i] + pull * fit.prior[i] * scale[i] for i in range(3)]
    for i in range(3):
        matrix[i][i] += pull
    best, least = fit.coefficients, float("inf")
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = _gauss(
                [[matrix[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen]
            )
            if min(found) < 0.0:
                continue
            # Up to a constant, the sum of squares at the minimum is minus this product.
            loss = -sum(right[i] * value for i, value in zip(chosen, found, strict=True))
            if loss < least:
                full = [0.0, 0.0, 0.0]
                for i, value in zip(chosen, found, strict=True):
                    full[i] = value / scale[i]
                best, least = (max(full[0], LEAST_BASE_S), full[1], full[2]), loss
    return best


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
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
