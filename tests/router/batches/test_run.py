"""Runs of one batch by several routers, of which some are killed: one line per line, one end."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from baton_router.batches.files import FileLimits, Files
from baton_router.batches.journal import Journal, LineAnswer
from baton_router.batches.lines import RawLine, answered_line, read_line
from baton_router.batches.records import Batch, BatchOrder, RequestCounts
from baton_router.batches.run import BatchRun, BatchWorkshop
from tests.router.batches.batch_clients import jsonl, line
from tests.router.batches.memory_store import Killed, MemoryStore

NOW = 1_000_000.0
LINES = 12
TENANT = "acme"


class Lines:
    """Answers with the line's number; every third line has an error. `ran` counts the lines."""

    def __init__(self) -> None:
        self.ran: Counter[int] = Counter()
        self.stopping = False

    def has_room(self) -> bool:
        return True

    async def answer(self, order: BatchOrder, line: RawLine) -> LineAnswer | None:
        self.ran[line.number] += 1
        await asyncio.sleep(0)
        succeeded = line.number % 3 != 0
        body = json.dumps({"line": line.number}).encode()
        status, id = 200 if succeeded else 400, f"request {line.number}"
        data = answered_line(order, line, read_line(line).custom_id, status, id, body)
        return LineAnswer(line.number, succeeded, data)


def workshop(store: MemoryStore, lines: Lines, ends: list[str]) -> BatchWorkshop:
    limits = FileLimits(file_bytes=1 << 20, tenant_bytes=1 << 20, tenant_files=10, ttl_s=3600)
    return BatchWorkshop(
        files=Files(store, limits, lambda: NOW),
        journal=Journal(store, lambda: NOW),
        lines=lines,
        longest_line=1000,
        most_lines=100,
        now=lambda: NOW,
        ended=ends.append,
    )


async def queued(objects: dict[str, bytes]) -> BatchOrder:
    """A batch with LINES lines."""
    shop = workshop(MemoryStore(objects), Lines(), [])

    async def chunks() -> AsyncIterator[bytes]:
        yield jsonl([line(number) for number in range(1, LINES + 1)])

    file = shop.files.describe(await shop.files.receive(TENANT, chunks()), "in", "batch")
    await shop.files.publish(TENANT, file)
    batch = await shop.journal.add(
        TENANT,
        endpoint="/v1/completions",
        input_file_id=file.id,
        input_bytes=file.bytes,
        window="24h",
        window_s=86_400,
        metadata=None,
        output_ttl_s=3600,
    )
    return (await shop.journal.find(TENANT, batch.id)).order


async def check(objects: dict[str, bytes], order: BatchOrder, ends: list[str]) -> None:
    """The batch has ended once, each line has its answer once, and nothing is left over."""
    shop = workshop(MemoryStore(objects), Lines(), [])
    batch: Batch = await shop.journal.describe(await shop.journal.find(TENANT, order.id))
    assert (batch.status, ends) == ("completed", ["completed"])
    numbers = []
    for id, status in ((batch.output_file_id, 200), (batch.error_file_id, 400)):
        assert id is not None
        file = await shop.files.find(TENANT, id)
        data = await shop.files.read_range(TENANT, id, 0, file.bytes + 1)
        for row in map(json.loads, (data or b"").splitlines()):
            assert row["response"]["status_code"] == status
            assert row["custom_id"] == f"line {row['response']['body']['line']}"
            numbers.append(row["response"]["body"]["line"])
    assert sorted(numbers) == list(range(1, LINES + 1))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (8, 4)
    assert await shop.journal.open_batches() == {}
    assert [key for key in objects if key.startswith("parts/")] == []


async def test_a_batch_whose_routers_are_killed_at_any_operation_ends_whole() -> None:
    operations = MemoryStore({}, dies_in=1e9)
    await BatchRun(workshop(operations, Lines(), []), await queued(operations.objects)).run()
    needed = int(1e9 - operations.dies_in)
    assert 20 < needed < 100
    for lives in range(needed):
        objects: dict[str, bytes] = {}
        order, ends = await queued(objects), list[str]()
        with suppress(Killed):
            await BatchRun(workshop(MemoryStore(objects, lives), Lines(), ends), order).run()
        for _ in range(2):  # the second finds nothing to do
            await BatchRun(workshop(MemoryStore(objects), Lines(), ends), order).run()
        await check(objects, order, ["completed"])


@pytest.mark.parametrize("seed", range(40))
async def test_routers_that_run_one_batch_at_once_end_it_once(seed: int) -> None:
    rng, objects, ends = random.Random(seed), dict[str, bytes](), list[str]()
    order = await queued(objects)

    async def run(lives: float) -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        with suppress(Exception):
            await BatchRun(workshop(MemoryStore(objects, lives), Lines(), ends), order).run()

    await asyncio.gather(*(run(rng.choice([1e9, rng.randrange(80)])) for _ in range(3)))
    await run(1e9)
    await check(objects, order, ends)
    published = [key for key in objects if key.startswith("files/")]
    kept = [key for key in objects if key.startswith("data/")]
    assert len(published) == 3
    assert len(kept) >= 3


async def test_answered_lines_do_not_run_again() -> None:
    objects: dict[str, bytes] = {}
    order, first, second = await queued(objects), Lines(), Lines()
    store, ends = MemoryStore(objects), list[str]()
    shop = workshop(store, first, ends)
    answers = [
        answer
        for number, each in enumerate(jsonl([line(n) for n in range(1, 6)]).split(b"\n"), start=1)
        if (answer := await first.answer(order, RawLine(number, each))) is not None
    ]
    await shop.journal.keep_answers(order, answers)
    await shop.journal.keep_answers(order, answers[:2])  # a router that was thought dead
    await BatchRun(workshop(store, second, ends), order).run()
    assert second.ran == Counter(range(6, LINES + 1))
    await check(objects, order, ends)


async def test_a_router_that_ends_leaves_the_rest_to_another() -> None:
    objects: dict[str, bytes] = {}
    order, ending, ends = await queued(objects), Lines(), list[str]()
    ending.stopping = True
    await BatchRun(workshop(MemoryStore(objects), ending, ends), order).run()
    assert (ending.ran, ends) == (Counter(), [])
    await BatchRun(workshop(MemoryStore(objects), Lines(), ends), order).run()
    await check(objects, order, ends)


async def test_a_batch_whose_input_is_deleted_fails() -> None:
    objects: dict[str, bytes] = {}
    order, ends = await queued(objects), list[str]()
    shop = workshop(MemoryStore(objects), Lines(), ends)
    await shop.files.delete(TENANT, order.input_file_id)
    await BatchRun(shop, order).run()
    batch = await shop.journal.describe(await shop.journal.find(TENANT, order.id))
    assert (batch.status, ends) == ("failed", ["failed"])
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data] == ["input_file_gone"]


async def test_each_line_of_a_failed_batch_that_did_not_succeed_counts_as_failed() -> None:
    objects: dict[str, bytes] = {}
    order, lines, ends = await queued(objects), Lines(), list[str]()
    shop = workshop(MemoryStore(objects), lines, ends)
    answers = [
        answer
        for number, each in enumerate(jsonl([line(n) for n in range(1, 6)]).split(b"\n"), start=1)
        if (answer := await lines.answer(order, RawLine(number, each))) is not None
    ]
    await shop.journal.note(order, "begun", LINES)
    await shop.journal.keep_answers(order, answers)
    await shop.files.delete(TENANT, order.input_file_id)
    await BatchRun(shop, order).run()
    batch = await shop.journal.describe(await shop.journal.find(TENANT, order.id))
    assert (batch.status, ends) == ("failed", ["failed"])
    assert batch.request_counts == RequestCounts(total=LINES, completed=4, failed=LINES - 4)
    for id, count in ((batch.output_file_id, 4), (batch.error_file_id, 1)):
        assert id is not None
        file = await shop.files.find(TENANT, id)
        data = await shop.files.read_range(TENANT, id, 0, file.bytes + 1)
        assert len((data or b"").splitlines()) == count, "an input that is gone cannot be listed"
