"""Pages of other sites, in a browser on a machine that reaches the router, may change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from baton_router.origins import is_own
from tests.support.fake_node import FakeNode

CHANGING = (
    "/nodes/decode-0/drain",
    "/nodes/decode-0/resume",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/anything",
)


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
async def test_a_foreign_page_s_requests_are_refused_whatever_they_ask(
    running: Any, decode: FakeNode, path: str, origin: str
) -> None:
    async with running(decode) as client:
        status, told, _ = await client.post(path, {"prompt": "x"}, {"Origin": origin})
        assert (status, told["error"]["code"]) == (403, "foreign_origin")
        assert decode.got == []


async def test_a_page_of_the_router_s_own_origin_is_served(running: Any, decode: FakeNode) -> None:
    async with running(decode) as client:
        own = {"Origin": client.url}
        body = {"prompt": "x", "max_tokens": 1}
        assert (await client.post("/v1/completions", body, own))[0] == 200
        assert (await client.post("/nodes/decode-0/drain", b"", own))[0] == 200


async def test_what_only_reads_is_answered_to_any_page(running: Any, decode: FakeNode) -> None:
    async with running(decode) as client:
        for path in ("/v1/models", "/health", "/pool"):
            assert (await client.get(path, {"Origin": "http://evil.example"}))[0] == 200


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://pool.example", "pool.example", True),
        ("http://pool.example", "pool.example:80", True),
        ("https://pool.example", "pool.example:443", True),
        ("https://pool.example", "pool.example", True),
        ("http://POOL.example:8000", "pool.EXAMPLE:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("https://pool.example", "pool.example:80", False),
        ("http://pool.example", "pool.example:8000", False),
        ("http://pool.example:8000", "pool.example", False),
        ("http://pool.example.evil", "pool.example", False),
        ("http://user@pool.example", "pool.example", True),
        ("null", "pool.example", False),
        ("", "", False),
        ("http://", "", False),
        ("file://", "", False),
        ("app://pool.example", "pool.example", False),
        ("http://pool.example:x", "pool.example", False),
        ("http://[::1", "[::1", False),
    ],
)
def test_an_origin_is_own_where_it_names_the_host_and_port_that_were_asked(
    origin: str, host: str, own: bool
) -> None:
    assert is_own(origin, host) is own
