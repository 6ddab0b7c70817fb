"""API keys over HTTP: which requests are authorized, what their jobs contain, and that no secret
leaks."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest

from baton_protocol.hashing import chunk_hashes, extend_hashes, root_hash, tenant_salt
from baton_protocol.ids import BlockHash
from baton_protocol.link import CacheEvents, PrefillJob, RunJob
from tests.router import pools
from tests.support.nodes.fake_node import LAYOUT, FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

ACME, GLOBEX, SECRET = "sk-key-of-acme", "sk-key-of-globex", "the-pools-tenant-secret"
ADMIN = "sk-key-of-an-admin"
SALTS = {name: tenant_salt(SECRET.encode(), name) for name in ("acme", "globex")}
COMPLETIONS = "/v1/completions"
PROMPT = "x" * 64
BODY = {"prompt": PROMPT, "max_tokens": 2}


@pytest.fixture
def tenant_settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of a router with two tenants and an admin."""
    path = tmp_path / "keys"
    path.write_text(f"acme {ACME}\nglobex {GLOBEX}\nops {ADMIN} admin\n")
    return {"api_keys": str(path), "tenant_secret": SECRET}


@pytest.fixture
def isolated_settings(tenant_settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a router whose tenants share no KV."""
    return {**tenant_settings, "sharing": "tenant"}


async def metrics(client: pools.Client) -> str:
    page: str = await client.text("/metrics", pools.bearer(ADMIN))
    return page


def chunks(salt: str) -> list[BlockHash]:
    """Chunk hashes of PROMPT under this salt."""
    root = root_hash(FakeNode("any", "decode").report.fingerprint, salt=salt)
    hashes = extend_hashes(root, PROMPT.encode(), LAYOUT.block_size)
    return chunk_hashes(hashes, LAYOUT.chunk_blocks)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake-model", "/v1/nothing"])
async def test_every_route_below_v1_requires_a_key(
    decode: FakeNode, tenant_settings: dict[str, Any], path: str
) -> None:
    async with pools.running(decode, **tenant_settings) as client:
        status, body, headers = await client.get(path)
    assert status == 401
    assert headers["www-authenticate"] == "Bearer"
    assert body["error"] == {
        "message": "the request has no API key; send it as `Authorization: Bearer KEY` or as"
        " `x-api-key: KEY`",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
        "doc": "docs/operations/secure.md#tenants",
    }


@pytest.mark.parametrize("headers", [{}, pools.bearer("sk-unknown"), {"x-api-key": "sk-unknown"}])
async def test_a_request_without_a_known_key_reaches_no_node(
    decode: FakeNode,
    tenant_settings: dict[str, Any],
    headers: dict[str, str],
) -> None:
    async with pools.running(decode, **tenant_settings) as client:
        for path in (COMPLETIONS, "/v1/chat/completions"):
            status, body, response_headers = await client.post(path, {"prompt": "x"}, headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            placement = response_headers["x-baton-placement"]
            assert placement.endswith("reason=refused: invalid_api_key")
        page = await metrics(client)
    assert decode.got_of(RunJob) == []
    assert 'baton_router_requests_total{code="401",endpoint="completions"} 1.0\n' in page


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probe_routes_require_no_key(
    decode: FakeNode, tenant_settings: dict[str, Any], path: str
) -> None:
    async with pools.running(decode, **tenant_settings) as client:
        assert (await client.get(path))[0] == 200


@pytest.mark.parametrize("path", ["/pool", "/metrics"])
async def test_routes_about_all_tenants_require_an_admin_key(
    decode: FakeNode, tenant_settings: dict[str, Any], path: str
) -> None:
    decode.token = "t0ken"
    async with pools.running(
        decode, **tenant_settings, admin_key="key-of-up", link_token="t0ken"
    ) as client:
        refused = [await client.get(path, headers) for headers in ({}, pools.bearer("sk-no"))]
        forbidden = await client.get(path, pools.bearer(ACME))
        pages = [
            await client.text(path, pools.bearer(key)) for key in (ADMIN, "key-of-up", "t0ken")
        ]
    assert [(status, body["error"]["code"]) for status, body, _ in refused] == [
        (401, "invalid_api_key"),
        (401, "invalid_api_key"),
    ]
    assert (forbidden[0], forbidden[1]["error"]["code"]) == (403, "admin_key_required")
    assert all("decode-0" in page for page in pages)


@pytest.mark.parametrize("path", ["/pool", "/metrics"])
async def test_without_api_keys_pool_and_metrics_are_open(decode: FakeNode, path: str) -> None:
    async with pools.running(decode) as client:
        assert "decode-0" in await client.text(path)


async def test_the_key_file_is_reloaded_when_it_changes(
    decode: FakeNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files change as in a mounted Kubernetes Secret: a symlink to their folder is replaced."""
    for name, keys in (("one", f"acme {ACME}\n"), ("two", f"globex {GLOBEX}\n"), ("bad", "x\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(keys)

    def switch(name: str) -> None:
        (tmp_path / "new").symlink_to(tmp_path / name)
        (tmp_path / "new").replace(tmp_path / "now")

    async def authorized(client: pools.Client) -> list[bool]:
        statuses = [
            (await client.post(COMPLETIONS, BODY, pools.bearer(key)))[0] for key in (ACME, GLOBEX)
        ]
        return [status == 200 for status in statuses]

    switch("one")
    (tmp_path / "keys").symlink_to(tmp_path / "now" / "keys")
    async with pools.running(decode, api_keys=str(tmp_path / "keys")) as client:
        assert await authorized(client) == [True, False]
        switch("two")
        await until_is(lambda: authorized(client), [False, True])
        switch("bad")
        await until(lambda: "the old configuration stays in force" in caplog.text)
        assert await authorized(client) == [False, True]
        switch("one")
        await until_is(lambda: authorized(client), [True, False])
    assert "line 1: the line has 1 words" in caplog.text


async def test_without_api_keys_any_key_is_accepted(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        assert (await client.post(COMPLETIONS, BODY, pools.bearer("any")))[0] == 200
    [job] = decode.got_of(RunJob)
    assert (job.request.tenant, job.request.salt) == ("", "")


async def test_the_openai_client_works_with_a_key_and_raises_authentication_error_without(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    async with pools.running(decode, **tenant_settings) as client:
        url = client.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=ACME, max_retries=0) as api:
            answer = await api.completions.create(model="fake-model", prompt="x")
            assert answer.choices[0].text == "Hello, world!"
            assert [model.id async for model in api.models.list()] == ["fake-model"]
        async with openai.AsyncOpenAI(base_url=url, api_key="sk-no", max_retries=0) as api:
            with pytest.raises(openai.AuthenticationError) as caught:
                await api.completions.create(model="fake-model", prompt="x")
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(("sharing", "salts"), [("pool", ["", ""]), ("tenant", [*SALTS.values()])])
async def test_jobs_carry_a_salt_only_if_tenants_share_nothing(
    decode: FakeNode,
    prefill: FakeNode,
    tenant_settings: dict[str, Any],
    sharing: str,
    salts: list[str],
) -> None:
    settings = {**tenant_settings, "sharing": sharing, "handoff": "always"}
    async with pools.running(decode, prefill, **settings) as client:
        for key in (ACME, GLOBEX):
            assert (await client.post(COMPLETIONS, BODY, pools.bearer(key)))[0] == 200
    for jobs in (decode.got_of(RunJob), prefill.got_of(PrefillJob)):
        assert [job.request.tenant for job in jobs] == ["acme", "globex"]
        assert [job.request.salt for job in jobs] == salts


async def test_a_prefix_that_a_node_caches_for_one_tenant_does_not_match_another_s(
    decode: FakeNode, isolated_settings: dict[str, Any]
) -> None:
    async with pools.running(decode, **isolated_settings) as client:
        cached = CacheEvents(decode.report.epoch, stored=tuple(chunks(SALTS["acme"])))
        await decode.say(cached)
        await until_is(lambda: client.chunks("decode-0"), 8)
        placements = [
            (await client.post(COMPLETIONS, BODY, pools.bearer(key)))[2]["x-baton-placement"]
            for key in (ACME, GLOBEX)
        ]
    assert "uncached 0 of 64 tokens" in placements[0]
    assert "uncached 64 of 64 tokens" in placements[1]


RESERVED = "a request cannot set it: the API key determines it"
NO_ADAPTERS = "this server does not support it: there are no adapters"
RESERVED_FIELDS = [
    *(("cache_salt", "mine", RESERVED), ("salt", "mine", RESERVED), ("tenant", "acme", RESERVED)),
    *(("adapter", "x", NO_ADAPTERS), ("adapter_digest", "00", NO_ADAPTERS)),
]


@pytest.mark.parametrize(("field", "value", "why"), RESERVED_FIELDS)
async def test_a_body_field_that_chooses_kv_is_a_400_that_names_it(
    decode: FakeNode,
    isolated_settings: dict[str, Any],
    field: str,
    value: str,
    why: str,
) -> None:
    async with pools.running(decode, **isolated_settings) as client:
        for path, call in (
            (COMPLETIONS, BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            status, body, _ = await client.post(path, {**call, field: value}, pools.bearer(GLOBEX))
            assert (status, body["error"]["param"]) == (400, field)
            assert body["error"]["message"] == f'{field} is "{value}"; {why}; leave it out'
    assert decode.got_of(RunJob) == []


async def test_no_secret_is_in_logs_answers_pages_or_metrics(
    decode: FakeNode,
    isolated_settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with pools.running(decode, **isolated_settings) as client:
        answers = []
        for key in (ACME, GLOBEX, "sk-unknown-key"):
            answers.append(await client.post(COMPLETIONS, BODY, pools.bearer(key)))
            answers.append(await client.post(COMPLETIONS, {"prompt": 5}, pools.bearer(key)))
        decode.script.run = "fail"
        answers.append(await client.post(COMPLETIONS, BODY, pools.bearer(ACME)))
        answers += [await client.get(path) for path in ("/ready", "/health")]
        answers.append(await client.get("/pool", pools.bearer(ADMIN)))
        page = await metrics(client)
        settings = repr(client.router.settings)
    log = "".join(str(vars(record)) for record in caplog.records) + caplog.text
    assert "'tenant': 'acme'" in log
    assert [status for status, _, _ in answers[:6]] == [200, 400, 200, 400, 401, 401]
    everything = json.dumps(answers) + page + settings + log
    for secret in (ACME, GLOBEX, ADMIN, SECRET, "sk-unknown-key", *SALTS.values()):
        assert secret not in everything


async def test_the_key_is_checked_before_the_body_is_read(
    decode: FakeNode, tenant_settings: dict[str, Any]
) -> None:
    async with pools.running(decode, **tenant_settings) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.router.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
        )
        async with asyncio.timeout(120):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
        await writer.wait_closed()
