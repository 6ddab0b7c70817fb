"""Budgets of tenants: two routers with one index, and each alone while the index is down."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import LinkBroken
from baton_kvstore.index.rate_limits import Budgets as SharedBudgets
from baton_kvstore.index.rate_limits import Draw, DrawResult
from baton_protocol.errors import RateLimited
from baton_router.admission.budgets import BudgetBooking, TenantBudgets
from baton_router.admission.tenant_limits import TenantLimits
from tests.support.clock import Clock

PER_S = 200.0
LIMITS = TenantLimits(tokens_per_minute=60 * PER_S * 10)  # requests of 10 tokens each
WINDOW_S = 3.0


class Index(SharedBudgets):
    """An index that admits everything, or fails if `down`. It reports `routers` routers."""

    def __init__(self, routers: int) -> None:
        self.down = False
        self.calls = 0
        self.routers = routers

    async def take(self, tenant: str, draws: Sequence[Draw]) -> DrawResult:
        self.calls += 1
        if self.down:
            raise LinkBroken("no")
        return DrawResult(0.0, self.routers)

    async def give(self, tenant: str, draws: Sequence[Draw]) -> None:
        await self.take(tenant, draws)


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(64 << 20) as running:
        yield running


async def book(
    budgets: TenantBudgets, limits: TenantLimits, tokens: int = 10
) -> BudgetBooking | None:
    try:
        return await budgets.book_call("acme", limits, 1, tokens)
    except RateLimited:
        return None


@pytest.mark.integration
async def test_two_routers_share_a_budget_within_five_percent(store: EmbeddedStore) -> None:
    """Request without pause after the burst is used up. The window starts and ends at a refusal,
    when the buckets are empty."""
    shared = [SharedBudgets(store.index_url, "pool", timeout_s=60) for _ in range(2)]
    routers = [TenantBudgets(index, time.monotonic) for index in shared]
    while await book(routers[0], LIMITS):
        pass
    start, admitted = time.monotonic(), [0, 0]
    while time.monotonic() < start + WINDOW_S:
        for number, router in enumerate(routers):
            admitted[number] += await book(router, LIMITS) is not None
    while await book(routers[0], LIMITS):
        admitted[0] += 1
    allowed = PER_S * (time.monotonic() - start)
    for index in shared:
        await index.close()
    assert 0.95 * allowed < sum(admitted) < 1.05 * allowed
    assert min(admitted) > 0


@pytest.mark.integration
async def test_unused_tokens_are_given_back_to_the_index(store: EmbeddedStore) -> None:
    limits = TenantLimits(tokens_per_minute=1, burst_seconds=3600)  # 60 at once
    async with SharedBudgets(store.index_url, "pool", timeout_s=60) as index:
        router = TenantBudgets(index, time.monotonic)
        first = await book(router, limits, 60)
        assert first is not None
        assert await book(router, limits, 30) is None
        router.settle_call(first, used=20)
        await router.finish_corrections()
        assert await book(router, limits, 39) is not None
        assert await book(router, limits, 39) is None


async def test_the_error_for_a_tenant_over_budget_has_retry_after() -> None:
    budgets, limits = TenantBudgets(None, Clock()), TenantLimits(requests_per_minute=6)
    assert await budgets.book_call("acme", limits, 1, 10) is not None
    with pytest.raises(
        RateLimited, match=r"6 requests per minute is used up.* in 10\.0 s"
    ) as caught:
        await budgets.book_call("acme", limits, 1, 10)
    assert caught.value.retry_after == pytest.approx(10)
    assert caught.value.record().code == "rate_limited"


async def test_a_tenant_without_a_budget_needs_no_index_call() -> None:
    index = Index(1)
    assert await TenantBudgets(index, Clock()).book_call("acme", TenantLimits(), 1, 10**9) is None
    assert index.calls == 0


async def test_while_the_index_is_down_each_router_enforces_its_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    index, clock = Index(routers=4), Clock()
    budgets, limits = TenantBudgets(index, clock), TenantLimits(requests_per_minute=240)
    await budgets.book_call("acme", limits, 1, 0)
    index.down = True
    admitted = 0
    for _ in range(6000):
        clock.now += 0.01
        admitted += await book(budgets, limits) is not None
    # One minute at a quarter of the rate, and a quarter of the burst.
    assert admitted == pytest.approx(60 + 3, abs=1)
    # The index is tried once a second, not once per request.
    assert index.calls < 70
    assert caplog.text.count("applies 1/4 of each budget") == 1
    index.down = False
    clock.now += 1.0
    calls = index.calls
    for _ in range(3):
        assert await book(budgets, limits) is not None
    assert index.calls == calls + 3
    assert caplog.text.count("shares budgets with the others again") == 1


async def test_unused_tokens_are_given_back_to_the_router_s_own_budget() -> None:
    clock = Clock()
    budgets = TenantBudgets(None, clock)
    limits = TenantLimits(tokens_per_minute=1, burst_seconds=3600)
    first = await budgets.book_call("acme", limits, 1, 60)
    assert first is not None
    assert await book(budgets, limits, 1) is None
    budgets.settle_call(first, used=0)
    assert await book(budgets, limits, 60) is not None
