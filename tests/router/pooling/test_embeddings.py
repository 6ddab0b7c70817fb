"""POST /v1/embeddings with fake nodes: forms, order, failover, limits, models of other tasks."""

from __future__ import annotations

import asyncio
import struct
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_protocol.errors import InvalidRequest
from baton_protocol.link import RunJob
from baton_protocol.pooling import PoolingParams
from baton_router.pooling.embeddings import EmbeddingsCall
from tests.router import pools
from tests.support.engines.special_tokens import enclosed_artifacts
from tests.support.nodes.fake_node import FakeNode, vector_of_ids
from tests.support.waiting import until

pytestmark = pytest.mark.integration

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["one", "a second text", "b", "and the last one"]


@pytest.fixture
async def embedding() -> AsyncIterator[FakeNode]:
    async with FakeNode("embed-0", "decode", pooling="embed") as node:
        yield node


@pytest.fixture
async def second() -> AsyncIterator[FakeNode]:
    async with FakeNode("embed-1", "decode", pooling="embed") as node:
        yield node


def expected(text: str | list[int], **params: Any) -> Any:
    ids = list(text.encode()) if isinstance(text, str) else text
    return pytest.approx(vector_of_ids(ids, PoolingParams(**params)), rel=1e-6)


def vectors(reply: pools.Reply) -> list[Any]:
    status, body, _ = reply
    assert status == 200, body
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    return [item["embedding"] for item in body["data"]]


@pytest.mark.parametrize("given", ["one", TEXTS, [1, 2, 3], [[1, 2], [7]]])
async def test_each_form_of_input_gets_its_vectors(embedding: FakeNode, given: Any) -> None:
    async with pools.running(embedding) as client:
        reply = await client.post(EMBEDDINGS, {"input": given, "model": "fake-model"})
        texts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        assert vectors(reply) == [expected(text) for text in texts]
        _, body, headers = reply
        assert (body["object"], body["model"]) == ("list", "fake-model")
        assert body["id"] == f"embd-{headers['x-baton-request-id']}"
        tokens = sum(map(len, texts))
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
        assert "reason=pooling" in headers["x-baton-placement"]
        explained = await pools.explanation_of(client, headers["x-baton-request-id"])
        assert (explained["endpoint"], len(explained["requests"])) == ("embeddings", len(texts))
        answered = 'baton_router_requests_total{code="200",endpoint="embeddings"}'
        assert await client.figure(answered) == 1


async def test_parameters_reach_the_node_and_base64_has_the_same_numbers(
    embedding: FakeNode,
) -> None:
    async with pools.running(embedding) as client:
        body = {"input": "one", "dimensions": 2, "normalize": False}
        [numbers] = vectors(await client.post(EMBEDDINGS, body))
        assert numbers == expected("one", dimensions=2, normalize=False)
        [text] = vectors(await client.post(EMBEDDINGS, body | {"encoding_format": "base64"}))
        assert list(struct.unpack("<2f", b64decode(text))) == numbers
        assert embedding.got_of(RunJob)[0].request.pooling == PoolingParams(
            normalize=False, dimensions=2
        )


async def test_a_conversation_is_embedded_by_its_ids(embedding: FakeNode) -> None:
    async with pools.running(embedding) as client:
        messages = [{"role": "user", "content": "Hi"}]
        status, tokenized, _ = await client.post("/tokenize", {"messages": messages})
        assert status == 200
        ids = tokenized["tokens"]
        assert vectors(await client.post(EMBEDDINGS, {"input": ids})) == [expected(ids)]


async def test_vectors_are_in_the_order_of_the_texts_whichever_node_is_first(
    embedding: FakeNode, second: FakeNode
) -> None:
    embedding.script.token_s = 0.1
    texts = TEXTS * 8
    async with pools.running(embedding, second, placement="round-robin") as client:
        got = vectors(await client.post(EMBEDDINGS, {"input": texts}))
    assert got == [expected(text) for text in texts]
    assert len(embedding.got_of(RunJob)) == len(second.got_of(RunJob)) == len(texts) // 2


async def test_large_answers_are_complete(embedding: FakeNode) -> None:
    embedding.script.vector = [float(number) for number in range(1024)]
    async with pools.running(embedding) as client:
        got = vectors(await client.post(EMBEDDINGS, {"input": ["x"] * 100}))
    assert got == [embedding.script.vector] * 100


async def test_a_text_whose_node_is_lost_runs_again_elsewhere(
    embedding: FakeNode, second: FakeNode
) -> None:
    embedding.script.run = "silent"
    async with pools.running(embedding, link_patience_s=600.0) as client:
        answer = asyncio.create_task(client.post(EMBEDDINGS, {"input": TEXTS}))
        await until(lambda: len(embedding.got_of(RunJob)) == len(TEXTS))
        await pools.join(client, second)
        await embedding.stop()
        reply = await answer
        assert vectors(reply) == [expected(text) for text in TEXTS]
        assert reply[1]["usage"]["total_tokens"] == sum(map(len, TEXTS))
        assert [job.request.attempt for job in second.got_of(RunJob)] == [2] * len(TEXTS)
        assert await client.unfinished() == await client.booked() == 0


@pytest.mark.parametrize("missing_role", ["aggregate", "queue", "fail"])
async def test_a_node_of_any_role_makes_vectors(embedding: FakeNode, missing_role: str) -> None:
    async with FakeNode("embed-p", "prefill", pooling="embed") as prefill:
        settings = {"placement": "round-robin", "handoff": "always", "missing_role": missing_role}
        async with pools.running(embedding, prefill, **settings) as client:
            vectors(await client.post(EMBEDDINGS, {"input": TEXTS}))
        assert len(prefill.got_of(RunJob)) == len(embedding.got_of(RunJob)) == 2
        assert not any(job.await_first for job in embedding.got_of(RunJob))


# --- models of other tasks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "task", "route", "does", "routes"),
    [
        ("", "generate", EMBEDDINGS, "generates text", "/v1/chat/completions"),
        ("", "generate", "/score", "generates text", "/v1/completions"),
        ("", "generate", "/v2/rerank", "generates text", "/v1/completions"),
        ("embed", "embed", "/v1/completions", "makes vectors of texts", "/v1/embeddings"),
        ("embed", "embed", "/v1/chat/completions", "makes vectors of texts", "/score and /rerank"),
        ("classify", "classify", EMBEDDINGS, "classifies texts", "/score and /rerank"),
        ("classify", "classify", "/v1/completions", "classifies texts", "/score and /rerank"),
    ],
)
async def test_a_model_of_another_task_refuses_and_names_its_routes(
    pooling: Any, task: str, route: str, does: str, routes: str
) -> None:
    bodies = {
        EMBEDDINGS: {"input": "x"},
        "/score": {"queries": "x", "documents": "y"},
        "/v2/rerank": {"query": "x", "documents": ["y"]},
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    async with FakeNode("node-0", "decode", pooling=pooling) as node, pools.running(node) as client:
        status, body, _ = await client.post(route, bodies[route])
        assert (status, body["error"]["code"]) == (400, "wrong_task")
        assert f"model 'fake-model' {does}, but" in body["error"]["message"]
        assert routes in body["error"]["message"]
        assert node.got == []
        assert (await client.get("/v1/models/fake-model"))[1]["task"] == task


async def test_each_call_reaches_the_nodes_of_a_pool_that_can_answer_it(
    embedding: FakeNode, decode: FakeNode
) -> None:
    async with pools.running(embedding) as client:
        client.dial(decode.address)
        await until(lambda: len(list(client.router.view.ready())) == 2)
        for _ in range(3):
            vectors(await client.post(EMBEDDINGS, {"input": TEXTS}))
            assert pools.text_of(await pools.completing(client)) == pools.REPLY
        assert len(embedding.got_of(RunJob)) == 3 * len(TEXTS)
        assert len(decode.got_of(RunJob)) == 3
        assert (await client.node("decode-0"))["differs"] == ["pooling"]


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": [999]}, "input", "invalid_value"),
        ({"input": "x" * 257}, "input", "context_length_exceeded"),
        ({"input": ["x"] * 65}, "input", "too_many_sequences"),
        (
            {"input": "x", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens",
            "invalid_value",
        ),
        ({"input": "x" * 300, "truncate_prompt_tokens": 300}, "input", "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    embedding: FakeNode, body: dict[str, Any], param: str, code: str
) -> None:
    async with pools.running(embedding, max_call_sequences=64) as client:
        status, answer, _ = await client.post(EMBEDDINGS, body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
        assert embedding.got == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "x", "endianness": "big"}, "endianness"),
        ({"input": "x", "stream": True}, "stream"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EmbeddingsCall.from_body(fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, b"<abcdef>"),
        ({"add_special_tokens": False}, b"abcdef"),
        ({"truncate_prompt_tokens": 4}, b"<ab>"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, b"<ef>"),
        ({"truncate_prompt_tokens": -1}, b"<abcdef>"),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, b"abc"),
        ({"truncate_prompt_tokens": 100}, b"<abcdef>"),
    ],
)
async def test_truncation_keeps_the_tokens_that_the_tokenizer_adds(
    embedding: FakeNode, fields: dict[str, Any], ids: bytes
) -> None:
    embedding.serve_artifacts(enclosed_artifacts())
    async with pools.running(embedding) as client:
        vectors(await client.post(EMBEDDINGS, {"input": "abcdef"} | fields))
        assert bytes(pools.only_job(embedding).request.prompt_ids) == ids


async def test_what_fits_is_kept_and_no_text_is_refused_for_the_tokens_around_it(
    embedding: FakeNode,
) -> None:
    embedding.serve_artifacts(enclosed_artifacts())
    embedding.report = msgspec.structs.replace(embedding.report, max_model_len=8)
    async with pools.running(embedding) as client:
        vectors(await client.post(EMBEDDINGS, {"input": "abcdef"}))
        assert (await client.post(EMBEDDINGS, {"input": "abcdefg"}))[0] == 400
        body = {"input": "abcdefg", "truncate_prompt_tokens": -1}
        vectors(await client.post(EMBEDDINGS, body))
        sent = [bytes(job.request.prompt_ids) for job in embedding.got_of(RunJob)]
        assert sent == [b"<abcdef>"] * 2
        body["truncate_prompt_tokens"] = 2
        status, answer, _ = await client.post(EMBEDDINGS, body)
        assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_tenant_pays_for_its_texts_alone(embedding: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("acme sk-acme\n")
    (tmp_path / "limits").write_text("[tenants.acme]\ntokens_per_minute = 10")
    settings = {"api_keys": str(tmp_path / "keys"), "tenants": str(tmp_path / "limits")}
    key = pools.bearer("sk-acme")
    async with pools.running(embedding, **settings) as client:
        for route in (EMBEDDINGS, "/score", "/v2/rerank"):
            assert (await client.post(route, {"input": "x"}))[0] == 401
        status, body, _ = await client.post(EMBEDDINGS, {"input": ["x" * 6] * 2}, key)
        assert (status, body["error"]["code"]) == (400, "over_budget")
        vectors(await client.post(EMBEDDINGS, {"input": ["x" * 5] * 2}, key))
        status, body, _ = await client.post(EMBEDDINGS, {"input": "xxxx"}, key)
        assert (status, body["error"]["code"]) == (429, "rate_limited")
        used = 'baton_router_tenant_tokens_total{kind="prompt",tenant="acme"}'
        assert await client.figure(used) == 10


@pytest.mark.parametrize("vector", [[], [float("nan")], [float("inf"), 1.0]])
async def test_an_answer_that_is_no_vector_is_an_error(
    embedding: FakeNode, vector: list[float]
) -> None:
    embedding.script.vector = vector
    async with pools.running(embedding) as client:
        status, body, _ = await client.post(EMBEDDINGS, {"input": "x"})
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "a node answered with" in body["error"]["message"]
