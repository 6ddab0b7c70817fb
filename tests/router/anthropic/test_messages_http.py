"""The Messages API over HTTP, through Anthropic's client where one is enough: answers, keys,
headers, errors below the route and in streams, and a lost node."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from baton_protocol.link import JobFailed, RunJob
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
VERSION = {"anthropic-version": "2023-06-01", "anthropic-beta": "of-any-name"}
USER: Any = {"role": "user", "content": "Hi"}
ASK: Any = {"model": "fake-model", "max_tokens": 50, "messages": [USER]}
KEY = "sk-key-of-acme"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@asynccontextmanager
async def official(client: pools.Client, **more: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    settings: dict[str, Any] = {"api_key": "any", "max_retries": 0, **more}
    async with anthropic.AsyncAnthropic(base_url=client.url, **settings) as api:
        yield api


async def test_the_client_reads_an_answer_a_stream_and_a_count(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client, official(client) as api:
        answer = await api.messages.create(**ASK)
        [block] = answer.content
        assert (block.type, answer.stop_reason) == ("text", "end_turn")
        assert block.text == pools.REPLY
        assert answer.id == f"msg_{answer._request_id}"
        assert answer.usage.cache_read_input_tokens == 8
        counted = await api.messages.count_tokens(model="fake-model", messages=[USER])
        assert counted.input_tokens == answer.usage.input_tokens + 8
        async with api.messages.stream(**ASK) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert texts == list(pools.REPLY)
        assert final.content[0].to_dict() == block.to_dict()
        assert final.usage == answer.usage
        empty = await api.messages.create(**ASK | {"max_tokens": 0})
        assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == (
            [],
            "max_tokens",
            0,
        )
        short = await api.messages.create(**ASK | {"max_tokens": 4})
        assert short.stop_reason == "max_tokens"
        stopped = await api.messages.create(**ASK, stop_sequences=["world"])
        assert stopped.usage.output_tokens > 0
        page = await client.text("/metrics")
    assert 'baton_router_requests_total{code="200",endpoint="messages"} 5.0' in page


async def test_the_context_ends_an_answer_that_may_be_longer(decode: FakeNode) -> None:
    decode.script.reply = b"x" * 300
    async with pools.running(decode) as client, official(client) as api:
        answer = await api.messages.create(**ASK | {"max_tokens": 9_000})
        assert answer.stop_reason == "model_context_window_exceeded"
        usage = answer.usage
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert prompt + usage.output_tokens == decode.report.max_model_len


async def test_the_client_lists_models_and_others_get_openai_s_form(decode: FakeNode) -> None:
    async with pools.running(decode) as client, official(client) as api:
        [model] = [model async for model in api.models.list()]
        assert (model.id, model.type, model.max_input_tokens) == ("fake-model", "model", 256)
        assert await api.models.retrieve("fake-model") == model
        _, listed, _ = await client.get("/v1/models")
        assert listed["object"] == "list"
        _, named, _ = await client.get("/v1/models/fake-model")
        assert named["object"] == "model"
        with pytest.raises(anthropic.NotFoundError) as caught:
            await api.models.retrieve("other")
        assert caught.value.error_code == "model_not_found"


@pytest.mark.parametrize("settings", [{"api_key": KEY}, {"api_key": None, "auth_token": KEY}])
async def test_a_key_comes_in_the_header_of_either_client(
    decode: FakeNode, tmp_path: Path, settings: Any
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"acme {KEY}\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        async with official(client, **settings) as api:
            assert (await api.messages.create(**ASK)).stop_reason == "end_turn"
        async with official(client, api_key="other") as api:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await api.messages.create(**ASK)
        assert caught.value.type == "authentication_error"
        status, _, _ = await client.get("/v1/models", {"x-api-key": KEY})
        assert status == 200
        status, body, _ = await client.post(COUNT, ASK)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        both = pools.bearer("other") | {"x-api-key": KEY}
        status, _, _ = await client.get("/v1/models", both)
        assert status == 401


ERRORS: list[tuple[str, str, Any, dict[str, str], int, str]] = [
    ("POST", MESSAGES, ASK | {"model": "other"}, {}, 404, "not_found_error"),
    ("POST", MESSAGES, ASK | {"messages": []}, {}, 400, "invalid_request_error"),
    ("POST", MESSAGES, b"{", {}, 400, "invalid_request_error"),
    ("POST", MESSAGES, ASK | {"system": "x" * 3000}, {}, 413, "request_too_large"),
    ("POST", COUNT, b"[]", {}, 400, "invalid_request_error"),
    ("GET", MESSAGES, None, {}, 405, "invalid_request_error"),
    ("POST", f"{MESSAGES}/batches", {}, {}, 404, "not_found_error"),
    ("GET", f"{MESSAGES}/batches", None, {}, 404, "not_found_error"),
    ("GET", "/v1/files", None, VERSION, 404, "not_found_error"),
    ("GET", "/v1/models/other", None, VERSION, 404, "not_found_error"),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "kind"), ERRORS)
async def test_errors_have_anthropic_s_form(
    decode: FakeNode,
    method: str,
    path: str,
    body: Any,
    headers: dict[str, str],
    status: int,
    kind: str,
) -> None:
    async with pools.running(decode, max_body_bytes=2000) as client:
        if method == "GET":
            answered, error, got = await client.get(path, headers)
        else:
            answered, error, got = await client.post(path, body, headers)
        assert (answered, error["type"], error["error"]["type"]) == (status, "error", kind)
        assert error["request_id"] == got["request-id"] == got["x-request-id"]
        assert error["error"]["details"]["error_code"]


async def test_other_dialects_keep_their_form_and_headers(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for path in (pools.COMPLETIONS, "/v1/chat/completions"):
            status, body, headers = await client.post(path, {}, VERSION)
            assert (status, body["error"]["code"]) == (400, "invalid_value")
            assert "request-id" not in headers
        status, body, headers = await client.get("/v1/nothing")
        assert body["error"]["code"] == "not_found"
        assert "request-id" not in headers


async def test_a_waiting_stream_pings_and_a_failure_is_its_last_event(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with (
        pools.running(decode, keepalive_s=0.05) as client,
        client.session.post(client.url + MESSAGES, json=ASK | {"stream": True}) as response,
    ):
        assert await response.content.readuntil(b"\n\n") == PING
        assert response.headers["request-id"] == response.headers["x-baton-request-id"]
        await until(lambda: decode.got_of(RunJob))
        [job] = decode.got_of(RunJob)
        await decode.say(JobFailed(job.request.id, 1, decode.script.failure))
        name, data = (await response.text()).rpartition("event: ")[2].rstrip().split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("error", "error", "api_error")
    assert error["error"]["message"] == "the engine said no"


async def test_the_client_raises_an_error_in_a_stream(decode: FakeNode) -> None:
    decode.script.run = "half"
    async with pools.running(decode, request_timeout_s=0.5) as client, official(client) as api:
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with api.messages.stream(**ASK) as stream:
                await stream.until_done()
        assert caught.value.type == "timeout_error"
    assert "did not finish" in str(caught.value)


async def test_after_a_lost_node_the_blocks_are_those_of_an_undisturbed_answer(
    decode: FakeNode, other: FakeNode
) -> None:
    decode.script.run = "half"
    async with pools.running(decode) as client, official(client) as api:
        async with api.messages.stream(**ASK) as stream:
            events = []
            async for event in stream:
                events.append(event)
                if event.type == "text" and event.snapshot == "Hello,":
                    client.dial(other.address)
                    await client.ready(2)
                    await decode.stop()
            final = await stream.get_final_message()
        [block] = final.content
        assert block.text == pools.REPLY  # type: ignore[union-attr]
        assert [event.type for event in events].count("content_block_start") == 1
        assert final.usage.output_tokens == len(pools.REPLY)
