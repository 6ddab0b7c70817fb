"""The live page's files: headers, caching, paths, and that nothing else is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_router.errors import StartError
from baton_router.http.page_routes import PageRoutes
from baton_router.page.asset_table import INDEX, TYPES, read_assets
from tests.router import pools
from tests.support.clients.raw_http import RawResponse, exchange, raw_request
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def ask(client: pools.Client, path: str, **headers: str) -> RawResponse:
    """The answer to exactly this path, which most clients would change."""
    sent = {"Host": "localhost", "Connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    return await exchange(client.router.port, raw_request("GET", path, sent))


async def test_every_file_of_the_page_is_served_with_strict_headers(
    decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme the-only-key-of-this-test\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        for name, asset in read_assets().items():
            path = "/" if name == INDEX else f"/page/{name}"
            answer = await ask(client, path)
            assert (answer.status, answer.body) == (200, asset.plain)
            assert answer.headers["content-type"] == TYPES[Path(name).suffix]
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            packed = await ask(client, path, Accept_Encoding="br, gzip")
            assert packed.headers["content-encoding"] == "gzip"
            assert packed.body == asset.compressed
            again = await ask(client, path, If_None_Match=answer.headers["etag"])
            assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/nothing.js",
        "/page/../settings.py",
        "/page/..%2f..%2fsettings.py",
        "/page/%2e%2e/asset_table.py",
        "/page/%2fetc%2fpasswd",
        "/page/..\\asset_table.py",
        "/page/index.html/x",
        "/page/asset_table.py",
        "/page/%00",
        "/assets/app.js",
    ],
)
async def test_nothing_but_the_files_of_the_page_is_served(decode: FakeNode, path: str) -> None:
    async with pools.running(decode) as client:
        answer = await ask(client, path)
    assert answer.status in (400, 404)
    assert b"import" not in answer.body
    assert b"root:" not in answer.body


async def test_a_router_without_the_page_serves_none_of_it(decode: FakeNode) -> None:
    async with pools.running(decode, page=False) as client:
        for path in ("/", "/page/app.js"):
            assert (await ask(client, path)).status == 404


async def test_below_a_root_path_the_page_is_a_folder(decode: FakeNode) -> None:
    """So that its relative links lead to its files."""
    async with pools.running(decode, root_path="/a/llm") as client:
        for path in ("/", "/a/llm/", "/a/llm//"):
            assert (await ask(client, path)).status == 200
        assert (await ask(client, "/a/llm/page/app.js")).status == 200
        bare = await ask(client, "/a/llm")
    assert (bare.status, bare.headers["location"]) == (307, "llm/")


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("evil.example", 403)])
async def test_the_page_is_for_the_hosts_of_the_router(
    decode: FakeNode, host: str, status: int
) -> None:
    async with pools.running(decode) as client:
        assert (await ask(client, "/", Host=host)).status == status


def test_a_missing_page_is_found_at_the_start() -> None:
    with pytest.raises(StartError, match=r"index\.html is missing.*--no-page"):
        PageRoutes({}, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_the_page_cannot_be_written(decode: FakeNode, method: str) -> None:
    async with pools.running(decode) as client:
        options: dict[str, Any] = {"json": {}}
        async with client.session.request(method, client.url + "/", **options) as response:
            assert response.status == 405
