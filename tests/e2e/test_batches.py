"""Batches of a pool whose routers are killed: each line once, with the answer it has alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.router.batches.batch_clients import Json, api_of, ended, jsonl, lines_of
from tests.support.clients.http import exchange, text_of
from tests.support.pools.processes import SIM, Cluster
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
LINES = 120
NODE = (*SIM, "--sim-decode-ms=4", "--max-num-seqs=8")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(1, 1, flags=NODE, router_flags=[f"--file-store={tmp_path}"], routers=2) as pool:
        pool.wait(lambda: is_ready(pool.routers[1].url), "be ready")
        yield pool


def chat(number: int) -> Json:
    """A chat. Half of them are drawn, and some of these have a seed."""
    body: Json = {"messages": [{"role": "user", "content": f"Tell {number}"}], "max_tokens": 40}
    body["temperature"] = number % 2
    return body | ({"seed": number} if number % 4 == 1 else {})


def line(number: int) -> Json:
    return {"custom_id": str(number), "method": "POST", "url": CHAT, "body": chat(number)}


async def done(api: AsyncOpenAI, id: str, lines: int) -> None:
    """Wait until this many lines are answered."""
    async with asyncio.timeout(WAIT_S):
        while True:
            batch = await api.batches.retrieve(id)
            counts = batch.request_counts
            if counts is not None and counts.completed >= lines:
                assert batch.status == "in_progress", "the test is too slow to kill a router"
                return
            await asyncio.sleep(0.02)


async def test_a_batch_survives_each_router_that_runs_it(pool: Cluster) -> None:
    first, second = pool.routers
    async with api_of(first.url) as api:
        data = jsonl([line(number) for number in range(LINES)])
        file = await api.files.create(file=("in.jsonl", data), purpose="batch")
        batch = await api.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await done(api, batch.id, 8)
    pages = {one: pool_metric(one.url) for one in (first, second)}
    runner = max(pages, key=lambda one: pages[one])
    other = second if runner is first else first
    runner.kill()
    async with api_of(other.url) as api:
        answered = (await api.batches.retrieve(batch.id)).request_counts
        assert answered is not None
        await done(api, batch.id, min(LINES - 40, answered.completed + 8))
        other.kill()
        for one in (first, second):
            one.start()
        pool.wait(lambda: is_ready(other.url), "start its router again")
        batch = await ended(api, batch)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        output = await lines_of(api, batch.output_file_id)
        assert set(output) == {str(number) for number in range(LINES)}
        for number in range(0, LINES, 7):
            body = output[str(number)]["response"]["body"]
            if number % 4 == 3:  # drawn, without a seed
                continue
            alone = exchange(other.url, CHAT, chat(number)).body
            assert body["choices"] == alone["choices"], json.dumps([body, alone])


def pool_metric(url: str) -> float:
    """Number of lines that a router has answered."""
    rows = [row for row in text_of(url, "/metrics").splitlines() if "batch_lines_total{" in row]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def is_ready(url: str) -> bool:
    try:
        return exchange(url, "/ready?all=1").status == 200
    except OSError:
        return False
