"""Two nodes with one name: the router uses the newer one and reports the conflict."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from baton_protocol.ids import Epoch
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

CONFLICTS = "baton_router_node_name_conflicts"


@pytest.fixture
async def namesake() -> AsyncIterator[FakeNode]:
    """Another node with the name of `decode`."""
    async with FakeNode("decode-0", "decode", epoch=Epoch("epoch-2")) as node:
        yield node


async def conflicts(client: pools.Client) -> list[tuple[str, str]]:
    """Addresses of each conflict in /pool: (the unused node, the node used instead)."""
    conflicts = (await client.get("/pool"))[1]["conflicts"]
    assert all(conflict["node"] == "decode-0" for conflict in conflicts)
    return [(conflict["address"], conflict["held_by"]) for conflict in conflicts]


async def until_conflict(client: pools.Client, unused: FakeNode, used: FakeNode) -> None:
    await until_is(lambda: conflicts(client), [(unused.address, used.address)])


async def test_the_newer_of_two_live_nodes_is_used_and_the_older_one_is_reported(
    decode: FakeNode, namesake: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with pools.running(decode) as client:
        assert await conflicts(client) == []
        client.dial(namesake.address)
        await until_conflict(client, decode, namesake)
        assert await conflicts(client) == [(decode.address, namesake.address)]
        assert await client.figure(CONFLICTS) == 1
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        assert (len(decode.got), len(namesake.got)) == (0, 1)
        [node] = (await client.get("/pool"))[1]["nodes"]
        assert (node["epoch"], node["address"], node["state"]) == (
            "epoch-2",
            namesake.address,
            "ready",
        )
        # The router keeps reconnecting to the unused node, and the name stays with the other one.
        links, hellos = namesake.links, decode.links
        await until(lambda: decode.links >= hellos + 3)
        assert namesake.links == links
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1
        for word in ("decode-0", decode.address, namesake.address, "--node"):
            assert word in errors[0].message


async def test_a_request_on_the_older_node_continues_on_the_newer_one(
    decode: FakeNode, namesake: FakeNode
) -> None:
    decode.script.run = "half"
    async with pools.running(decode) as client:
        answer = pools.completing(client)
        await until(lambda: decode.got)
        client.dial(namesake.address)
        assert pools.text_of(await answer) == pools.REPLY


async def test_the_older_node_takes_over_when_the_newer_one_is_gone_and_then_keeps_the_name(
    decode: FakeNode, namesake: FakeNode
) -> None:
    async with pools.running(decode, link_patience_s=0.1) as client:
        client.dial(namesake.address)
        await until_conflict(client, decode, namesake)
        port = int(namesake.address.rsplit(":", 1)[1])
        await namesake.stop()
        await until_is(lambda: client.epoch("decode-0"), "epoch-1")
        await client.ready(1)
        assert await conflicts(client) == []
        assert await client.figure(CONFLICTS) == 0
        await namesake.start(port)
        await until_conflict(client, namesake, decode)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        assert (len(decode.got), len(namesake.got)) == (1, 0)


async def test_the_newer_node_keeps_its_name_over_a_short_link_break(
    decode: FakeNode, namesake: FakeNode
) -> None:
    async with pools.running(decode, link_patience_s=60.0) as client:
        client.dial(namesake.address)
        await until_conflict(client, decode, namesake)
        links = namesake.links
        hellos = decode.links
        namesake.freeze()
        namesake.cut_links()
        await until(lambda: decode.links >= hellos + 3)
        namesake.wake()
        await until(lambda: namesake.links > links)
        await client.ready(1)
        assert await client.epoch("decode-0") == "epoch-2"


async def test_a_node_that_restarts_at_another_address_is_no_conflict(
    decode: FakeNode, namesake: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async with pools.running(decode) as client:
        await decode.stop()
        client.dial(namesake.address)
        await until_is(lambda: client.epoch("decode-0"), "epoch-2")
        await client.ready(1)
        assert await conflicts(client) == []
        assert "two nodes" not in caplog.text


async def test_a_node_with_a_new_name_at_the_same_address_replaces_the_old_one(
    decode: FakeNode,
) -> None:
    """This happens if a node's default name is random."""
    async with pools.running(decode) as client:
        decode.rename("decode-1")
        await decode.restart("epoch-2")
        await until_is(client.names, ["decode-1"])
        await client.ready(1)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
