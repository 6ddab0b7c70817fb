"""When the index counts as lost, and when again as there."""

from __future__ import annotations

import asyncio

import pytest

from baton_kvstore.errors import LinkTimeout, StoreUnavailable
from baton_node.store.index_client import IndexCheck
from tests.support.clock import Clock
from tests.support.waiting import until


class Answers:
    """What the index would say, and its clock."""

    def __init__(self) -> None:
        self.works = True
        self.clock = Clock()
        self.probes = 0

    async def probe(self) -> None:
        self.probes += 1
        if not self.works:
            raise LinkTimeout("no answer")


async def test_what_began_before_the_index_was_last_seen_is_no_loss() -> None:
    index = Answers()
    check = IndexCheck(index.probe, index.clock)
    begun, proceed = asyncio.Event(), asyncio.Event()

    async def late() -> None:
        begun.set()
        await proceed.wait()
        raise LinkTimeout("no answer")

    asking = asyncio.create_task(check.ask(late))
    await begun.wait()
    index.clock.advance(1.0)
    running = asyncio.create_task(check.run())
    await until(lambda: index.probes)
    proceed.set()
    with pytest.raises(StoreUnavailable):
        await asking
    assert not check.away
    running.cancel()


async def test_a_loss_is_probed_at_once_and_refuses_who_asks_meanwhile() -> None:
    index = Answers()
    check = IndexCheck(index.probe, index.clock)
    running = asyncio.create_task(check.run())
    await until(lambda: index.probes)
    index.works = False
    index.clock.advance(1.0)
    asked: list[int] = []

    async def fail() -> None:
        asked.append(1)
        await index.probe()

    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="no answer"):
            await check.ask(fail)
    assert len(asked) == 1
    assert check.away
    index.works = True
    await check.answers()
    assert not check.trouble
    running.cancel()


async def test_a_probe_that_fails_in_an_unforeseen_way_is_a_loss_and_probing_goes_on() -> None:
    index = Answers()
    broken = ["yes"]

    async def probe() -> None:
        if broken:
            raise KeyError("nobody thought of it")

    check = IndexCheck(probe, index.clock)
    running = asyncio.create_task(check.run())
    await until(lambda: check.away)
    broken.clear()
    await check.answers()
    assert not check.trouble
    running.cancel()
