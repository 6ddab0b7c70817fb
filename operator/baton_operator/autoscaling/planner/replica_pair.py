"""The best numbers of both roles within bounds, ratio and GPU budget.

In: the wanted numbers, the bounds, what both roles share. Out: a pair, or None if no pair is
allowed. The best pair gives the worse-served role the largest share of its wanted number, then the
other role, then uses the fewest GPUs. Without scarcity it is the wanted pair. If the ratio does not
fit, the role with too few nodes grows, or the other shrinks if that role is at its maximum. If the
budget is too small, both get about the same share.

Existing nodes hold their GPUs until they are gone. A pair that grows a role must fit the budget
together with all existing nodes, draining ones included: shrink first, then grow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor
from typing import NamedTuple

TINY = 1e-9
MOST = 1_000_000  # maximum of a role that needs no GPU


class Replicas(NamedTuple):
    prefill: int
    decode: int


NO_REPLICAS = Replicas(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLimits:
    """What both roles share. `gpus` is per node. `existing`: nodes that stay if nothing shrinks.
    `draining`: draining nodes."""

    gpus: Replicas
    budget: int | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    existing: Replicas = NO_REPLICAS
    draining: Replicas = NO_REPLICAS

    def without_ratio(self) -> SharedLimits:
        return replace(self, ratio_min=None, ratio_max=None)

    def without_budget(self) -> SharedLimits:
        return replace(self, budget=None)

    def gpus_of(self, pair: Replicas) -> int:
        return pair.prefill * self.gpus.prefill + pair.decode * self.gpus.decode


def served_share(pair: Replicas, wanted: Replicas) -> tuple[float, float]:
    """The satisfied share of the wanted numbers: of the worse-served role, and the sum of both."""
    shares = [
        min(1.0, available / needed) if needed > 0 else 1.0
        for available, needed in zip(pair, wanted, strict=True)
    ]
    return round(min(shares), 9), round(sum(shares), 9)


def choose_pair(
    wanted: Replicas, lowest: Replicas, highest: Replicas, limits: SharedLimits
) -> Replicas | None:
    best: tuple[tuple[float, float, int], Replicas] | None = None
    for prefill in range(lowest.prefill, highest.prefill + 1):
        least, most = _decode_range(prefill, lowest.decode, highest.decode, limits)
        if least > most:
            continue
        pair = Replicas(prefill, max(least, min(most, wanted.decode)))
        rank = (*served_share(pair, wanted), -limits.gpus_of(pair))
        if best is None or rank > best[0]:
            best = (rank, pair)
    return None if best is None else best[1]


def _decode_range(prefill: int, least: int, most: int, limits: SharedLimits) -> tuple[int, int]:
    """Allowed numbers of decode nodes beside this number of prefill nodes."""
    if limits.ratio_max:
        least = max(least, ceil(prefill / limits.ratio_max - TINY))
    if limits.ratio_min:
        most = min(most, floor(prefill / limits.ratio_min + TINY))
    if limits.budget is not None:
        most = min(most, _affordable_decode(prefill, limits, limits.budget))
    return least, most


def _affordable_decode(prefill: int, limits: SharedLimits, budget: int) -> int:
    """The maximum of decode nodes that the budget allows beside these prefill nodes; -1 if none."""
    gpus, existing = limits.gpus, limits.existing
    prefill_held = max(prefill, existing.prefill) + limits.draining.prefill
    if_grown = _count_fitting(budget - prefill_held * gpus.prefill, gpus.decode)
    if_grown -= limits.draining.decode
    if if_grown >= existing.decode:
        return if_grown
    # Prefill must not grow: the budget has no room for it beside the existing decode nodes.
    if_not_grown = _count_fitting(budget - prefill * gpus.prefill, gpus.decode)
    return -1 if prefill > existing.prefill else min(if_not_grown, existing.decode)


def _count_fitting(budget: int, gpus: int) -> int:
    if gpus == 0:
        return MOST if budget >= 0 else -1
    return budget // gpus
