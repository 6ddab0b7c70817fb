"""The feed makes one snapshot at a time for all viewers of equal rights, and none without any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from baton_protocol.errors import ErrorRecord, Unavailable
from baton_protocol.store import RouterReport
from baton_router.auth import Tenant
from baton_router.live.feed import MOST_UNREAD, MOST_VIEWERS, LiveFeed, Sources, Subscription
from baton_router.live.records import Snapshot
from baton_router.live.snapshot import MOST_ENDED, MOST_REQUESTS
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.chat import CHAT
from baton_router.requests.context import RequestContext
from tests.support.clock import Clock
from tests.support.nodes.fake_node import make_report
from tests.support.waiting import WAIT_S, until

ADMIN, ACME, GLOBEX = Tenant(admin=True), Tenant("acme"), Tenant("globex")
SOON_S = 0.005


class Pool:
    """A feed over a view with one node of each role. `looks` counts computations."""

    def __init__(self, every_s: float = SOON_S) -> None:
        self.clock = Clock()
        self.view = PoolView(self.clock, 100)
        for role in ("prefill", "decode"):
            self.view.hello(make_report(f"{role}-0", role, reason="secret reason"))
        self.looks = 0
        self.calls: list[RequestContext] = []
        self.feed = LiveFeed(
            Sources(
                pool="p",
                router="r",
                view=self.view,
                models=lambda: ["m"],
                report=self.report,
                running=lambda: self.calls,
            ),
            self.clock,
            every_s=every_s,
        )

    def report(self) -> RouterReport:
        self.looks += 1
        self.clock.advance(1.0)
        return RouterReport(router="r", uptime_s=1.0, output_tokens_total=100 * self.looks)

    @asynccontextmanager
    async def viewer(self, tenant: Tenant) -> AsyncIterator[Subscription]:
        subscription = self.feed.join(tenant, pytest.fail)
        try:
            yield subscription
        finally:
            self.feed.leave(subscription)


def call(id: str, tenant: Tenant | None, **fields: Any) -> RequestContext:
    return RequestContext(id, 90.0, CHAT, tenant=tenant, **fields)


async def next_of(subscription: Subscription) -> Snapshot:
    async with asyncio.timeout(WAIT_S):
        data = await subscription.next()
    assert data is not None
    return msgspec.json.decode(data, type=Snapshot)


async def test_nothing_is_computed_while_nobody_looks() -> None:
    pool = Pool()
    pool.feed.note_end(call("a", ACME), 200, 100.0)
    await asyncio.sleep(10 * SOON_S)
    assert pool.looks == 0
    async with pool.viewer(ADMIN) as viewer:
        assert (await next_of(viewer)).ended == []
        assert (await next_of(viewer)).totals.tokens_per_s == 100.0
    seen = pool.looks
    await asyncio.sleep(10 * SOON_S)
    assert pool.looks == seen
    # What was counted while somebody looked is old by now.
    async with pool.viewer(ADMIN) as viewer:
        assert (await next_of(viewer)).totals.tokens_per_s is None


async def test_viewers_of_equal_rights_share_each_snapshot() -> None:
    pool = Pool()
    async with (
        pool.viewer(ADMIN) as first,
        pool.viewer(ADMIN) as second,
        pool.viewer(ACME) as third,
    ):
        for number in range(1, 4):
            snapshots = [await next_of(viewer) for viewer in (first, second, third)]
            assert snapshots[0] == snapshots[1] != snapshots[2]
            assert pool.looks == number
        assert pool.feed.viewers == 3
    assert pool.feed.viewers == 0


async def test_a_later_viewer_gets_the_last_snapshot_at_once() -> None:
    pool = Pool(every_s=WAIT_S)
    async with pool.viewer(ADMIN) as first, pool.viewer(ADMIN) as second:
        assert await next_of(first) == await next_of(second)
        async with pool.viewer(ADMIN) as third:
            await next_of(third)
    assert pool.looks == 1


async def test_a_tenant_sees_its_own_calls_and_of_nodes_only_the_state() -> None:
    pool = Pool()
    pool.calls = [call("a", ACME), call("b", GLOBEX), call("c", None), call("d", ACME)]
    async with pool.viewer(ACME) as tenant, pool.viewer(ADMIN) as admin:
        await next_of(tenant)
        await next_of(admin)
        failure = ErrorRecord("a message with the client's words", "queue_full", status=429)
        pool.feed.note_end(call("e", GLOBEX, failure=failure), 429, 100.0)
        pool.feed.note_end(call("f", ACME), 200, 100.0)
        pool.feed.note_end(call("g", None), 401, 100.0)
        own, every = await next_of(tenant), await next_of(admin)
    assert [one.id for one in own.requests] == ["a", "d"]
    assert [one.id for one in own.ended] == ["f"]
    assert (own.viewer.tenant, own.viewer.admin) == ("acme", False)
    assert (own.totals.waiting, own.totals.nodes, own.totals.tokens_per_s) == (2, 2, None)
    assert (own.tenants, own.flows, own.decisions) == ([], [], [])
    for node in own.nodes:
        told = {name for name, value in msgspec.structs.asdict(node).items() if value is not None}
        assert told == {"id", "role", "state", "asleep"}

    assert [one.id for one in every.requests] == ["a", "b", "d"]
    assert [(one.id, one.status, one.error) for one in every.ended] == [
        ("e", 429, "queue_full"),
        ("f", 200, None),
    ]
    assert [(one.name, one.waiting) for one in every.tenants] == [("acme", 2), ("globex", 1)]
    assert every.totals.errors_per_s == 1.0
    assert {node.reason for node in every.nodes} == {"secret reason"}


async def test_lists_of_calls_are_bounded() -> None:
    pool = Pool()
    pool.calls = [call(f"{number}", ACME) for number in range(MOST_REQUESTS + 7)]
    async with pool.viewer(ADMIN) as viewer:
        await next_of(viewer)
        for number in range(MOST_ENDED + 5):
            pool.feed.note_end(call(f"{number}", ACME), 200, 100.0)
        snapshot = await next_of(viewer)
        assert (await next_of(viewer)).ended == []
    assert [one.id for one in snapshot.requests] == [f"{n}" for n in range(MOST_REQUESTS)]
    assert snapshot.requests_left_out == 7
    assert [one.id for one in snapshot.ended] == [f"{n}" for n in range(5, MOST_ENDED + 5)]


async def test_a_viewer_that_does_not_read_is_dropped_and_others_go_on() -> None:
    pool, dropped = Pool(), asyncio.Event()
    slow = pool.feed.join(ADMIN, dropped.set)
    async with pool.viewer(ADMIN) as quick:
        for _ in range(MOST_UNREAD):
            await next_of(quick)
        assert not dropped.is_set()
        await next_of(quick)
        assert dropped.is_set()
        pool.feed.leave(slow)
        await next_of(quick)


async def test_too_many_viewers_are_refused() -> None:
    pool = Pool()
    viewers = [pool.feed.join(ADMIN, pytest.fail) for _ in range(MOST_VIEWERS)]
    with pytest.raises(Unavailable, match=f"{MOST_VIEWERS} viewers"):
        pool.feed.join(ACME, pytest.fail)
    pool.feed.leave(viewers.pop())
    viewers.append(pool.feed.join(ACME, pytest.fail))
    for viewer in viewers:
        pool.feed.leave(viewer)


async def test_a_closed_feed_ends_all_streams_and_takes_no_viewers() -> None:
    pool = Pool()
    viewer = pool.feed.join(ADMIN, pytest.fail)
    await next_of(viewer)
    pool.feed.close()
    pool.feed.close()
    async with asyncio.timeout(WAIT_S):
        while await viewer.next() is not None:
            pass
    pool.feed.leave(viewer)
    with pytest.raises(Unavailable, match="shutting down"):
        pool.feed.join(ADMIN, pytest.fail)


async def test_a_bug_ends_the_streams_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    pool.calls = [None]  # type: ignore[list-item]
    viewer = pool.feed.join(ADMIN, pytest.fail)
    async with asyncio.timeout(WAIT_S):
        assert await viewer.next() is None
    await until(lambda: "cannot make snapshots" in caplog.text)
    pool.feed.leave(viewer)
    pool.calls = []
    async with pool.viewer(ADMIN) as again:
        await next_of(again)
