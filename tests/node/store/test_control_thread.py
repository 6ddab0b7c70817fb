"""What comes while a write is under way goes together in the next one."""

from __future__ import annotations

import asyncio

from baton_node.store.index_client import Work, WriteBatcher
from tests.support.waiting import until


class Server:
    """Writes as slowly as the test wants; `writes` is what it was given."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, list[int]]] = []
        self.go_on = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Work) -> None:
        self.tasks.add(asyncio.create_task(work))

    async def write(self, key: str, batch: list[int]) -> None:
        self.writes.append((key, batch))
        await self.go_on.wait()

    async def settled(self) -> None:
        self.go_on.set()
        await asyncio.gather(*self.tasks)


async def test_what_comes_during_a_write_goes_together_and_in_order_in_the_next() -> None:
    server = Server()
    gathered = WriteBatcher[str, int](server.begin, server.write, most=100)
    gathered.add("a", 0)
    await until(lambda: len(server.writes) == 1)
    for item in range(1, 50):
        assert gathered.add("a", item)
    await server.settled()
    assert server.writes == [("a", [0]), ("a", list(range(1, 50)))]


async def test_one_key_does_not_wait_for_another() -> None:
    server = Server()
    gathered = WriteBatcher[str, int](server.begin, server.write, most=100)
    gathered.add("a", 1)
    gathered.add("b", 2)
    await until(lambda: len(server.writes) == 2)
    await server.settled()


async def test_what_is_too_much_is_refused_and_after_the_write_there_is_room_again() -> None:
    server = Server()
    gathered = WriteBatcher[str, int](server.begin, server.write, most=2)
    gathered.add("a", 0)
    await until(lambda: len(server.writes) == 1)
    assert [gathered.add("a", item) for item in (1, 2, 3)] == [True, True, False]
    await server.settled()
    assert gathered.add("a", 4)
    await server.settled()
    assert server.writes == [("a", [0]), ("a", [1, 2]), ("a", [4])]
