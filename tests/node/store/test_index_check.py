"""When the index counts as lost, and when it counts as usable again."""

from __future__ import annotations

import asyncio

import pytest

from baton_kvstore.errors import LinkTimeout, StoreUnavailable
from baton_node.store.index_check import IndexCheck
from tests.support.clock import Clock
from tests.support.waiting import until


class FakeIndex:
    """An index that fails its probes unless `works`, and a clock."""

    def __init__(self) -> None:
        self.works = True
        self.clock = Clock()
        self.probes = 0

    async def probe(self) -> None:
        self.probes += 1
        if not self.works:
            raise LinkTimeout("no answer")


async def test_a_command_that_began_before_the_last_success_is_no_loss() -> None:
    index = FakeIndex()
    check = IndexCheck(index.probe, index.clock)
    started, proceed = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        started.set()
        await proceed.wait()
        raise LinkTimeout("no answer")

    command = asyncio.create_task(check.ask(slow))
    await started.wait()
    index.clock.advance(1.0)
    running = asyncio.create_task(check.probe_forever())
    await until(lambda: index.probes)
    proceed.set()
    with pytest.raises(StoreUnavailable):
        await command
    assert not check.away
    running.cancel()


async def test_a_loss_is_probed_at_once_and_further_commands_are_refused() -> None:
    index = FakeIndex()
    check = IndexCheck(index.probe, index.clock)
    running = asyncio.create_task(check.probe_forever())
    await until(lambda: index.probes)
    index.works = False
    index.clock.advance(1.0)
    calls: list[int] = []

    async def fail() -> None:
        calls.append(1)
        await index.probe()

    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="no answer"):
            await check.ask(fail)
    assert len(calls) == 1
    assert check.away
    index.works = True
    await check.wait_for_answers()
    assert not check.trouble
    running.cancel()


async def test_a_probe_with_an_unexpected_error_is_a_loss_and_probing_continues() -> None:
    index = FakeIndex()
    errors = [KeyError("unexpected")]

    async def probe() -> None:
        if errors:
            raise errors[0]

    check = IndexCheck(probe, index.clock)
    running = asyncio.create_task(check.probe_forever())
    await until(lambda: check.away)
    errors.clear()
    await check.wait_for_answers()
    assert not check.trouble
    running.cancel()
