"""The books on a real index: what is counted is there once, on its day, whatever fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import LinkBroken, StoreError
from baton_kvstore.index.usage import DAY_S, KEPT_DAYS, UsageBooks, UsageWriter
from baton_kvstore.keys import usage_key
from baton_protocol.usage import TimeRow, TokenRow, UsageEntry
from tests.support.stores.kvstore import PATIENCE_S, plain_client

pytestmark = pytest.mark.integration

NODE = UsageEntry(
    name="n0",
    role="decode",
    wall_ms=100.0,
    times=(TimeRow("a", "decode", 60.0), TimeRow("", "idle", 40.0)),
)
LATER = msgspec.structs.replace(
    NODE,
    wall_ms=350.0,
    times=(
        TimeRow("a", "decode", 60.0),
        TimeRow("", "idle", 240.0),
        TimeRow("b", "prefill", 50.0),
    ),
)


class SteppedBooks(UsageBooks):
    """Books whose index has the clock of the test. With `deaf`, replies of writes are lost."""

    day = 20_000
    deaf = False

    async def today(self) -> int:
        return self.day

    async def write(self, day: int, name: str, entry: UsageEntry) -> int:
        await super().write(day, name, entry)
        if self.deaf:
            raise LinkBroken("no reply")
        return self.day


@pytest.fixture
async def books(single: EmbeddedStore) -> AsyncIterator[SteppedBooks]:
    async with SteppedBooks(single.index_url, "pool", timeout_s=PATIENCE_S) as books:
        yield books


def writer_of(books: UsageBooks, *states: UsageEntry, name: str = "n0:e1") -> UsageWriter:
    """A writer of a process that counts these states, one at each write."""
    following = iter(states)
    return UsageWriter(books, name, lambda: next(following))


def sums(entries: Iterable[UsageEntry]) -> dict[tuple[str, str], float]:
    return {(row.tenant, row.cause): row.ms for entry in entries for row in entry.times}


async def test_a_later_write_replaces_the_earlier_one(books: SteppedBooks) -> None:
    writer = writer_of(books, NODE, NODE, LATER)
    for _ in range(3):
        await writer.write()
    assert await books.read(books.day) == [LATER]
    assert await books.read(books.day - 1) == []


async def test_a_write_whose_reply_is_lost_counts_once(books: SteppedBooks) -> None:
    writer = writer_of(books, NODE, LATER, LATER)
    books.deaf = True
    for _ in range(2):
        with pytest.raises(StoreError):
            await writer.write()
    books.deaf = False
    await writer.write()
    assert await books.read(books.day) == [LATER]


@pytest.mark.parametrize("step", [1, -1], ids=["the next day", "the clock is set back"])
async def test_another_day_has_only_what_was_added_since(books: SteppedBooks, step: int) -> None:
    writer = writer_of(books, NODE, NODE, LATER, LATER, LATER)
    await writer.write()
    first, books.day = books.day, books.day + step
    for _ in range(3):
        await writer.write()
    assert await books.read(first) == [NODE]
    [added] = await books.read(books.day)
    assert added.wall_ms == 250.0
    assert sums([added]) == {("", "idle"): 200.0, ("b", "prefill"): 50.0}
    books.day = first
    await writer.write()
    assert await books.read(first) == [NODE], "the same day again replaces nothing"


async def test_a_process_that_has_counted_nothing_writes_nothing(books: SteppedBooks) -> None:
    writer = writer_of(books, UsageEntry(name="r"), UsageEntry(name="r"))
    await writer.write()
    await writer.write()
    assert await books.read(books.day) == []


async def test_an_index_that_starts_again_empty_gets_the_day_s_entry_again(
    books: SteppedBooks, single: EmbeddedStore
) -> None:
    writer = writer_of(books, NODE, NODE)
    await writer.write()
    with plain_client(single.index_url) as client:
        client.flushall()
    await writer.write()
    assert await books.read(books.day) == [NODE]


async def test_restarts_and_routers_add_up(books: SteppedBooks) -> None:
    router = UsageEntry(name="r", tokens=(TokenRow("a", "m", 3, 1, 30, 10, 5),))
    for name, entry in (("n0:e1", NODE), ("n0:e2", LATER), ("r-1", router)):
        await writer_of(books, entry, name=name).write()
    assert len(await books.read(books.day)) == 3


async def test_books_end_after_their_time(books: SteppedBooks, single: EmbeddedStore) -> None:
    await writer_of(books, NODE).write()
    with plain_client(single.index_url) as client:
        left_s = client.ttl(usage_key("pool", books.day))
    assert KEPT_DAYS * DAY_S < left_s <= (KEPT_DAYS + 1) * DAY_S


async def test_invalid_entries_are_left_out(books: SteppedBooks, single: EmbeddedStore) -> None:
    await writer_of(books, NODE).write()
    with plain_client(single.index_url) as client:
        client.hset(usage_key("pool", books.day), "x", b"\x00\xff")
        assert abs(client.time()[0] // DAY_S - await UsageBooks.today(books)) <= 1
    assert await books.read(books.day) == [NODE]
