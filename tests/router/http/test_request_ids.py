"""Request ids: each answer has the client's `x-request-id`, or else the router's."""

from __future__ import annotations

import json
import logging
from typing import Any

import openai
import pytest

from baton_protocol.logs import TextFormatter
from baton_protocol.traces import Span
from tests.router import pools
from tests.router.observability.test_tracing import traced
from tests.support.clients.raw_http import JSON_TYPE, exchange, raw_request
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 2}
HOST = {"Host": "localhost"}
JSON = {"Content-Type": JSON_TYPE}
# Requests that aiohttp refuses before any of the router's handlers runs.
MALFORMED = {
    "an invalid request line": b"nonsense\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    "a length that is not a number": b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    "a header that is too long": b"GET / HTTP/1.1\r\nx-long: " + b"y" * 9000 + b"\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 500 + b"\r\n",
    "invalid chunks": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nthis-is-no-size\r\n",
    "an unknown expectation": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Expect: the-unexpected\r\nContent-Length: 0\r\n\r\n",
}
# The test sends this request's body only after the router has answered 100 Continue.
LATE = raw_request(
    "POST",
    COMPLETIONS,
    {**HOST, **JSON, "Transfer-Encoding": "chunked", "Expect": "100-continue"},
    length=False,
)


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_answers_to_bytes_that_are_not_http_have_the_documented_headers(
    decode: FakeNode, data: bytes
) -> None:
    async with pools.running(decode) as client:
        answer = await exchange(client.router.port, data)
        assert answer.status in (400, 417, 431)
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert len(answer.headers["x-baton-request-id"]) == 32
        assert answer.headers["x-request-id"] == answer.headers["x-baton-request-id"]
        refused = f"prefill=- decode=- reason=refused: {answer.code}"
        assert answer.headers["x-baton-placement"] == refused


async def test_answers_to_invalid_chunks_after_100_continue_have_the_documented_headers(
    decode: FakeNode,
) -> None:
    async with pools.running(decode, body_timeout_s=0.3) as client:
        answer = await exchange(client.router.port, LATE, then=b"this-is-no-size\r\n")
        assert (answer.status, answer.code) == (408, "body_timeout")
        assert answer.headers["x-request-id"] == answer.headers["x-baton-request-id"]
        assert answer.headers["x-baton-placement"].endswith("refused: body_timeout")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/health", None),
        ("/ready", None),
        ("/metrics", None),
        ("/pool", None),
        ("/openapi.json", None),
        ("/v1/models", None),
        ("/nothing/there", None),
        (COMPLETIONS, None),
        (COMPLETIONS, BODY),
        (COMPLETIONS, {**BODY, "stream": True}),
        (COMPLETIONS, {"prompt": 7}),
        ("/nodes/decode-9/drain", {}),
    ],
)
async def test_each_answer_has_the_client_s_id_or_else_the_router_s(
    decode: FakeNode, path: str, body: Any
) -> None:
    method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
    async with pools.running(decode) as client:
        port = client.router.port
        answer = await exchange(port, raw_request(method, path, {**HOST, **JSON}, data))
        assert answer.headers["x-request-id"] == answer.headers["x-baton-request-id"]
        mine = {"x-request-id": "mine: 7/a b"}
        answer = await exchange(port, raw_request(method, path, {**HOST, **JSON, **mine}, data))
        assert answer.headers["x-request-id"] == "mine: 7/a b"
        assert len(answer.headers["x-baton-request-id"]) == 32


@pytest.mark.parametrize(
    "request_id",
    ["", "x" * 129, "caf\u00e9", "a\tb", "\x7f", "a\x80b"],
    ids=["nothing", "too-long", "not-ascii", "a-tab", "delete", "no-utf-8"],
)
async def test_an_invalid_id_is_replaced_by_a_new_one(decode: FakeNode, request_id: str) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nx-request-id: "
    async with pools.running(decode) as client:
        data = head + request_id.encode("latin-1") + b"\r\n\r\n"
        answer = await exchange(client.router.port, data)
    assert answer.headers["x-request-id"] == answer.headers["x-baton-request-id"]
    assert len(answer.headers["x-request-id"]) == 32


async def test_an_id_of_maximum_length_is_returned(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        _, _, headers = await client.get("/health", {"x-request-id": "~" * 128})
    assert headers["x-request-id"] == "~" * 128


async def test_the_client_s_id_is_in_the_log_the_explanation_and_the_trace(
    decode: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spans: list[Span] = []
    async with traced(spans, decode) as client:
        _, _, headers = await client.post(COMPLETIONS, BODY, {"x-request-id": "mine-7"})
        await until(lambda: len(spans) == 2)
        own = headers["x-baton-request-id"]
        _, answer, _ = await client.get(f"/requests/{own}")
        await client.post(COMPLETIONS, BODY)
        await until(lambda: len(spans) == 4)
    assert (answer["id"], answer["client_request_id"]) == (own, "mine-7")
    records = [each for each in caplog.records if vars(each).get("endpoint") == "completions"]
    [first, _] = records
    assert TextFormatter().format(first).endswith(f"request={own} client_request='mine-7'")
    lines = [vars(record) for record in records]
    assert [line["client_request"] for line in lines] == ["mine-7", None]
    assert lines[0]["request"] == own
    calls = [span for span in spans if span.served]
    assert calls[0].attributes["baton.client_request"] == "mine-7"
    assert "baton.client_request" not in calls[1].attributes


async def test_the_openai_client_reads_the_id_of_answers_streams_and_errors(
    decode: FakeNode,
) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    async with (
        pools.running(decode) as client,
        openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="any", max_retries=0) as api,
    ):
        create = api.chat.completions.create
        answer = await create(model="fake-model", messages=messages)
        assert f"chatcmpl-{answer._request_id}" == answer.id
        named = await create(
            model="fake-model", messages=messages, extra_headers={"x-request-id": "mine"}
        )
        assert named._request_id == "mine"
        async with api.chat.completions.with_streaming_response.create(
            model="fake-model", messages=messages, stream=True
        ) as stream:
            assert len(stream.headers["x-request-id"]) == 32
            await stream.read()
        with pytest.raises(openai.NotFoundError) as caught:
            await create(model="another", messages=messages)
        assert caught.value.request_id is not None
        assert len(caught.value.request_id) == 32
