"""Whether a tenant has more of something than its share: of what runs, or of what was begun lately.

In: how much tenants get and give back, and their weights. Out: yes or no. Where amounts fade, they
do so by being added ever larger, so that nothing else is touched: only ratios are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

FADED = 0.01  # who has less of all than this is forgotten


@dataclass(slots=True)
class _Share:
    amount: float
    weight: float


class UsageShares:
    """An amount fades to 1/e in `fades_s` by `clock`; else it stays until it is given back."""

    def __init__(self, clock: Callable[[], float], fades_s: float = math.inf) -> None:
        self._clock = clock
        self._fades_s = fades_s
        self._since = clock()
        self._shares: dict[str, _Share] = {}
        self._amounts = 0.0
        self._weights = 0.0

    def __len__(self) -> int:
        """Tenants that have something."""
        return len(self._shares)

    def add(self, tenant: str, amount: float, weight: float) -> None:
        passed = (self._clock() - self._since) / self._fades_s
        if passed > 1:
            self._fade(math.exp(-passed))
            passed = 0.0
        grown = math.exp(passed)
        share = self._shares.setdefault(tenant, _Share(0.0, 0.0))
        share.amount += amount * grown
        self._amounts += amount * grown
        self._weights += weight - share.weight
        share.weight = weight

    def give_back(self, tenant: str, amount: float) -> None:
        """Of what does not fade."""
        share = self._shares[tenant]
        share.amount -= amount
        self._amounts -= amount
        if share.amount <= 0:
            self._weights -= self._shares.pop(tenant).weight

    def has_more(self, tenant: str, weight: float) -> bool:
        """Than its weight's share, beside those who have something, or one other of weight 1."""
        share = self._shares.get(tenant)
        if share is None:
            return False
        others = self._weights - share.weight if len(self._shares) > 1 else 1.0
        return share.amount * (weight + others) > weight * self._amounts

    def _fade(self, left: float) -> None:
        """To so much of what they are; after long enough nothing is left of anybody."""
        self._since = self._clock()
        least = FADED * left * self._amounts
        for share in self._shares.values():
            share.amount *= left
        self._shares = {name: one for name, one in self._shares.items() if one.amount > least}
        self._amounts = sum(share.amount for share in self._shares.values())
        self._weights = sum(share.weight for share in self._shares.values())
