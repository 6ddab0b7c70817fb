"""Shares of tenants in a quantity, such as running sequences.

In: amounts that tenants take and give back, and their weights. Out: whether a tenant has more than
its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

FADED = 0.01  # a tenant with a smaller share of all is forgotten


@dataclass(slots=True)
class _Share:
    amount: float
    weight: float


class UsageShares:
    """Amounts decay to 1/e in `fades_s` seconds of `clock`; by default they stay until given back.
    New amounts are scaled up instead of old ones down, since only ratios matter, so adding touches
    one tenant."""

    def __init__(self, clock: Callable[[], float], fades_s: float = math.inf) -> None:
        self._clock = clock
        self._fades_s = fades_s
        self._since = clock()
        self._shares: dict[str, _Share] = {}
        self._amounts = 0.0
        self._weights = 0.0

    def __len__(self) -> int:
        """Number of tenants with an amount."""
        return len(self._shares)

    def add(self, tenant: str, amount: float, weight: float) -> None:
        elapsed = (self._clock() - self._since) / self._fades_s
        if elapsed > 1:
            self._fade(math.exp(-elapsed))
            elapsed = 0.0
        scale = math.exp(elapsed)
        share = self._shares.setdefault(tenant, _Share(0.0, 0.0))
        share.amount += amount * scale
        self._amounts += amount * scale
        self._weights += weight - share.weight
        share.weight = weight

    def give_back(self, tenant: str, amount: float) -> None:
        """Return part of an amount; only for amounts that do not decay."""
        share = self._shares[tenant]
        share.amount -= amount
        self._amounts -= amount
        if share.amount <= 0:
            self._weights -= self._shares.pop(tenant).weight

    def has_more(self, tenant: str, weight: float) -> bool:
        """Whether the tenant has more than its weight's share, among the tenants with an amount. A
        tenant alone is compared with one other of weight 1."""
        share = self._shares.get(tenant)
        if share is None:
            return False
        others = self._weights - share.weight if len(self._shares) > 1 else 1.0
        return share.amount * (weight + others) > weight * self._amounts

    def _fade(self, factor: float) -> None:
        """Scale all amounts by `factor` and forget tenants with a negligible one."""
        self._since = self._clock()
        min_amount = FADED * factor * self._amounts
        for share in self._shares.values():
            share.amount *= factor
        self._shares = {
            name: share for name, share in self._shares.items() if share.amount > min_amount
        }
        self._amounts = sum(share.amount for share in self._shares.values())
        self._weights = sum(share.weight for share in self._shares.values())
