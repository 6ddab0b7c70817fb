"""Enforces the requests and tokens per minute of each tenant, over all routers of the pool.

In: a tenant's limits, what a call may cost, later what it did cost. Out: the call passes, or
RateLimited with the seconds to wait, or InvalidRequest for a call that costs more than the budget
ever holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_kvstore.errors import StoreError
from baton_kvstore.index.rate_limits import Budgets as SharedBudgets
from baton_kvstore.index.rate_limits import Draw, DrawResult
from baton_protocol.errors import InvalidRequest, RateLimited, exact
from baton_router.admission.tenant_limits import TenantLimits

# Seconds without calls to a failed index; otherwise each request would wait for its deadline.
RETRY_S = 1.0
MINUTE_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BudgetBooking:
    """Tokens booked for a call, with the limits then. `shared`: in the index's buckets."""

    tenant: str
    limits: TenantLimits
    tokens: int
    shared: bool


class TenantBudgets:
    """The budgets of all tenants. A budget never holds more than one minute of it, or the burst if
    that is more.

    `index` holds the buckets. While it is down, each router uses its own buckets, at the rates
    divided by the last known number of routers. It is None if the router has none; the router then
    counts as the only one.
    """

    def __init__(self, index: SharedBudgets | None, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._own = OwnBuckets()
        self._routers = 1
        self._index_down = False
        self._retry_at = 0.0
        self._corrections: set[asyncio.Task[None]] = set()

    async def book_call(
        self, tenant: str, limits: TenantLimits, requests: int, tokens: int
    ) -> BudgetBooking | None:
        """Book a call; None if the tenant has no budget. Raise RateLimited, InvalidRequest."""
        if not (limits.requests_per_minute or limits.tokens_per_minute):
            return None
        _check_holds(limits, requests, tokens)
        draws = draws_of(limits, requests, tokens)
        drawn = await self._draw_shared(tenant, draws)
        shared = drawn is not None
        if drawn is None:
            own = self._own.take(tenant, _part_for_one_router(draws, self._routers), self._clock())
            drawn = DrawResult(own, self._routers)
        if drawn.wait_s > 0:
            raise RateLimited(_rate_message(limits, drawn.wait_s), retry_after=drawn.wait_s)
        return BudgetBooking(tenant, limits, tokens, shared)

    def settle_call(self, booking: BudgetBooking, used: int) -> None:
        """The call is over and used this many tokens: correct the bucket by the difference."""
        draws = draws_of(booking.limits, 0, booking.tokens - used)
        if booking.tokens == used or not booking.limits.tokens_per_minute:
            return
        if not booking.shared or self._index is None:
            self._own.give(
                booking.tenant, _part_for_one_router(draws, self._routers), self._clock()
            )
            return
        task = asyncio.create_task(self._give_back(self._index, booking.tenant, draws))
        self._corrections.add(task)
        task.add_done_callback(self._corrections.discard)

    async def finish_corrections(self) -> None:
        """Wait for corrections in flight; each ends within the index's own deadline."""
        await asyncio.gather(*self._corrections)

    async def _draw_shared(self, tenant: str, draws: Sequence[Draw]) -> DrawResult | None:
        if self._index is None or (self._index_down and self._clock() < self._retry_at):
            return None
        try:
            drawn = await self._index.take(tenant, draws)
        except StoreError as error:
            self._note_failure(error)
            return None
        self._routers = max(1, drawn.routers)
        if self._index_down:
            self._index_down = False
            logger.info("the index answers again; this router shares budgets with the others again")
        return drawn

    def _note_failure(self, error: StoreError) -> None:
        self._retry_at = self._clock() + RETRY_S
        if not self._index_down:
            self._index_down = True
            logger.warning(
                "the index does not answer, so this router applies 1/%d of each budget "
                "by itself: %s",
                *(self._routers, error),
            )

    async def _give_back(self, index: SharedBudgets, tenant: str, draws: Sequence[Draw]) -> None:
        try:
            await index.give(tenant, draws)
        except StoreError as error:
            self._note_failure(error)  # not given back; the bucket refills with time


class OwnBuckets:
    """The same buckets in this process; see baton_kvstore.index.rate_limits for the algorithm."""

    def __init__(self) -> None:
        # (level, its time, time when full); a full bucket needs no entry. Least recently used
        # first.
        self._levels: OrderedDict[tuple[str, int], tuple[float, float, float]] = OrderedDict()

    def take(self, tenant: str, draws: Sequence[Draw], now: float) -> float:
        """Take the draws, or return the seconds to wait; 0 means taken."""
        wait = 0.0
        for slot, draw in enumerate(draws):
            if draw.rate_per_s > 0:
                missing = min(draw.amount, draw.capacity) - self._level(tenant, slot, draw, now)
                wait = max(wait, missing / draw.rate_per_s)
        if wait <= 0:
            self._add(tenant, draws, now, -1)
        return wait

    def give(self, tenant: str, draws: Sequence[Draw], now: float) -> None:
        self._add(tenant, draws, now, 1)

    def _add(self, tenant: str, draws: Sequence[Draw], now: float, sign: int) -> None:
        for slot, draw in enumerate(draws):
            if draw.rate_per_s > 0:
                level = self._level(tenant, slot, draw, now) + sign * draw.amount
                level = min(draw.capacity, level)
                full_at = now + (draw.capacity - level) / draw.rate_per_s
                self._levels[tenant, slot] = level, now, full_at
                self._levels.move_to_end((tenant, slot))
        self._tidy(now)

    def _level(self, tenant: str, slot: int, draw: Draw, now: float) -> float:
        level, at, _ = self._levels.get((tenant, slot), (draw.capacity, now, now))
        return min(draw.capacity, level + max(0.0, now - at) * draw.rate_per_s)

    def _tidy(self, now: float) -> None:
        """Forget the least recently used buckets that are full."""
        while self._levels:
            key = next(iter(self._levels))
            if self._levels[key][2] > now:
                return
            del self._levels[key]


def draws_of(limits: TenantLimits, requests: float, tokens: float) -> list[Draw]:
    """The draws for requests and for tokens, always both in this order. A burst holds at least
    1."""
    per_s = limits.requests_per_minute / MINUTE_S, limits.tokens_per_minute / MINUTE_S
    burst = limits.burst_seconds
    return [
        Draw(per_s[0], max(1.0, per_s[0] * burst), requests),
        Draw(per_s[1], max(1.0, per_s[1] * burst), tokens),
    ]


def _check_holds(limits: TenantLimits, requests: int, tokens: int) -> None:
    minutes = max(1.0, limits.burst_seconds / MINUTE_S)
    for name, amount, per_minute in (
        ("requests", requests, limits.requests_per_minute),
        ("tokens", tokens, limits.tokens_per_minute),
    ):
        capacity = max(1.0, per_minute * minutes)
        if per_minute and amount > capacity:
            raise InvalidRequest(
                f"this call can cost {amount} {name}, but this tenant's budget of "
                f"{exact(per_minute)} {name} per minute never holds more than "
                f"{exact(round(capacity, 3))}; send fewer prompts at a time, or ask for fewer "
                "choices (n) or tokens (max_tokens)",
                code="over_budget",
            )


def _part_for_one_router(draws: Sequence[Draw], routers: int) -> list[Draw]:
    """The draws for one router's share."""
    return [
        draw._replace(rate_per_s=draw.rate_per_s / routers, capacity=max(1.0, draw[1] / routers))
        for draw in draws
    ]


def _rate_message(limits: TenantLimits, wait_s: float) -> str:
    budgets = [
        f"{exact(value)} {name} per minute"
        for value, name in (
            (limits.requests_per_minute, "requests"),
            (limits.tokens_per_minute, "tokens"),
        )
        if value
    ]
    return (
        f"this tenant's budget of {' and '.join(budgets)} is used up; send the request again in"
        f" {wait_s:.1f} s"
    )
