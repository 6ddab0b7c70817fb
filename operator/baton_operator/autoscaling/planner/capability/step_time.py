"""A decode step's time as `base + batch per_seq + kv per_kv_token`, fitted online.

In: samples. Out: three coefficients, all >= 0. The state is the sums of a least-squares fit, in
which older samples fade. Each coefficient is scaled by the mean batch and KV, so that the prior,
and the small part of it that never fades, pull equally at all three. If all batches of a pool are
alike, the coefficients cannot be told apart and stay near their previous values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

Three = tuple[float, float, float]
FADE = 0.995  # per sample: about the newest 200 count
PRIOR_WEIGHT = 5.0  # samples
RIDGE = 1e-4  # of the samples' weight
FAR = 3.0  # mean deviations
LEAST_DEVIATION = 0.02  # of the expected time
LEAST_SCALE = 1e-9
LEAST_BASE_S = 1e-6  # a step takes time
# Which of the three coefficients may differ from zero: one, two or all of them.
CHOICES = tuple(chosen for count in (1, 2, 3) for chosen in combinations(range(3), count))


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
    found = _solve_equations(
        [[matrix[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen]
    )
    by_index = dict(zip(chosen, found, strict=True))
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
        known = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (right[i] - known) / matrix[i][i]
    return solution


def _three(values: Sequence[float]) -> Three:
    return values[0], values[1], values[2]
