"""A router that idles for a year or runs for a week, by a simulated clock: no number overflows, no
tenant is charged for usage of long ago, and no container grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.ids import BlockHash, Epoch, Fingerprint, NodeId, RequestId
from baton_protocol.link import CacheEvents, Load
from baton_protocol.store import NodeLoad, Role, Speeds
from baton_router.admission.budgets import OwnBuckets, draws_of
from baton_router.admission.fair_queue import FairQueue, Waiter
from baton_router.admission.tenant_limits import TenantLimits
from baton_router.admission.usage_shares import UsageShares
from baton_router.nodes.kv_events import KVEventListener
from baton_router.nodes.pool_view import PoolView
from baton_router.settings import RouterSettings
from tests.router import pools
from tests.support.clock import Clock
from tests.support.growth import HOUR_S, WEEK_S, YEAR_S, grown, nan_paths, sizes
from tests.support.nodes.fake_node import FakeNode, make_report
from tests.support.waiting import until_is

KEYS = {"acme": "sk-acme", "globex": "sk-globex", "ops": "sk-ops"}
LIMITS = "[tenants.acme]\nweight = 2\ntokens_per_minute = 60000\nrequests_per_minute = 600\n"
ROLES: tuple[Role, ...] = ("prefill", "decode")
HOURS = 24 * 365


class AheadClock:
    """The machine's monotonic clock plus `ahead_s` seconds."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@asynccontextmanager
async def serving(
    folder: Path, clock: AheadClock, *nodes: FakeNode, **settings: Any
) -> AsyncIterator[pools.Client]:
    """A router with tenants, weights and budgets, connected to these nodes."""
    lines = [f"{name} {key}{' admin' * (name == 'ops')}" for name, key in KEYS.items()]
    (folder / "keys").write_text("\n".join(lines))
    (folder / "limits").write_text(LIMITS)
    router_settings = RouterSettings(
        port=0,
        nodes=tuple(node.address for node in nodes),
        api_keys=str(folder / "keys"),
        link_token="t0ken-of-the-tests",
        tenants=str(folder / "limits"),
        explain_requests=20,
        **settings,
    )
    async with pools.connected(router_settings, clock=clock) as client:
        await client.ready(len(nodes))
        yield client


async def send_call(client: pools.Client, number: int, **fields: Any) -> int:
    """Send call `number`; the tenants take turns."""
    tenant = list(KEYS)[number % len(KEYS)]
    bearer = {"Authorization": f"Bearer {KEYS[tenant]}"}
    prompts = [f"prompt {number} " * 3, f"another {number}", f"third {number}"]
    body = {"prompt": prompts if number % 4 == 0 else prompts[0], "n": 1 + number % 2}
    body |= {"max_tokens": 3} | fields
    status, reply, _ = await client.post("/v1/completions", body, bearer)
    assert status == 200, reply
    return status


async def send_calls(client: pools.Client, first: int, count: int) -> None:
    await asyncio.gather(*(send_call(client, first + number) for number in range(count)))
    await until_is(client.unfinished, 0)
    await until_is(client.answering, 0)


@pytest.mark.integration
@pytest.mark.parametrize(
    "idle_s", [59 * 60.0, 86_400.0, YEAR_S], ids=["an hour", "a day", "a year"]
)
async def test_a_router_serves_each_tenant_as_before_after_a_long_idle_time(
    tmp_path: Path, decode: FakeNode, prefill: FakeNode, idle_s: float
) -> None:
    clock = AheadClock()
    async with serving(tmp_path, clock, decode, prefill, max_inflight=4) as client:
        await send_calls(client, 0, 12)
        for turn in range(3):
            clock.ahead_s += idle_s
            await send_calls(client, 12 * (turn + 1), 12)
        assert nan_paths(client.router) == []
        ops = {"Authorization": f"Bearer {KEYS['ops']}"}
        assert " nan" not in (await client.text("/metrics", ops)).lower()
        status, pool, _ = await client.get("/pool", ops)
        assert status == 200
        assert all(node["state"] == "ready" for node in pool["nodes"])


async def run_for(hours: int, folder: Path, *nodes: FakeNode) -> None:
    """Run for `hours` hours, and compare the containers' sizes at half-time and at the end."""
    clock = AheadClock()
    async with serving(folder, clock, *nodes, max_inflight=4) as client:
        snapshots = []
        for hour in range(hours):
            await send_calls(client, 12 * hour, 12)
            clock.ahead_s += HOUR_S
            if hour + 1 in (hours // 2, hours):
                snapshots.append(sizes(client.router))
        # Each prompt has new words; tests/text/test_word_ids.py tests the bound of known ones.
        assert [path for path in grown(*snapshots) if "._words._known" not in path] == []
        assert nan_paths(client.router) == []


@pytest.mark.integration
async def test_a_router_that_runs_for_a_day_does_not_grow(
    tmp_path: Path, decode: FakeNode, prefill: FakeNode
) -> None:
    await run_for(24, tmp_path, decode, prefill)


@pytest.mark.integration
@pytest.mark.long
async def test_a_router_that_runs_for_a_week_does_not_grow(
    tmp_path: Path, decode: FakeNode, prefill: FakeNode
) -> None:
    await run_for(168, tmp_path, decode, prefill)


# --- nodes that come and go -----------------------------------------------------------------------


def simulate_day(view: PoolView, listener: KVEventListener, clock: Clock, day: int) -> None:
    """Simulate one day: nodes of a new revision, with a new fingerprint and new names, get
    requests, restart once, lose cache events, and are replaced by the next revision."""
    for number in range(4):
        role = ROLES[number % 2]
        name, kind = NodeId(f"{role}-{day}-{number}"), Fingerprint(f"{day:032x}")
        for start in range(2):
            epoch = Epoch(f"{name}-{start}")
            view.hello(make_report(name, role, fingerprint=kind, epoch=epoch))
            hashes = [BlockHash(f"{day:06}{number:02}{chunk:08}".encode()) for chunk in range(200)]
            listener.apply_events(name, CacheEvents(epoch, tuple(hashes), reset=True, seq=0))
            listener.apply_events(name, CacheEvents(epoch, (), tuple(hashes[:50]), seq=1))
            # Frames 2 to 4 are missing.
            listener.apply_events(name, CacheEvents(epoch, tuple(hashes[:9]), seq=5))
            listener.next_listings()
        for request in range(20):
            id = RequestId(f"{name}-{request}")
            view.book(name, id, 100, 1)
            view.prefilled(name, id)
            view.release(name, id)
        leaving = Load(epoch, "draining", Speeds(), NodeLoad(), replaced_by=f"revision-{day + 1}")
        view.load(name, leaving)
        clock.advance(HOUR_S)
    for node in list(view.nodes):
        listener.forget_node(node)
        view.lost(node)
        view.forget(node)


@pytest.mark.parametrize("days", [30, pytest.param(365, marks=pytest.mark.long)])
def test_nothing_is_kept_of_forgotten_nodes(days: int) -> None:
    clock = Clock()
    limit = 1000
    view = PoolView(clock, max_chunks=limit)
    listener = KVEventListener(view, clock)
    snapshots = []
    for day in range(days):
        simulate_day(view, listener, clock, day)
        if day + 1 in (days // 2, days):
            snapshots.append(sizes(view) + sizes(listener))
    # Until the index is full, it keeps hashes of chunks that no node holds any more.
    assert [name for name in grown(*snapshots) if not name.endswith("chunks._bits")] == []
    assert len(view.chunks) <= limit
    assert not view.nodes


# --- tenants --------------------------------------------------------------------------------------


def test_nothing_is_kept_of_tenants_that_have_gone() -> None:
    """Each hour a new tenant waits, is served, uses its budget, and disappears."""
    clock = Clock()
    shares, buckets, queue = UsageShares(clock, 30.0), OwnBuckets(), FairQueue(100)
    running = UsageShares(clock)
    limits = TenantLimits(tokens_per_minute=6000, requests_per_minute=60)
    snapshots = []
    for hour in range(HOURS):
        tenant = f"tenant-{hour}"
        waiter = Waiter(tenant, 5000, weight=0.1 + hour % 7)
        queue.add(waiter)
        queue.take_head(waiter)
        shares.add(tenant, 5000.0, waiter.weight)
        running.add(tenant, 3, waiter.weight)
        running.give_back(tenant, 3)
        buckets.take(tenant, draws_of(limits, 1, 5000), clock.now)
        clock.advance(HOUR_S)
        if hour + 1 in (HOURS // 2, HOURS):
            snapshots.append(sum(map(sizes, (shares, running, buckets, queue)), sizes(())))
    assert grown(*snapshots) == {}
    assert [nan_paths(part) for part in (shares, running, buckets, queue)] == [[]] * 4


def test_a_queue_that_takes_turns_for_a_week_still_shares_by_weight() -> None:
    """A million tokens per second for a week; the virtual time counts tokens."""
    queue = FairQueue(100)
    tokens = int(1e6 * WEEK_S / 1000)
    heavy, light = Waiter("heavy", tokens, weight=0.001), Waiter("light", tokens, weight=1.0)
    for waiter in (heavy, light):
        queue.add(waiter)
    for _ in range(1000):
        head = next(queue.heads())
        queue.take_head(head)
        queue.add(Waiter(head.tenant, tokens, head.weight))
    turns = {"three": 0, "one": 0}
    for name in turns:
        for _ in range(5):
            queue.add(Waiter(name, 10, weight=3.0 if name == "three" else 1.0))
    while max(turns.values()) < 3:
        head = next(head for head in queue.heads() if head.tenant in turns)
        turns[head.tenant] += 1
        queue.take_head(head)
    assert turns["three"] == 3
    assert turns["one"] <= 1
