"""The feed of `baton top`: it goes on when the router comes back."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from baton_cli.errors import CommandError
from baton_cli.terminal.pool_feed import PoolFeed
from baton_cli.terminal.remote_router import RemoteRouter
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration


class Seen(NamedTuple):
    nodes: list[str]
    problem: str


def seen(feed: PoolFeed) -> Seen:
    assert feed.newest is not None
    return Seen([node.id for node in feed.newest.nodes], feed.problem)


async def test_the_feed_says_that_the_router_is_gone_and_goes_on_when_it_is_back() -> None:
    async with FakeNode("decode-0", "decode") as node:
        settings = RouterSettings(port=0, nodes=(node.address,))
        async with Router(settings) as router:
            port = router.port
            feed = PoolFeed(RemoteRouter(f"http://127.0.0.1:{port}"))
            await asyncio.to_thread(feed.__enter__)
        try:
            await until(lambda: seen(feed).problem.startswith("no router answers at"))
            async with Router(RouterSettings(port=port, nodes=(node.address,))):
                await until(lambda: seen(feed) == (["decode-0"], ""))
        finally:
            await asyncio.to_thread(feed.__exit__, None, None, None)


def test_without_a_router_the_feed_is_an_error() -> None:
    with pytest.raises(CommandError, match="no router answers at http"):
        PoolFeed(RemoteRouter("http://127.0.0.1:1")).__enter__()
