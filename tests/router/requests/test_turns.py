"""Calls that come at one moment take turns, so that what is ready leaves between them."""

from __future__ import annotations

import asyncio

from baton_router.requests.turns import Turns


async def test_one_call_works_per_pass_of_the_loop_in_the_order_of_arrival() -> None:
    turns, passes, worked = Turns(), [0], list[tuple[int, int]]()
    loop = asyncio.get_running_loop()

    def count_pass() -> None:
        passes[0] += 1
        if len(worked) < 4:
            loop.call_soon(count_pass)

    async def call(number: int) -> None:
        await turns.take()
        worked.append((number, passes[0]))

    calls = [asyncio.create_task(call(number)) for number in range(4)]
    loop.call_soon(count_pass)
    await asyncio.gather(*calls)
    assert [number for number, _ in worked] == [0, 1, 2, 3]
    assert len({at for _, at in worked}) == 4, worked


async def test_a_call_whose_client_left_costs_no_turn() -> None:
    turns, worked = Turns(), list[int]()

    async def call(number: int) -> None:
        await turns.take()
        worked.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(4)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert worked == [0, 2, 3]


async def test_a_call_alone_waits_for_nobody() -> None:
    turns, passed = Turns(), list[int]()
    for _ in range(3):
        asyncio.get_running_loop().call_soon(passed.append, 1)
        await turns.take()
        assert not passed
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        passed.clear()
