"""Items that arrive during a write go into the next one together."""

from __future__ import annotations

import asyncio

from baton_node.store.control_thread import Work
from baton_node.store.write_batcher import WriteBatcher
from tests.support.waiting import until


class SlowServer:
    """A server whose writes wait for `proceed`; `writes` records them."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, list[int]]] = []
        self.proceed = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Work) -> None:
        self.tasks.add(asyncio.create_task(work))

    async def write(self, key: str, batch: list[int]) -> None:
        self.writes.append((key, batch))
        await self.proceed.wait()

    async def settled(self) -> None:
        self.proceed.set()
        await asyncio.gather(*self.tasks)


async def test_items_added_during_a_write_go_together_and_in_order_into_the_next() -> None:
    server = SlowServer()
    batcher = WriteBatcher[str, int](server.begin, server.write, most=100)
    batcher.add("a", 0)
    await until(lambda: len(server.writes) == 1)
    for item in range(1, 50):
        assert batcher.add("a", item)
    await server.settled()
    assert server.writes == [("a", [0]), ("a", list(range(1, 50)))]


async def test_one_key_does_not_wait_for_another() -> None:
    server = SlowServer()
    batcher = WriteBatcher[str, int](server.begin, server.write, most=100)
    batcher.add("a", 1)
    batcher.add("b", 2)
    await until(lambda: len(server.writes) == 2)
    await server.settled()


async def test_items_above_the_limit_are_refused_until_the_write_has_ended() -> None:
    server = SlowServer()
    batcher = WriteBatcher[str, int](server.begin, server.write, most=2)
    batcher.add("a", 0)
    await until(lambda: len(server.writes) == 1)
    assert [batcher.add("a", item) for item in (1, 2, 3)] == [True, True, False]
    await server.settled()
    assert batcher.add("a", 4)
    await server.settled()
    assert server.writes == [("a", [0]), ("a", [1, 2]), ("a", [4])]
