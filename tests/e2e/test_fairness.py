"""A tenant that floods a real pool does not delay another tenant: the other's request overtakes the
queue.

The tests count requests, not seconds: how many requests of the flood finish while the other request
waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest

from tests.support.pools.baton_up import Pool

RUNNING, FLOOD = 4, 48  # RUNNING is the node's --max-num-seqs
FLAGS = ("--engine", "sim", "--prefill", "0", "--sim-decode-ms", "2", "--max-num-seqs")
DEADLINE_S = 240.0
METRIC = 'baton_router_admission_queue{priority="0"} '


class Clients:
    """`finished` is the number of finished requests of the flood."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session
        self.finished = 0

    async def send(self, tenant: str) -> int:
        body = {"prompt": "x" * 32, "max_tokens": 32, "ignore_eos": True}
        headers = {"Authorization": f"Bearer key-of-{tenant}"}
        url = f"{self.url}/v1/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def flood(self) -> None:
        while True:
            assert await self.send("acme") == 200
            self.finished += 1


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    keys = tmp_path_factory.mktemp("fairness") / "keys"
    keys.write_text("acme key-of-acme\nglobex key-of-globex\n")
    flags = (*FLAGS, str(RUNNING), "--api-keys", str(keys))
    with Pool(flags, environment={"BATON_ADMIN_KEY": "admins"}) as running:
        yield running


@pytest.mark.parametrize("other_tenant", [True, False], ids=["another tenant", "the same tenant"])
async def test_only_another_tenants_request_overtakes_the_queue_of_a_flooding_tenant(
    pool: Pool, other_tenant: bool
) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(connector=connector) as session:
        clients = Clients(pool.url, session)
        tasks = [asyncio.create_task(clients.flood()) for _ in range(FLOOD)]
        while await queued(pool) < FLOOD - 2 * RUNNING:
            await asyncio.sleep(0.05)
        finished_meanwhile = []
        for _ in range(8 if other_tenant else 2):
            before = clients.finished
            assert await clients.send("globex" if other_tenant else "acme") == 200
            finished_meanwhile.append(clients.finished - before)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    # A request of the flooding tenant also waits for the whole queue.
    assert (max(finished_meanwhile) < FLOOD / 2) is other_tenant, finished_meanwhile


async def queued(pool: Pool) -> float:
    page = await asyncio.to_thread(pool.get, "/metrics")
    return float(page.partition(METRIC)[2].partition("\n")[0]) if METRIC in page else 0.0
