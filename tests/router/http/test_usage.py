"""GET /usage of a router without an index: its own counts, and what nodes that live say."""

from __future__ import annotations

import asyncio
import csv
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_protocol.errors import ErrorRecord
from baton_protocol.link import RequestStats
from tests.router.pools import COMPLETIONS, ask, bearer, explanation_of, running
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

KEYS = "a key-of-a\nb key-of-b\nboss key-of-boss admin\n"
WRONG = {
    "by=colour": "by is 'colour'; use day, tenant, model, node, cause",
    "since=yesterday": "since is 'yesterday'; write a day as 2026-01-31",
    "since=2026-02-02&until=2026-02-01": "since is 2026-02-02, after 2026-02-01",
    "since=2025-01-01&until=2026-01-01": "ask for at most 90",
    "format=xml": "format is 'xml'; use json or csv",
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return str(path)


async def usage_rows(client: Any, query: str = "", key: str = "key-of-boss") -> list[Any]:
    status, body, _ = await client.get(f"/usage?{query}", bearer(key))
    assert status == 200, body
    rows: list[Any] = body["rows"]
    return rows


async def test_each_tenant_reads_its_own_rows_and_an_admin_all(keys: str) -> None:
    async with FakeNode("d", "decode") as node, running(node, api_keys=keys) as client:
        for key in ("key-of-a", "key-of-a", "key-of-b"):
            await client.post(COMPLETIONS, ask(), bearer(key))
        rows = await usage_rows(client)
        assert [(row["tenant"], row["calls"]) for row in rows] == [("a", 2), ("b", 1)]
        for key in ("key-of-a", "key-of-b"):
            [row] = await usage_rows(client, key=key)
            assert row["tenant"] == key[-1]
            status, body, _ = await client.get("/usage", bearer(key))
            assert "wall_ms" not in body
        assert (await client.get("/usage"))[0] == 401
        assert (await client.get("/usage", bearer("nobody")))[0] == 401
        status, body, _ = await client.get("/usage", client._key())
        assert status == 200
        assert len(body["rows"]) == 2


async def test_csv_is_the_sum_of_the_answers_usage() -> None:
    stats = RequestStats(prompt_tokens=9, cached_tokens=4)
    async with FakeNode("d", "decode") as node, running(node) as client:
        node.script.stats = stats
        bodies: list[Any] = [
            (COMPLETIONS, ask()),
            (COMPLETIONS, ask(prompt=["one", "two two"], n=3)),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
        ]
        answers = await asyncio.gather(*(client.post(*body) for body in bodies))
        wanted = {"prompt_tokens": 0, "completion_tokens": 0}
        for status, answer, _ in answers:
            assert status == 200
            used = answer["usage"]
            wanted["prompt_tokens"] += used.get("prompt_tokens") or (
                used["input_tokens"] + used["cache_read_input_tokens"]
            )
            wanted["completion_tokens"] += used.get("completion_tokens") or used["output_tokens"]
        for headers, query in (({"Accept": "text/csv"}, ""), ({}, "format=csv")):
            text = await client.text(f"/usage?by=model&{query}", headers)
            [row] = csv.DictReader(io.StringIO(text))
            assert {name: int(row[name]) for name in wanted} == wanted
            assert row["model"] == "fake-model"
            assert (row["calls"], row["errors"]) == ("4", "0")
            assert int(row["cached_tokens"]) > 0


async def test_failed_calls_are_errors_and_clients_that_left_are_not(keys: str) -> None:
    async with FakeNode("d", "decode") as node, running(node, api_keys=keys) as client:
        node.script.run = "fail"
        node.script.failure = ErrorRecord("no", "engine_error", status=500)
        await client.post(COMPLETIONS, ask(), bearer("key-of-a"))
        await client.post(COMPLETIONS, {"prompt": 3.5}, bearer("key-of-b"))
        node.script.run = "half"
        left = asyncio.create_task(client.post(COMPLETIONS, ask(), bearer("key-of-boss")))
        await until(lambda: client.router.dispatcher.in_flight)
        left.cancel()
        await until(lambda: not client.router.api.generation.answering)
        rows = {row["tenant"]: row for row in await usage_rows(client, "by=tenant,model")}
        assert [(rows[name]["calls"], rows[name]["errors"]) for name in "ab"] == [(1, 1), (1, 1)]
        assert (rows["a"]["model"], rows["b"]["model"]) == ("fake-model", "")
        assert (rows["boss"]["calls"], rows["boss"]["errors"]) == (1, 0)


async def test_an_explanation_has_the_nodes_time() -> None:
    async with FakeNode("d", "decode") as node, running(node) as client:
        spent = msgspec.convert({"decode_ms": 12.5}, type(RequestStats().spent))
        node.script.stats = RequestStats(spent=spent)
        _, _, headers = await client.post(COMPLETIONS, ask())
        explanation = await explanation_of(client, headers["x-baton-request-id"])
        [request] = explanation["requests"]
        assert request["spent"]["decode_ms"] == 12.5
        assert request["spent"]["lost_ms"] == 0.0


async def test_a_wrong_query_is_refused_with_the_value() -> None:
    async with FakeNode("d", "decode") as node, running(node) as client:
        for query, words in WRONG.items():
            status, body, _ = await client.get(f"/usage?{query}")
            assert status == 400, query
            assert words in body["error"]["message"]


async def test_prices_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text("[tokens]\nprompt = 1000\n")
    async with FakeNode("d", "decode") as node, running(node, prices=str(path)) as client:
        node.script.stats = RequestStats()  # nothing was cached
        _, answer, _ = await client.post(COMPLETIONS, ask())
        prompt = answer["usage"]["prompt_tokens"]
        _, body, _ = await client.get("/usage")
        assert body["rows"][0]["cost"] == prompt
        path.write_text("currency = 'EUR'\n[tokens]\nprompt = 2000\n")
        async with asyncio.timeout(60.0):
            while body["currency"] != "EUR":
                _, body, _ = await client.get("/usage")
        assert body["rows"][0]["cost"] == 2 * prompt
