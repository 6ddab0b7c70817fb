"""Token buckets on the index, filled by the index server's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import StoreError
from baton_kvstore.index.rate_limits import Budgets, Draw
from baton_kvstore.index.registry import Registry
from baton_kvstore.keys import budget_key
from baton_protocol.store import RouterReport

pytestmark = pytest.mark.integration

SLOW = 1e-6  # per second: too slow to fill a bucket during a test


@pytest.fixture
async def budgets(single: EmbeddedStore) -> AsyncIterator[Budgets]:
    async with Budgets(single.index_url, "pool", timeout_s=60) as made:
        yield made


def draws(requests: float, tokens: float) -> list[Draw]:
    return [Draw(SLOW, 3, requests), Draw(SLOW, 100, tokens)]


async def test_a_refused_draw_returns_the_time_to_wait(
    budgets: Budgets,
) -> None:
    for _ in range(3):
        assert (await budgets.take("acme", draws(1, 10))).wait_s == 0
    refused = await budgets.take("acme", draws(1, 10))
    assert refused.wait_s == pytest.approx(1 / SLOW, rel=1e-3)
    assert (await budgets.take("globex", draws(1, 10))).wait_s == 0


async def test_one_bucket_that_is_too_low_leaves_the_others_unchanged(budgets: Budgets) -> None:
    assert (await budgets.take("acme", draws(1, 90))).wait_s == 0
    assert (await budgets.take("acme", draws(1, 20))).wait_s == pytest.approx(10 / SLOW, rel=1e-3)
    for _ in range(2):
        assert (await budgets.take("acme", draws(1, 0))).wait_s == 0
    assert (await budgets.take("acme", draws(1, 0))).wait_s > 0


async def test_a_draw_over_the_capacity_passes_once_and_leaves_a_debt(
    budgets: Budgets,
) -> None:
    assert (await budgets.take("acme", draws(0, 500))).wait_s == 0
    refused = await budgets.take("acme", draws(0, 10))
    assert refused.wait_s == pytest.approx((400 + 10) / SLOW, rel=1e-3)


async def test_returned_amounts_can_be_taken_again_up_to_the_capacity(
    budgets: Budgets,
) -> None:
    await budgets.take("acme", draws(0, 100))
    await budgets.give("acme", draws(0, 40))
    assert (await budgets.take("acme", draws(0, 41))).wait_s > 0
    assert (await budgets.take("acme", draws(0, 40))).wait_s == 0
    await budgets.give("acme", draws(0, 1000))
    assert (await budgets.take("acme", draws(0, 100))).wait_s == 0
    assert (await budgets.take("acme", draws(0, 1))).wait_s > 0
    await budgets.give("acme", draws(0, -30))
    assert (await budgets.take("acme", draws(0, 1))).wait_s == pytest.approx(31 / SLOW, rel=1e-3)


async def test_a_bucket_with_rate_zero_is_never_empty(budgets: Budgets) -> None:
    for _ in range(3):
        assert (await budgets.take("acme", [Draw(0, 1, 5), Draw(SLOW, 100, 1)])).wait_s == 0


async def test_buckets_fill_over_time_and_expire_when_they_are_full(
    budgets: Budgets, single: EmbeddedStore
) -> None:
    filling = [Draw(1.0, 100, 100)]
    assert (await budgets.take("acme", filling)).wait_s == 0
    wait_s = (await budgets.take("acme", filling)).wait_s
    assert 0 < wait_s < 100
    async with redis.asyncio.from_url(single.index_url) as client:
        ttl_ms = await client.pttl(budget_key("pool", "acme"))
    assert 0 < ttl_ms <= 101_000  # the time to fill, plus a second


async def test_an_empty_bucket_keeps_filling_after_the_servers_clock_was_set_back(
    budgets: Budgets, single: EmbeddedStore
) -> None:
    filling = [Draw(1.0, 100, 100)]
    assert (await budgets.take("acme", filling)).wait_s == 0
    async with redis.asyncio.from_url(single.index_url) as client:
        seconds, _ = await client.time()
        await client.hset(budget_key("pool", "acme"), "at", str(seconds + 3600))
        first = (await budgets.take("acme", filling)).wait_s
        await asyncio.sleep(0.2)
        second = (await budgets.take("acme", filling)).wait_s
    assert 0 < second <= first - 0.2 <= 99.8


async def test_the_result_has_the_number_of_live_routers(
    budgets: Budgets, single: EmbeddedStore
) -> None:
    assert (await budgets.take("acme", draws(0, 0))).routers == 0
    async with Registry(single.index_url, "pool") as registry:
        for name in ("one", "two"):
            await registry.announce_router(RouterReport(router=name, uptime_s=1.0), 600)
    assert (await budgets.take("acme", draws(0, 0))).routers == 2


async def test_a_lost_index_raises_store_unavailable(single: EmbeddedStore) -> None:
    async with Budgets("redis://127.0.0.1:1", "pool", timeout_s=1) as away:
        with pytest.raises(StoreError):
            await away.take("acme", draws(1, 1))
