"""Two nodes under one name: the newer one is used, and the router says so."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton_protocol.ids import Epoch
from tests.support.nodes.fake_node import FakeNode
from tests.support.pools.failing_pool import REPLY, completing, figure, text
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

CONFLICTS = "baton_router_node_name_conflicts"


@pytest.fixture
async def namesake() -> AsyncIterator[FakeNode]:
    """Another container whose node has the first one's name."""
    async with FakeNode("decode-0", "decode", epoch=Epoch("epoch-2")) as node:
        yield node


async def conflicts(client: Any) -> list[tuple[str, str]]:
    """(not used, used instead)."""
    found = (await client.get("/pool"))[1]["conflicts"]
    assert all(one["node"] == "decode-0" for one in found)
    return [(one["address"], one["held_by"]) for one in found]


async def settled(client: Any, loser: FakeNode, winner: FakeNode) -> None:
    await until_is(lambda: conflicts(client), [(loser.address, winner.address)])


async def test_the_newer_of_two_live_nodes_is_used_and_the_older_one_is_reported(
    running: Any, decode: FakeNode, namesake: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(decode) as client:
        assert await conflicts(client) == []
        client.dial(namesake.address)
        await settled(client, decode, namesake)
        assert await conflicts(client) == [(decode.address, namesake.address)]
        assert await figure(client, CONFLICTS) == 1
        assert text(await completing(client)) == REPLY
        assert (len(decode.got), len(namesake.got)) == (0, 1)
        [node] = (await client.get("/pool"))[1]["nodes"]
        assert (node["epoch"], node["address"], node["state"]) == (
            "epoch-2",
            namesake.address,
            "ready",
        )
        # Both go on saying hello, and nothing changes hands any more.
        links, hellos = namesake.links, decode.links
        await until(lambda: decode.links >= hellos + 3)
        assert namesake.links == links
        told = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(told) == 1
        for word in ("decode-0", decode.address, namesake.address, "--node"):
            assert word in told[0].message


async def test_a_request_on_the_older_node_goes_on_at_the_newer_one(
    running: Any, decode: FakeNode, namesake: FakeNode
) -> None:
    decode.script.run = "half"
    async with running(decode) as client:
        answer = completing(client)
        await until(lambda: decode.got)
        client.dial(namesake.address)
        assert text(await answer) == REPLY


async def test_the_older_node_serves_again_once_the_newer_one_is_gone_and_keeps_the_name(
    running: Any, decode: FakeNode, namesake: FakeNode
) -> None:
    async with running(decode, link_patience_s=0.1) as client:
        client.dial(namesake.address)
        await settled(client, decode, namesake)
        port = int(namesake.address.rsplit(":", 1)[1])
        await namesake.stop()
        await until_is(lambda: client.epoch("decode-0"), "epoch-1")
        await client.ready(1)
        assert await conflicts(client) == []
        assert await figure(client, CONFLICTS) == 0
        await namesake.start(port)
        await settled(client, namesake, decode)
        assert text(await completing(client)) == REPLY
        assert (len(decode.got), len(namesake.got)) == (1, 0)


async def test_a_newer_node_whose_link_breaks_for_a_moment_keeps_its_name(
    running: Any, decode: FakeNode, namesake: FakeNode
) -> None:
    async with running(decode, link_patience_s=60.0) as client:
        client.dial(namesake.address)
        await settled(client, decode, namesake)
        links = namesake.links
        hellos = decode.links
        namesake.freeze()
        namesake.cut_links()
        await until(lambda: decode.links >= hellos + 3)
        namesake.wake()
        await until(lambda: namesake.links > links)
        await client.ready(1)
        assert await client.epoch("decode-0") == "epoch-2"


async def test_a_node_that_starts_again_elsewhere_is_no_conflict(
    running: Any, decode: FakeNode, namesake: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(decode) as client:
        await decode.stop()
        client.dial(namesake.address)
        await until_is(lambda: client.epoch("decode-0"), "epoch-2")
        await client.ready(1)
        assert await conflicts(client) == []
        assert "two nodes" not in caplog.text


async def test_another_name_at_the_same_address_takes_the_old_one_s_place(
    running: Any, decode: FakeNode
) -> None:
    """As where a node's default name is drawn anew at each start."""
    async with running(decode) as client:
        decode.rename("decode-1")
        await decode.restart("epoch-2")
        await until_is(client.names, ["decode-1"])
        await client.ready(1)
        assert text(await completing(client)) == REPLY
