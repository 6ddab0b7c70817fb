"""Keep-alive comments on streams without tokens; answers without streaming wait silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from baton_protocol.link import Delta, Deltas, JobFailed, RunJob
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

COMMENT = b": waiting\n"
KEEPALIVE_S = 0.05


@asynccontextmanager
async def stream(client: pools.Client) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"prompt": "x", "stream": True}
    async with client.session.post(client.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        yield response


async def send_reply(node: FakeNode) -> None:
    """Let a silent node send its whole reply in one delta."""
    await until(lambda: node.got_of(RunJob))
    request = node.got_of(RunJob)[0].request
    delta = Delta(request.id, 1, 0, 0, ids=(79, 75), text="OK", finish="stop")
    await node.say(Deltas((delta,)))


async def test_a_waiting_stream_starts_with_comments(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode, keepalive_s=KEEPALIVE_S) as client, stream(client) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["x-baton-placement"].startswith("prefill=- decode=decode-0 ")
        assert len(response.headers["x-baton-request-id"]) == 32
        for _ in range(2):
            assert await response.content.readline() == COMMENT
            assert await response.content.readline() == b"\n"
        await send_reply(decode)
        received = await response.text()
    assert '"text":"OK"' in received
    assert received.endswith("data: [DONE]\n\n")


async def test_a_stream_that_waits_for_a_node_gets_comments(decode: FakeNode) -> None:
    async with pools.running(decode, keepalive_s=KEEPALIVE_S) as client:
        await decode.say_load("draining")
        await client.ready(0)
        async with stream(client) as response:
            assert response.headers["x-baton-placement"].startswith("prefill=- decode=- ")
            assert "x-baton-exact" not in response.headers
            assert await response.content.readline() == COMMENT
            await decode.say_load("ready")
            assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_a_stream_that_pauses_gets_comments(decode: FakeNode) -> None:
    decode.script.run = "half"
    async with pools.running(decode, keepalive_s=KEEPALIVE_S) as client, stream(client) as response:
        received = b""
        while received.count(b'"finish_reason":null') < len("Hello,"):
            received += await response.content.readline()
        assert await response.content.readline() == b"\n"  # ends the last token's event
        assert await response.content.readline() == COMMENT


async def test_a_failure_after_a_comment_is_an_error_event(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode, keepalive_s=KEEPALIVE_S) as client, stream(client) as response:
        assert await response.content.readline() == COMMENT
        await until(lambda: decode.got_of(RunJob))
        request = decode.got_of(RunJob)[0].request
        await decode.say(JobFailed(request.id, 1, decode.script.failure))
        received = await response.text()
        last = received.rpartition("data: ")[2]
        assert last.startswith('{"error":{"message":"the engine said no"')
        assert "[DONE]" not in received
        page = await (await client.session.get(client.url + "/metrics")).text()
    assert 'baton_router_requests_total{code="500",endpoint="completions"} 1.0' in page


async def test_an_answer_without_streaming_sends_nothing_while_it_waits(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode, keepalive_s=KEEPALIVE_S) as client:
        answer = asyncio.create_task(client.post("/v1/completions", {"prompt": "x"}))
        await asyncio.sleep(5 * KEEPALIVE_S)
        await send_reply(decode)
        status, body, _ = await answer
    assert (status, body["choices"][0]["text"]) == (200, "OK")
