"""API keys over HTTP: who gets in, what its jobs carry, and that nothing secret is told."""

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
def keyed(tmp_path: Path) -> dict[str, Any]:
    """Settings of a router that knows two tenants and an admin."""
    path = tmp_path / "keys"
    path.write_text(f"acme {ACME}\nglobex {GLOBEX}\nops {ADMIN} admin\n")
    return {"api_keys": str(path), "tenant_secret": SECRET}


@pytest.fixture
def apart(keyed: dict[str, Any]) -> dict[str, Any]:
    """Of one that keeps them apart."""
    return {**keyed, "sharing": "tenant"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def metrics(client: Any) -> str:
    page: str = await client.text("/metrics", bearer(ADMIN))
    return page


def chunks(salt: str) -> list[BlockHash]:
    """Of PROMPT, as the byte tokenizer gives it."""
    root = root_hash(FakeNode("any", "decode").report.fingerprint, salt=salt)
    hashes = extend_hashes(root, PROMPT.encode(), LAYOUT.block_size)
    return chunk_hashes(hashes, LAYOUT.chunk_blocks)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake-model", "/v1/nothing"])
async def test_every_route_below_v1_wants_a_key(
    running: Any, decode: FakeNode, keyed: dict[str, Any], path: str
) -> None:
    async with running(decode, **keyed) as client:
        status, body, headers = await client.get(path)
    assert status == 401
    assert headers["www-authenticate"] == "Bearer"
    assert body["error"] == {
        "message": "the request has no API key; send it as `Authorization: Bearer KEY`",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
        "doc": "https://baton.dev/docs/operations/secure.md#tenants",
    }


@pytest.mark.parametrize("headers", [{}, bearer("sk-unknown"), {"x-api-key": ACME}])
async def test_a_request_without_a_known_key_reaches_no_node(
    running: Any, decode: FakeNode, keyed: dict[str, Any], headers: dict[str, str]
) -> None:
    async with running(decode, **keyed) as client:
        for path in (COMPLETIONS, "/v1/chat/completions"):
            status, body, told = await client.post(path, {"prompt": "x"}, headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert told["x-baton-placement"].endswith("reason=refused: invalid_api_key")
        page = await metrics(client)
    assert decode.got_of(RunJob) == []
    assert 'baton_router_requests_total{code="401",endpoint="completions"} 1.0\n' in page


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_what_probes_look_at_wants_no_key(
    running: Any, decode: FakeNode, keyed: dict[str, Any], path: str
) -> None:
    async with running(decode, **keyed) as client:
        assert (await client.get(path))[0] == 200


@pytest.mark.parametrize("path", ["/pool", "/metrics"])
async def test_what_tells_of_all_tenants_wants_an_admins_key(
    running: Any, decode: FakeNode, keyed: dict[str, Any], path: str
) -> None:
    decode.token = "t0ken"
    async with running(decode, **keyed, admin_key="key-of-up", link_token="t0ken") as client:
        refused = [await client.get(path, headers) for headers in ({}, bearer("sk-no"))]
        forbidden = await client.get(path, bearer(ACME))
        pages = [await client.text(path, bearer(key)) for key in (ADMIN, "key-of-up", "t0ken")]
    assert [(status, body["error"]["code"]) for status, body, _ in refused] == [
        (401, "invalid_api_key"),
        (401, "invalid_api_key"),
    ]
    assert (forbidden[0], forbidden[1]["error"]["code"]) == (403, "admin_key_required")
    assert all("decode-0" in page for page in pages)


@pytest.mark.parametrize("path", ["/pool", "/metrics"])
async def test_without_keys_everybody_may_look(running: Any, decode: FakeNode, path: str) -> None:
    async with running(decode) as client:
        assert "decode-0" in await client.text(path)


async def test_keys_and_limits_are_read_again_when_they_change(
    running: Any, decode: FakeNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Swapped as Kubernetes swaps a Secret: the link to its folder is turned."""
    for name, keys in (("one", f"acme {ACME}\n"), ("two", f"globex {GLOBEX}\n"), ("bad", "x\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(keys)

    def turn(name: str) -> None:
        (tmp_path / "new").symlink_to(tmp_path / name)
        (tmp_path / "new").replace(tmp_path / "now")

    async def let_in(client: Any) -> list[bool]:
        statuses = [
            (await client.post(COMPLETIONS, BODY, bearer(key)))[0] for key in (ACME, GLOBEX)
        ]
        return [status == 200 for status in statuses]

    turn("one")
    (tmp_path / "keys").symlink_to(tmp_path / "now" / "keys")
    async with running(decode, api_keys=str(tmp_path / "keys")) as client:
        assert await let_in(client) == [True, False]
        turn("two")
        await until_is(lambda: let_in(client), [False, True])
        turn("bad")
        await until(lambda: "the old configuration stays in force" in caplog.text)
        assert await let_in(client) == [False, True]
        turn("one")
        await until_is(lambda: let_in(client), [True, False])
    assert "line 1: 1 words" in caplog.text


async def test_without_keys_any_key_passes(running: Any, decode: FakeNode) -> None:
    async with running(decode) as client:
        assert (await client.post(COMPLETIONS, BODY, bearer("any")))[0] == 200
    [job] = decode.got_of(RunJob)
    assert (job.request.tenant, job.request.salt) == ("", "")


async def test_the_openai_client_is_let_in_by_its_key_and_raises_its_own_error_without(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    async with running(decode, **keyed) as client:
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
async def test_jobs_carry_their_tenant_and_its_salt_only_where_tenants_share_nothing(
    running: Any,
    decode: FakeNode,
    prefill: FakeNode,
    keyed: dict[str, Any],
    sharing: str,
    salts: list[str],
) -> None:
    settings = {**keyed, "sharing": sharing, "handoff": "always"}
    async with running(decode, prefill, **settings) as client:
        for key in (ACME, GLOBEX):
            assert (await client.post(COMPLETIONS, BODY, bearer(key)))[0] == 200
    for jobs in (decode.got_of(RunJob), prefill.got_of(PrefillJob)):
        assert [job.request.tenant for job in jobs] == ["acme", "globex"]
        assert [job.request.salt for job in jobs] == salts


async def test_what_a_node_holds_of_one_tenant_is_no_prefix_of_another(
    running: Any, decode: FakeNode, apart: dict[str, Any]
) -> None:
    async with running(decode, **apart) as client:
        held = CacheEvents(decode.report.epoch, stored=tuple(chunks(SALTS["acme"])))
        await decode.say(held)
        await until_is(lambda: client.chunks("decode-0"), 8)
        told = [
            (await client.post(COMPLETIONS, BODY, bearer(key)))[2]["x-baton-placement"]
            for key in (ACME, GLOBEX)
        ]
    assert "uncached 0 of 64 tokens" in told[0]
    assert "uncached 64 of 64 tokens" in told[1]


NAMED = [("cache_salt", "mine"), ("salt", "mine"), ("tenant", "acme"), ("adapter", "x"),
         ("adapter_digest", "00")]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), NAMED)
async def test_a_body_that_names_what_its_key_decides_is_refused_by_name(
    running: Any, decode: FakeNode, apart: dict[str, Any], field: str, value: str
) -> None:
    async with running(decode, **apart) as client:
        for path, asked in (
            (COMPLETIONS, BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            status, body, _ = await client.post(path, {**asked, field: value}, bearer(GLOBEX))
            assert (status, body["error"]["param"]) == (400, field)
            assert body["error"]["message"].startswith(f'{field} is "{value}"; no request may')
    assert decode.got_of(RunJob) == []


async def test_nothing_secret_is_logged_answered_shown_or_counted(
    running: Any,
    decode: FakeNode,
    apart: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(decode, **apart) as client:
        shown = []
        for key in (ACME, GLOBEX, "sk-unknown-key"):
            shown.append(await client.post(COMPLETIONS, BODY, bearer(key)))
            shown.append(await client.post(COMPLETIONS, {"prompt": 5}, bearer(key)))
        decode.script.run = "fail"
        shown.append(await client.post(COMPLETIONS, BODY, bearer(ACME)))
        shown += [await client.get(path) for path in ("/ready", "/health")]
        shown.append(await client.get("/pool", bearer(ADMIN)))
        page = await metrics(client)
        settings = repr(client.router.settings)
    log = "".join(str(vars(record)) for record in caplog.records) + caplog.text
    assert "'tenant': 'acme'" in log
    assert [status for status, _, _ in shown[:6]] == [200, 400, 200, 400, 401, 401]
    everything = json.dumps(shown) + page + settings + log
    for secret in (ACME, GLOBEX, ADMIN, SECRET, "sk-unknown-key", *SALTS.values()):
        assert secret not in everything


async def test_a_body_is_not_read_before_its_key_is_known(
    running: Any, decode: FakeNode, keyed: dict[str, Any]
) -> None:
    async with running(decode, **keyed) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.router.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
        )
        async with asyncio.timeout(120):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
        await writer.wait_closed()
