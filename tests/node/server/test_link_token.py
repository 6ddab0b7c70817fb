"""A node with a link token refuses clients without it, except for probes and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from baton_node.server.app import NodeServer
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch
from baton_protocol.link import link_headers
from baton_text.artifacts import byte_artifacts, digest

pytestmark = pytest.mark.integration

TOKEN = "t0ken-of-the-pool"
ARTIFACTS = byte_artifacts()
DIGEST = digest(next(iter(ARTIFACTS.values())))


@pytest.fixture
async def guarded() -> AsyncIterator[TestClient[aiohttp.web.Request, aiohttp.web.Application]]:
    """A node's server whose engine is not ready yet."""
    settings = NodeSettings(node="n", role="decode", link_token=TOKEN)
    server = NodeServer(settings, Epoch("e"), ARTIFACTS)
    async with TestClient(TestServer(server.app())) as client:
        yield client


@pytest.mark.parametrize("path", ["/link", f"/artifacts/{DIGEST}", "/artifacts/feed"])
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "ü"],
)
async def test_a_client_without_the_token_is_refused(
    guarded: TestClient[aiohttp.web.Request, aiohttp.web.Application],
    path: str,
    authorization: str | None,
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with guarded.get(path, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert TOKEN not in await response.text()


async def test_profiles_are_for_clients_with_the_token_that_are_no_pages(
    guarded: TestClient[aiohttp.web.Request, aiohttp.web.Application],
) -> None:
    page = {**link_headers(TOKEN), "Origin": "http://127.0.0.1"}
    for headers, status in (({}, 401), (page, 403), (link_headers(TOKEN), 503)):
        for path in ("/profile", "/start_profile", "/stop_profile"):
            async with guarded.post(path, headers=headers) as response:
                assert response.status == status


async def test_a_client_with_the_token_gets_artifacts_and_reaches_the_link(
    guarded: TestClient[aiohttp.web.Request, aiohttp.web.Application],
) -> None:
    headers = link_headers(TOKEN)
    async with guarded.get(f"/artifacts/{DIGEST}", headers=headers) as response:
        assert response.status == 200
        assert digest(await response.read()) == DIGEST
    async with guarded.get("/link", headers=headers) as response:
        assert response.status == 503  # the engine is not ready


async def test_a_request_from_a_browser_s_page_gets_no_link_even_with_the_token(
    guarded: TestClient[aiohttp.web.Request, aiohttp.web.Application],
) -> None:
    headers = {**link_headers(TOKEN), "Origin": "http://127.0.0.1"}
    async with guarded.get("/link", headers=headers) as response:
        assert response.status == 403


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/update_weights"])
async def test_the_admin_routes_need_the_token_and_refuse_browsers_pages(
    guarded: TestClient[aiohttp.web.Request, aiohttp.web.Application], path: str
) -> None:
    told = link_headers(TOKEN)
    for headers, status in (({}, 401), (told | {"Origin": "http://127.0.0.1"}, 403), (told, 503)):
        async with guarded.post(path, headers=headers) as response:
            assert response.status == status


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/ready", 503), ("/metrics", 200)])
async def test_probes_and_metrics_need_no_token(
    guarded: TestClient[aiohttp.web.Request, aiohttp.web.Application], path: str, status: int
) -> None:
    async with guarded.get(path) as response:
        assert response.status == status


def test_the_repr_of_settings_hides_the_token_and_the_store_s_password() -> None:
    settings = NodeSettings(
        node="n",
        role="decode",
        index_url="redis://:s3cret@h",
        data_urls=("redis://:s3cret@h",),
        link_token="s3cret",
    )
    assert "s3cret" not in repr(settings)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=NodeSettings) == settings
