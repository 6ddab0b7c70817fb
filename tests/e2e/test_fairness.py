"""A tenant that floods a real pool waits for itself: another one's request passes its queue.

Counted in requests, not in seconds: how many of the flood end while the other one waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest

from tests.support.pools.baton_up import Pool

RUNNING, FLOOD = 4, 48  # the node itself says how many it runs
FLAGS = ("--engine", "sim", "--prefill", "0", "--sim-decode-ms", "2", "--max-num-seqs")
DEADLINE_S = 240.0
METRIC = 'baton_router_admission_queue{priority="0"} '


class Clients:
    """`ended`: how many requests of the flood are over."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session
        self.ended = 0

    async def ask(self, tenant: str) -> int:
        body = {"prompt": "x" * 32, "max_tokens": 32, "ignore_eos": True}
        headers = {"Authorization": f"Bearer key-of-{tenant}"}
        url = f"{self.url}/v1/completions"
        async with self.session.post(url, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def flood(self) -> None:
        while True:
            assert await self.ask("acme") == 200
            self.ended += 1


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    keys = tmp_path_factory.mktemp("fairness") / "keys"
    keys.write_text("acme key-of-acme\nglobex key-of-globex\n")
    flags = (*FLAGS, str(RUNNING), "--api-keys", str(keys))
    with Pool(flags, environment={"BATON_ADMIN_KEY": "admins"}) as running:
        yield running


@pytest.mark.parametrize("passing", [True, False], ids=["another tenant", "the same tenant"])
async def test_another_tenant_passes_the_queue_of_one_that_floods(
    pool: Pool, passing: bool
) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(connector=connector) as made:
        clients = Clients(pool.url, made)
        tasks = [asyncio.create_task(clients.flood()) for _ in range(FLOOD)]
        while await queued(pool) < FLOOD - 2 * RUNNING:
            await asyncio.sleep(0.05)
        passed = []
        for _ in range(8 if passing else 2):
            before = clients.ended
            assert await clients.ask("globex" if passing else "acme") == 200
            passed.append(clients.ended - before)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    # It waits for a place and for its answer; the flood's own for the whole queue as well.
    assert (max(passed) < FLOOD / 2) is passing, passed


async def queued(pool: Pool) -> float:
    page = await asyncio.to_thread(pool.get, "/metrics")
    return float(page.partition(METRIC)[2].partition("\n")[0]) if METRIC in page else 0.0
