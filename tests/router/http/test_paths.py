"""Paths with a slash too many, as clients make them from a base URL that ends with one."""

from __future__ import annotations

import asyncio
import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.link import DrainNode
from baton_router.errors import StartError
from tests.router import pools
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()


async def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """Status and body of the answer to exactly this path, which most clients would change."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = {"Host": "localhost", "Connection": "close"}
    headers |= {"Content-Type": JSON_TYPE} if body else {}
    writer.write(raw_request(method, path, headers, body))
    head, _, text = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), text


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("//v1/models", b'"fake-model"'),
        ("/v1/models/", b'"fake-model"'),
        ("/v1//models", b'"fake-model"'),
        ("///v1///models///", b'"fake-model"'),
        ("//v1/models/fake-model/", b'"fake-model"'),
        ("//v1/models?x=//a/", b'"fake-model"'),
        ("//health", b""),
        ("/ready/?all=1", b'"ready":true'),
        ("//ready?all=maybe", b"maybe"),
        ("/openapi.json/", b'"openapi"'),
        ("//pool/", b'"nodes"'),
        ("/metrics/", b"baton_"),
    ],
)
async def test_a_get_with_a_slash_too_many_is_answered(
    decode: FakeNode, path: str, part: bytes
) -> None:
    async with pools.running(decode) as client:
        status, text = await ask(client.router.port, "GET", path)
    assert status == (400 if "maybe" in path else 200)
    assert part in text


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "byte order mark"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1//chat//completions/?a=b",
    ],
)
async def test_a_generation_with_a_slash_too_many_is_answered_and_logged(
    decode: FakeNode,
    path: str,
    mark: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "baton_router")
    async with pools.running(decode) as client:
        status, text = await ask(client.router.port, "POST", path, mark + CHAT)
    assert status == 200, text
    assert b"Hello, world!" in text
    assert any("chat" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "path", ["//nodes/decode-0/drain", "/nodes/decode-0/drain/", "/nodes//decode-0/drain"]
)
async def test_a_command_needs_its_exact_path(decode: FakeNode, path: str) -> None:
    async with pools.running(decode) as client:
        status, text = await ask(client.router.port, "POST", path)
        assert (status, b"not_found" in text) == (404, True)
        assert not decode.got_of(DrainNode)


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/models/", "/v1//models", "//pool", "/metrics/", "//requests/x"]
)
async def test_a_path_with_a_slash_too_many_needs_the_same_key(
    decode: FakeNode, path: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice the-only-key-of-this-test\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        status, _ = await ask(client.router.port, "GET", path)
    assert status == 401


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models", 200),
        ("/team/llm/v1/models", 200),
        ("//team/llm//v1/models/", 200),
        ("/team/llm/metrics?names=vllm", 200),
        ("/team/llm", 307),  # to the live page
        ("/team/llm/", 200),
        ("/team/llm2/v1/models", 404),
        ("/team/v1/models", 404),
        ("/team/llm/team/llm/v1/models", 404),
    ],
)
async def test_routes_work_with_and_without_the_root_path(
    decode: FakeNode, path: str, status: int
) -> None:
    async with pools.running(decode, root_path="/team/llm") as client:
        assert (await ask(client.router.port, "GET", path))[0] == status


@pytest.mark.parametrize(
    ("path", "status"),
    [("/llm/nodes/decode-0/drain", 200), ("/llm//nodes/decode-0/drain", 404)],
)
async def test_a_command_below_the_root_path_needs_its_exact_path(
    decode: FakeNode, path: str, status: int
) -> None:
    async with pools.running(decode, root_path="/llm") as client:
        assert (await ask(client.router.port, "POST", path))[0] == status
        assert len(decode.got_of(DrainNode)) == (status == 200)


async def test_a_path_below_the_root_path_needs_the_same_key(
    decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice the-only-key-of-this-test\n")
    async with pools.running(decode, root_path="/llm", api_keys=str(keys)) as client:
        for path in ("/llm/v1/models", "/llm/pool", "/llm//metrics", "/llm/requests/x"):
            assert (await ask(client.router.port, "GET", path))[0] == 401


async def test_the_document_names_the_root_path(decode: FakeNode) -> None:
    for root_path, url in (("", "/"), ("/llm", "/llm")):
        async with pools.running(decode, root_path=root_path) as client:
            openapi = (await client.get("/openapi.json"))[1]
        assert openapi["servers"] == [{"url": url}]


@pytest.mark.parametrize("root_path", ["/v1", "/v1/chat", "/nodes"])
async def test_a_root_path_that_begins_a_route_is_refused(decode: FakeNode, root_path: str) -> None:
    with pytest.raises(StartError, match=f"--root-path {root_path}: the route {root_path}/"):
        async with pools.running(decode, root_path=root_path):
            pass


@pytest.mark.parametrize("path", ["/v1/", "//v2/models", "/v1/models//x/y/"])
async def test_other_paths_stay_unknown(decode: FakeNode, path: str) -> None:
    async with pools.running(decode) as client:
        status, _ = await ask(client.router.port, "GET", path)
    assert status == 404
