"""The best pair of numbers within bounds, ratio and budget.

In: the wanted numbers, the bounds, the rules. Out: a pair, or None if no pair obeys the rules. The
best pair gives the worse-served role the largest share of its wanted number, then the other role,
then uses the fewest GPUs. Without scarcity it is the wanted pair. If the ratio does not fit, the
role with too few nodes grows, or the other shrinks if that role is at its maximum. If the budget is
too small, both get about the same share.

Existing nodes hold their GPUs until they are gone. A pair that grows a role must fit the budget
together with all existing nodes, draining ones included: shrink first, then grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

Pair = tuple[int, int]  # prefill, decode
TINY = 1e-9
MOST = 1_000_000  # maximum of a role that needs no GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`there`: nodes that stay if nothing shrinks. `draining`: draining nodes."""

    gpus: Pair
    budget: int | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    there: Pair = (0, 0)
    draining: Pair = (0, 0)


def gpus_of(pair: Pair, rules: Rules) -> int:
    return pair[0] * rules.gpus[0] + pair[1] * rules.gpus[1]


def share(pair: Pair, want: Pair) -> tuple[float, float]:
    """The satisfied share of the wanted counts: of the worse-served role, and the sum of both."""
    parts = [
        min(1.0, available / wanted) if wanted > 0 else 1.0
        for available, wanted in zip(pair, want, strict=True)
    ]
    return round(min(parts), 9), round(sum(parts), 9)


def fit(want: Pair, low: Pair, high: Pair, rules: Rules) -> Pair | None:
    best: tuple[tuple[float, float, int], Pair] | None = None
    for prefill in range(low[0], high[0] + 1):
        least, most = _decode_range(prefill, low[1], high[1], rules)
        if least > most:
            continue
        pair = (prefill, max(least, min(most, want[1])))
        key = (*share(pair, want), -gpus_of(pair, rules))
        if best is None or key > best[0]:
            best = (key, pair)
    return None if best is None else best[1]


def _decode_range(prefill: int, low: int, high: int, rules: Rules) -> Pair:
    """Allowed numbers of decode nodes beside this number of prefill nodes."""
    if rules.ratio_max:
        low = max(low, ceil(prefill / rules.ratio_max - TINY))
    if rules.ratio_min:
        high = min(high, floor(prefill / rules.ratio_min + TINY))
    if rules.budget is not None:
        high = min(high, _affordable(prefill, rules, rules.budget))
    return low, high


def _affordable(prefill: int, rules: Rules, budget: int) -> int:
    """The maximum of decode nodes that the budget allows beside these prefill nodes; -1 if none."""
    gpus_p, gpus_d = rules.gpus
    there_p, there_d = rules.there
    kept = max(prefill, there_p) + rules.draining[0]
    growing = _fitting(budget - kept * gpus_p, gpus_d) - rules.draining[1]
    if growing >= there_d:
        return growing
    # Prefill must not grow: the budget has no room for it beside the existing decode nodes.
    steady = _fitting(budget - prefill * gpus_p, gpus_d)
    return -1 if prefill > there_p else min(steady, there_d)


def _fitting(budget: int, gpus: int) -> int:
    if gpus == 0:
        return MOST if budget >= 0 else -1
    return budget // gpus
