"""Two routers before the same nodes: each knows what the other has booked, and outlives it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from baton_engine.config.engine_config import SimConfig
from baton_node.settings import NodeSettings
from baton_protocol.ids import NodeId
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.support.nodes.processes import free_port, running
from tests.support.pools.processes import Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.integration

NODE = NodeId("decode-0")
PATH = "/v1/completions"

# --- bookings -------------------------------------------------------------------------------------


@asynccontextmanager
async def two_routers(sim: SimConfig) -> AsyncIterator[tuple[Router, Router]]:
    node = NodeSettings(
        node=NODE, role="decode", port=free_port(), engine="sim", kv_blocks=400, sim=sim
    )
    async with running(node) as [process]:
        settings = RouterSettings(
            port=0, nodes=(process.url,), stall_timeout_s=600.0, admission_queue_ms=0.0
        )
        async with Router(settings) as first, Router(settings) as second:
            for router in (first, second):
                await until(lambda view=router.view: list(view.ready()))  # type: ignore[misc]
            yield first, second


async def complete(router: Router, prompt: str, tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{router.port}{PATH}", json=body) as answer,
    ):
        assert answer.status == 200


async def test_what_one_router_books_while_the_engine_is_in_a_step_the_other_counts() -> None:
    async with two_routers(SimConfig(prefill_base_ms=5000.0)) as (first, second):
        view = second.view.nodes[NODE]
        asked = asyncio.create_task(complete(first, "a" * 100, 1))
        await until(lambda: view.sequences == 1)
        await asyncio.sleep(0.5)  # the engine is in the step, which takes 5 s
        more = asyncio.create_task(complete(first, "b" * 200, 1))
        await until(lambda: first.view.nodes[NODE].sequences == 2)
        await until(lambda: view.sequences == 2 or asked.done())
        assert not asked.done()
        assert 200 <= view.queued_tokens <= 300
        await asyncio.gather(asked, more)
        await until(lambda: (view.sequences, view.queued_tokens) == (0, 0))


async def test_a_router_does_not_take_its_own_booking_for_another_routers() -> None:
    async with two_routers(SimConfig(prefill_base_ms=2000.0)) as (first, second):
        view = first.view.nodes[NODE]
        asked = [asyncio.create_task(complete(first, c * 100, 1)) for c in "abc"]
        await until(lambda: second.view.nodes[NODE].sequences == 3)
        seen = set()
        while not all(task.done() for task in asked):
            seen.add((view.others_sequences, view.others_tokens))
            await asyncio.sleep(0.005)
        assert seen == {(0, 0)}
        await asyncio.gather(*asked)


# --- a router that dies ---------------------------------------------------------------------------

STREAMS = 64
SLOW = (
    *("--engine=sim", "--chunk-blocks=1", "--kv-blocks=4000", "--max-model-len=2048"),
    *("--sim-decode-ms=100", "--sim-prefill-ms-per-token=0.5", "--link-grace=2"),
)
LIMIT_S = 120.0


@dataclass
class Stream:
    """`broke`: its connection did, before its end."""

    prompt: str
    placement: str = ""
    events: list[str] = field(default_factory=list)
    broke: bool = False

    @property
    def node(self) -> str:
        found = re.search(r"decode=(\S+)", self.placement)
        assert found, self.placement
        return found[1]

    async def run(self, session: aiohttp.ClientSession, url: str, tokens: int) -> None:
        body = {"prompt": self.prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        try:
            async with session.post(url + PATH, json=body) as answer:
                self.placement = answer.headers["x-baton-placement"]
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        self.events.append(line[6:].decode().strip())
        except aiohttp.ClientError:
            self.broke = True


@pytest.mark.timeout(600)
async def test_a_router_is_killed_and_its_clients_find_their_caches_at_the_other() -> None:
    flags = {"flags": SLOW, "router_flags": ("--handoff=never",), "watch_answers": False}
    with Cluster(0, 2, routers=2, store=False, **flags) as cluster:  # type: ignore[arg-type]
        dead, alive = (router.url for router in cluster.routers)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await until_whole(session, alive)
            await kill_one(cluster, session, dead, alive)


async def kill_one(cluster: Cluster, session: aiohttp.ClientSession, dead: str, alive: str) -> None:
    streams = [Stream(f"stream {number} " * 10) for number in range(STREAMS)]
    lost, kept = streams[::2], streams[1::2]
    # The lost ones would run on for three minutes if their nodes did not drop them.
    tasks = [asyncio.create_task(each.run(session, dead, 1800)) for each in lost]
    tasks += [asyncio.create_task(each.run(session, alive, 60)) for each in kept]
    await until(lambda: all(each.events for each in streams))
    await view_of(session, alive, lambda others: others >= len(lost))
    await asyncio.to_thread(cluster.routers[0].kill)
    killed = time.monotonic()
    await asyncio.gather(*tasks)
    assert all(each.broke and "[DONE]" not in each.events for each in lost)
    assert all(each.events[-1] == "[DONE]" and not each.broke for each in kept)
    await view_of(session, alive, lambda others: others == 0)
    assert time.monotonic() - killed < LIMIT_S
    for each in lost:
        placement, cached = await again(session, alive, each.prompt)
        assert f"decode={each.node}" in placement
        assert cached > 0


async def again(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[str, int]:
    """Placement, and the prompt's tokens that were in a cache."""
    async with session.post(url + PATH, json={"prompt": prompt, "max_tokens": 2}) as answer:
        told: Any = await answer.json()
        return answer.headers["x-baton-placement"], cached_of(told)


def cached_of(told: Any) -> int:
    tokens: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def until_whole(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            pool = await pool_of(session, url)
            if [node["state"] for node in pool["nodes"]] == ["ready", "ready"]:
                return
            await asyncio.sleep(0.05)


async def view_of(session: aiohttp.ClientSession, url: str, true: Any) -> None:
    """Until `true` of how many sequences that router takes for others', with no token queued where
    there are none."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            nodes = (await pool_of(session, url))["nodes"]
            others = sum(node["others"]["sequences"] for node in nodes)
            tokens = sum(node["others"]["tokens"] for node in nodes)
            if true(others) and (others or not tokens):
                return
            await asyncio.sleep(0.05)


async def pool_of(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url + "/pool") as answer:
        return json.loads(await answer.text())
