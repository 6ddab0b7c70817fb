"""Two routers with the same nodes: each sees the other's bookings, and survives its death."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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


async def test_a_router_counts_another_router_s_bookings_while_the_engine_is_in_a_step() -> None:
    async with two_routers(SimConfig(prefill_base_ms=5000.0)) as (first, second):
        view = second.view.nodes[NODE]
        running_call = asyncio.create_task(complete(first, "a" * 100, 1))
        await until(lambda: view.sequences == 1)
        await asyncio.sleep(0.5)  # the engine is in its step of 5 s
        queued_call = asyncio.create_task(complete(first, "b" * 200, 1))
        await until(lambda: first.view.nodes[NODE].sequences == 2)
        await until(lambda: view.sequences == 2 or running_call.done())
        assert not running_call.done()
        assert 200 <= view.queued_tokens <= 300
        await asyncio.gather(running_call, queued_call)
        await until(lambda: (view.sequences, view.queued_tokens) == (0, 0))


async def test_a_router_does_not_attribute_its_own_bookings_to_others() -> None:
    async with two_routers(SimConfig(prefill_base_ms=2000.0)) as (first, second):
        view = first.view.nodes[NODE]
        calls = [asyncio.create_task(complete(first, c * 100, 1)) for c in "abc"]
        await until(lambda: second.view.nodes[NODE].sequences == 3)
        others = set()
        while not all(task.done() for task in calls):
            others.add((view.others_sequences, view.others_tokens))
            await asyncio.sleep(0.005)
        assert others == {(0, 0)}
        await asyncio.gather(*calls)


# --- a router that dies ---------------------------------------------------------------------------

STREAMS = 64
SLOW = (
    *("--engine=sim", "--chunk-blocks=1", "--kv-blocks=4000", "--max-model-len=2048"),
    *("--sim-decode-ms=100", "--sim-prefill-ms-per-token=0.5", "--link-grace=2"),
)
LIMIT_S = 120.0


@dataclass
class Stream:
    """A client's stream. `broke`: the connection broke before the end."""

    prompt: str
    placement: str = ""
    events: list[str] = field(default_factory=list)
    broke: bool = False

    @property
    def node(self) -> str:
        match = re.search(r"decode=(\S+)", self.placement)
        assert match, self.placement
        return match[1]

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
async def test_after_a_router_is_killed_the_other_one_serves_its_clients_from_the_same_caches() -> (
    None
):
    flags = {"flags": SLOW, "router_flags": ("--handoff=never",), "watch_answers": False}
    with Cluster(0, 2, routers=2, store=False, **flags) as cluster:  # type: ignore[arg-type]
        dead, alive = (router.url for router in cluster.routers)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await until_ready(session, alive)
            await kill_one(cluster, session, dead, alive)


async def kill_one(cluster: Cluster, session: aiohttp.ClientSession, dead: str, alive: str) -> None:
    streams = [Stream(f"stream {number} " * 10) for number in range(STREAMS)]
    lost, kept = streams[::2], streams[1::2]
    # The lost streams would run for three minutes if their nodes did not drop them.
    tasks = [asyncio.create_task(stream.run(session, dead, 1800)) for stream in lost]
    tasks += [asyncio.create_task(stream.run(session, alive, 60)) for stream in kept]
    await until(lambda: all(stream.events for stream in streams))
    await until_others(session, alive, lambda others: others >= len(lost))
    await asyncio.to_thread(cluster.routers[0].kill)
    killed_at = time.monotonic()
    await asyncio.gather(*tasks)
    assert all(stream.broke and "[DONE]" not in stream.events for stream in lost)
    assert all(stream.events[-1] == "[DONE]" and not stream.broke for stream in kept)
    await until_others(session, alive, lambda others: others == 0)
    assert time.monotonic() - killed_at < LIMIT_S
    for stream in lost:
        placement, cached = await complete_at(session, alive, stream.prompt)
        assert f"decode={stream.node}" in placement
        assert cached > 0


async def complete_at(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[str, int]:
    """Complete the prompt; return the placement and the number of cached prompt tokens."""
    async with session.post(url + PATH, json={"prompt": prompt, "max_tokens": 2}) as answer:
        body: Any = await answer.json()
        return answer.headers["x-baton-placement"], cached_of(body)


def cached_of(body: Any) -> int:
    tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def until_ready(session: aiohttp.ClientSession, url: str, nodes: int = 2) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(aiohttp.ClientConnectorError):  # it does not listen yet
                pool = await pool_of(session, url)
                if [node["state"] for node in pool["nodes"]] == ["ready"] * nodes:
                    return
            await asyncio.sleep(0.05)


async def until_others(session: aiohttp.ClientSession, url: str, holds: Any) -> None:
    """Wait until `holds` is true of the number of sequences that this router attributes to other
    routers. With no such sequences, it must also attribute no queued tokens to them."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            nodes = (await pool_of(session, url))["nodes"]
            others = sum(node["others"]["sequences"] for node in nodes)
            tokens = sum(node["others"]["tokens"] for node in nodes)
            if holds(others) and (others or not tokens):
                return
            await asyncio.sleep(0.05)


async def pool_of(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url + "/pool") as answer:
        return json.loads(await answer.text())
