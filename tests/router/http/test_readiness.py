"""GET /ready, and `?all=1` for scripts that wait until every node of a pool is ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton_router.settings import RouterSettings, Tunables
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.processes import free_port
from tests.support.waiting import until_is

pytestmark = pytest.mark.integration

ALL = "/ready?all=1"


@asynccontextmanager
async def starting(*nodes: FakeNode, **settings: Any) -> AsyncIterator[pools.Client]:
    """A router that may not be ready yet."""
    addresses = tuple(node.address for node in nodes)
    options: dict[str, Any] = {"tunables": Tunables(reconnect_max_s=0.05), "nodes": addresses}
    options |= {"port": 0} | settings
    async with pools.connected(RouterSettings(**options)) as client:
        yield client


async def test_ready_needs_one_node_and_all_needs_every_node(
    decode: FakeNode, prefill: FakeNode
) -> None:
    unreachable = f"http://127.0.0.1:{free_port()}"
    settings = {"nodes": (decode.address, unreachable), "expect_nodes": ("decode-0", "prefill-0")}
    async with starting(**settings) as client:
        await client.ready(1)
        assert (await client.get("/ready"))[:2] == (200, {"ready": True, "reason": ""})
        await until_is(client.unreachable, [unreachable])
        status, reply, _ = await client.get(ALL)
        assert (status, reply["ready"]) == (503, False)
        assert reply["reason"] == f"not ready: {unreachable} (unreachable), prefill-0 (missing)"
        [first, missing] = reply["not_ready"]
        assert (first["node"], first["address"]) == (None, unreachable)
        assert first["state"] == "unreachable"
        assert "Cannot connect" in first["reason"]
        assert (missing["node"], missing["state"]) == ("prefill-0", "missing")
    async with starting(decode, prefill, expect_nodes=("decode-0", "prefill-0")) as client:
        await client.ready(2)
        ready = {"ready": True, "reason": "", "not_ready": []}
        assert (await client.get(ALL))[:2] == (200, ready)
        assert (await client.get("/ready?all=true"))[:2] == (200, ready)


async def test_a_node_that_drains_or_is_lost_is_named_with_its_state(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.running(decode, other) as client:
        assert (await client.get(ALL))[0] == 200
        await other.say_load("draining")
        await client.ready(1)
        status, reply, _ = await client.get(ALL)
        [entry] = reply["not_ready"]
        assert (status, entry["node"], entry["state"]) == (503, "decode-1", "draining")
        assert (entry["address"], entry["reason"]) == (other.report.address, "")
        assert (await client.get("/ready"))[0] == 200
        await other.stop()
        await until_is(lambda: client.state("decode-1"), "lost")
        status, reply, _ = await client.get(ALL)
        assert (status, reply["reason"]) == (503, "not ready: decode-1 (lost)")


async def test_a_router_that_shuts_down_is_not_ready(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        client.router.api.generation.draining = True
        for path in ("/ready", ALL):
            status, reply, _ = await client.get(path)
            assert (status, reply["reason"]) == (503, "the router is shutting down")


@pytest.mark.parametrize("query", ["all=0", "all=false", "", "other=1"])
async def test_without_all_one_ready_node_is_enough(decode: FakeNode, query: str) -> None:
    async with pools.running(decode, expect_nodes=("prefill-0",)) as client:
        status, reply, _ = await client.get(f"/ready?{query}")
        assert (status, reply) == (200, {"ready": True, "reason": ""})


@pytest.mark.parametrize("query", ["all", "all=", "all=2", "all=yes", "all=TRUE", "all=1&all=1"])
async def test_another_value_of_all_is_a_400_that_names_it(decode: FakeNode, query: str) -> None:
    async with pools.running(decode) as client:
        status, reply, _ = await client.get(f"/ready?{query}")
        assert (status, reply["error"]["param"]) == (400, "all")
        assert "use 1 or true" in reply["error"]["message"]
