"""The registry on a real index: nodes, fetches and routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.registry import DEFAULT_TTL_S, Registry
from baton_kvstore.keys import (
    fetch_key,
    fetches_key,
    node_key,
    nodes_key,
    router_key,
    routers_key,
)
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.store import FetchReport, RouterReport, Speeds
from tests.support.stores.kvstore import (
    PATIENCE_S,
    frozen,
    held_down,
    node_report,
    plain_client,
)

pytestmark = pytest.mark.integration


@pytest.fixture
async def registry(single: EmbeddedStore) -> AsyncIterator[Registry]:
    async with Registry(single.index_url, "pool", timeout_s=PATIENCE_S) as opened:
        yield opened


async def test_registered_nodes_are_listed_with_their_complete_report(registry: Registry) -> None:
    assert await registry.nodes() == []
    reports = [node_report("b"), node_report("a")]
    for report in reports:
        await registry.register(report, 60.0)
    assert await registry.nodes() == sorted(reports, key=lambda report: report.node)


async def test_a_heartbeat_replaces_the_report_and_extends_its_ttl(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.register(node_report("a"), 1.0)
    draining = msgspec.structs.replace(node_report("a"), state="draining")
    await registry.register(draining, 60.0)
    assert await registry.nodes() == [draining]
    with plain_client(single.index_url) as client:
        assert client.pttl(node_key("pool", NodeId("a"))) > 30_000


async def test_a_silent_node_expires_and_leaves_no_key(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.register(node_report("a"), 0.05)
    await registry.register(node_report("b"), 60.0)
    await asyncio.sleep(0.2)
    assert [report.node for report in await registry.nodes()] == ["b"]
    with plain_client(single.index_url) as client:
        assert client.zrange(nodes_key("pool"), 0, -1) == [b"b"]


async def test_a_silent_node_expires_even_if_the_servers_clock_was_set_back(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.register(node_report("a"), 60.0)
    with plain_client(single.index_url) as client:
        an_hour_later = (client.time()[0] + 3600) * 1000
        client.zadd(nodes_key("pool"), {"a": an_hour_later})
        assert [report.node for report in await registry.nodes()] == ["a"]
        left_ms = client.zscore(nodes_key("pool"), "a") - client.time()[0] * 1000
        assert left_ms <= 1000 * DEFAULT_TTL_S + 1000


async def test_a_node_can_unregister_only_its_own_epoch(registry: Registry) -> None:
    await registry.register(node_report("a", "second"), 60.0)
    assert not await registry.unregister(NodeId("a"), Epoch("first"))
    assert len(await registry.nodes()) == 1
    assert await registry.unregister(NodeId("a"), Epoch("second"))
    assert await registry.nodes() == []
    assert not await registry.unregister(NodeId("a"), Epoch("second"))


async def test_pools_do_not_see_each_other(registry: Registry, single: EmbeddedStore) -> None:
    await registry.register(node_report("a"), 60.0)
    async with Registry(single.index_url, "other") as other:
        assert await other.nodes() == []


async def test_an_unreadable_report_is_left_out(registry: Registry, single: EmbeddedStore) -> None:
    await registry.register(node_report("a"), 60.0)
    await registry.register(node_report("b"), 60.0)
    with plain_client(single.index_url) as client:
        client.set(node_key("pool", NodeId("a")), b"rubbish")
    assert [report.node for report in await registry.nodes()] == ["b"]


async def test_a_lost_index_raises_store_unavailable(single: EmbeddedStore) -> None:
    async with Registry(single.index_url, "pool") as registry:
        with frozen(single.pid("index")), pytest.raises(StoreUnavailable):
            await registry.nodes()
        single.stop()
        with pytest.raises(StoreUnavailable):
            await registry.register(node_report("a"))
        with pytest.raises(StoreUnavailable):
            await registry.unregister(NodeId("a"), Epoch("first"))


async def test_the_set_of_nodes_stays_small_even_if_no_router_lists_it(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.register(node_report("a"), 0.05)
    await asyncio.sleep(0.2)
    await registry.register(node_report("b"), 60.0)
    with plain_client(single.index_url) as client:
        assert client.zrange(nodes_key("pool"), 0, -1) == [b"b"]


async def test_a_node_can_register_again_after_a_restart_of_the_index(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.register(node_report("a"), 60.0)
    with held_down(single, "index"), pytest.raises(StoreUnavailable):
        await registry.register(node_report("a"), 60.0)

    async def registered() -> bool:
        try:
            await registry.register(node_report("a"), 60.0)
        except StoreUnavailable:
            return False
        return True

    async with asyncio.timeout(120):
        while not await registered():
            await asyncio.sleep(0.01)
    assert await registry.nodes() == [node_report("a")]


async def test_unregistering_from_a_frozen_index_takes_at_most_one_timeout(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.register(node_report("a"), 60.0)
    async with Registry(single.index_url, "pool") as leaving:
        with frozen(single.pid("index")):
            async with asyncio.timeout(120):
                with pytest.raises(StoreUnavailable, match="did not answer in time"):
                    await leaving.unregister(NodeId("a"), Epoch("epoch-1"))


def fetch_report(node: str, done: int = 1) -> FetchReport:
    return FetchReport(node=NodeId(node), source="hf://a/b", done_bytes=done, total_bytes=9)


async def test_fetches_are_listed_by_node_with_their_last_report(registry: Registry) -> None:
    assert await registry.fetches() == []
    for report in (fetch_report("b"), fetch_report("a"), fetch_report("b", 5)):
        await registry.announce_fetch(report, 60.0)
    assert await registry.fetches() == [fetch_report("a"), fetch_report("b", 5)]


async def test_fetches_and_nodes_are_listed_separately(registry: Registry) -> None:
    await registry.announce_fetch(fetch_report("a"), 60.0)
    await registry.register(node_report("b"), 60.0)
    assert [report.node for report in await registry.fetches()] == ["a"]
    assert [report.node for report in await registry.nodes()] == ["b"]


async def test_a_fetch_without_further_reports_expires_and_leaves_no_key(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.announce_fetch(fetch_report("a"), 0.05)
    await asyncio.sleep(0.2)
    await registry.announce_fetch(fetch_report("b"), 60.0)
    assert [report.node for report in await registry.fetches()] == ["b"]
    with plain_client(single.index_url) as client:
        assert client.zrange(fetches_key("pool"), 0, -1) == [b"b"]
        assert client.pttl(fetch_key("pool", NodeId("b"))) > 30_000


def router_report(router: str, held: int = 0) -> RouterReport:
    return RouterReport(router=router, uptime_s=9.5, requests_total=3, held=held, itl_counts=(1, 2))


async def test_routers_are_listed_by_name_with_their_last_report(registry: Registry) -> None:
    assert await registry.routers() == []
    for report in (router_report("b"), router_report("a"), router_report("b", 5)):
        await registry.announce_router(report, 60.0)
    assert await registry.routers() == [router_report("a"), router_report("b", 5)]
    assert (await registry.nodes(), await registry.fetches()) == ([], [])


async def test_withdrawing_a_router_removes_it_at_once_and_no_other(
    registry: Registry, single: EmbeddedStore
) -> None:
    for name in ("a", "b"):
        await registry.announce_router(router_report(name), 60.0)
    for _ in range(2):
        await registry.withdraw_router("a")
        assert await registry.routers() == [router_report("b")]
    with plain_client(single.index_url) as client:
        assert client.zrange(routers_key("pool"), 0, -1) == [b"b"]
        assert not client.exists(router_key("pool", "a"))


async def test_a_silent_router_expires_and_leaves_no_key(
    registry: Registry, single: EmbeddedStore
) -> None:
    await registry.announce_router(router_report("a"), 0.05)
    await asyncio.sleep(0.2)
    assert await registry.routers() == []
    await registry.announce_router(router_report("b"), 60.0)
    with plain_client(single.index_url) as client:
        assert client.zrange(routers_key("pool"), 0, -1) == [b"b"]
        assert client.pttl(router_key("pool", "b")) > 30_000


async def test_reports_with_absurd_figures_or_sizes_are_skipped_counted_and_logged_once(
    registry: Registry, single: EmbeddedStore, caplog: pytest.LogCaptureFixture
) -> None:
    good = node_report("good")
    speeds = Speeds(prefill_tokens_per_s=float("nan"))
    absurd = msgspec.structs.replace(node_report("absurd"), speeds=speeds)
    huge = msgspec.structs.replace(node_report("huge"), model="m" * (2 << 20))
    for report in (good, absurd, huge):
        await registry.register(report, 60.0)
    await registry.announce_router(
        RouterReport(router="r", uptime_s=float("inf"), requests_total=1), 60.0
    )
    for _ in range(3):
        assert await registry.nodes() == [good]
    assert registry.refused == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert await registry.routers() == []
    assert registry.refused == 4
