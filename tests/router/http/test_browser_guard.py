"""Cross-site protection: pages of other sites, in a browser that can reach the router, can neither
change nor read anything. The tests send a browser's exact headers over a real socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.errors import InvalidRequest
from baton_protocol.hosts import Hosts
from baton_protocol.link import DrainNode, RunJob
from baton_router.http.browser_guard import is_own
from baton_router.settings import RouterSettings
from tests.router import pools
from tests.support.clients.raw_http import JSON_TYPE, RawResponse, exchange, raw_request
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

EVIL = "http://evil.example"
CHAT_PAGE = "https://chat.example"
DRAIN, COMPLETIONS, CHAT = "/nodes/decode-0/drain", "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "x", "max_tokens": 2}
MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES: dict[str, Any] = {DRAIN: {}, COMPLETIONS: BODY, CHAT: MESSAGES}
CHANGING = (DRAIN, "/nodes/decode-0/resume", COMPLETIONS, CHAT, "/v1/anything")
READ = ("/v1/models", "/pool", "/metrics", "/ready", "/requests/ab", "/openapi.json")
# Content types that fetch() or an HTML form may send to other origins without a preflight.
SIMPLE_TYPES = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
)
# The headers that the openai client for browsers announces in its preflight.
CLIENT_HEADERS = (
    "authorization,content-type,x-api-key,anthropic-version,x-stainless-arch,x-stainless-os"
)


async def send(
    client: pools.Client, method: str, path: str, headers: dict[str, str], body: Any = None
) -> RawResponse:
    """Send a request, with the router's own `Host` unless `headers` has one. None: no body."""
    port = client.router.port
    all_headers = {"Host": f"127.0.0.1:{port}", **headers}
    if body is None:
        data = raw_request(method, path, all_headers, length=method == "POST")
        return await exchange(port, data)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await exchange(port, raw_request(method, path, all_headers, data, length=bool(data)))


def untouched(node: FakeNode) -> bool:
    return not node.got_of(RunJob) and not node.got_of(DrainNode)


# --- another origin ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1:1"])
async def test_a_foreign_page_s_post_is_refused_on_every_route(
    decode: FakeNode, path: str, origin: str
) -> None:
    async with pools.running(decode) as client:
        answer = await send(
            client, "POST", path, {"Origin": origin, "Content-Type": JSON_TYPE}, BODY
        )
        assert (answer.status, answer.code) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in answer.headers
        assert decode.got == []


async def test_a_page_of_the_router_s_own_origin_is_served(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        own = {"Origin": client.url, "Content-Type": JSON_TYPE}
        assert (await send(client, "POST", COMPLETIONS, own, BODY)).status == 200
        assert (await send(client, "POST", DRAIN, own, {})).status == 200


@pytest.mark.parametrize("path", READ)
async def test_answers_to_a_foreign_page_s_reads_have_no_cors_headers(
    decode: FakeNode, path: str
) -> None:
    """The router answers, because a read changes nothing. Without CORS headers the browser hides
    the answer from the page."""
    async with pools.running(decode) as client:
        answer = await send(client, "GET", path, {"Origin": EVIL})
        assert answer.status in (200, 404)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", [DRAIN, CHAT, "/pool"])
@pytest.mark.parametrize("origin", [EVIL, "null"])
async def test_a_foreign_page_s_preflight_is_refused(
    decode: FakeNode, path: str, origin: str
) -> None:
    async with pools.running(decode) as client:
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = await send(client, "OPTIONS", path, preflight)
        assert (answer.status, answer.code) == (403, "foreign_origin")
        assert not [name for name in answer.headers if name.startswith("access-control-")]


# --- a body that needs no preflight -------------------------------------------------------------


@pytest.mark.parametrize("path", [DRAIN, "/nodes/decode-0/resume", COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", [*SIMPLE_TYPES, "application/vnd.api+json", "json", ""])
async def test_a_body_that_is_not_json_is_refused_unread(
    decode: FakeNode, path: str, kind: str
) -> None:
    """This holds also without an `Origin`, which old browsers leave out. The test never sends the
    body, so a router that waited for it would not answer."""
    head = {"Content-Type": kind, "Content-Length": "1000"}
    async with pools.running(decode, body_timeout_s=600.0) as client:
        answer = await send(client, "POST", path, head, b"")
        assert (answer.status, answer.code) == (400, "unsupported_content_type")
        assert repr(kind) in answer.json()["error"]["message"]
        assert untouched(decode)


@pytest.mark.parametrize("kind", SIMPLE_TYPES)
async def test_a_form_without_fields_is_refused(decode: FakeNode, kind: str) -> None:
    async with pools.running(decode) as client:
        answer = await send(client, "POST", DRAIN, {"Content-Type": kind})
        assert (answer.status, answer.code) == (400, "unsupported_content_type")
        assert untouched(decode)


@pytest.mark.parametrize("head", [{}, {"Transfer-Encoding": "chunked"}], ids=["sized", "chunked"])
async def test_a_body_without_a_type_is_refused(decode: FakeNode, head: dict[str, str]) -> None:
    """fetch() sends a Blob without a type this way, without a preflight."""
    async with pools.running(decode) as client:
        data = json.dumps(BODY).encode()
        if head:
            answer = await send(client, "POST", COMPLETIONS, {**head, "Host": "localhost"}, b"")
        else:
            answer = await send(client, "POST", COMPLETIONS, {}, data)
        assert (answer.status, answer.code) == (400, "unsupported_content_type")
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", [JSON_TYPE, "application/json; charset=utf-8", "Application/JSON ;charset=UTF-8"]
)
async def test_the_json_type_may_have_parameters_and_any_case(decode: FakeNode, kind: str) -> None:
    async with pools.running(decode) as client:
        for path, body in ((COMPLETIONS, BODY), (DRAIN, {})):
            assert (await send(client, "POST", path, {"Content-Type": kind}, body)).status == 200


async def test_a_request_without_a_body_needs_no_content_type(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        assert (await send(client, "POST", DRAIN, {})).status == 200
        assert (await send(client, "POST", "/nodes/decode-0/resume", {})).status == 200


async def test_an_unknown_route_is_a_404_whatever_the_content_type(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        answer = await send(client, "POST", "/v1/edits", {"Content-Type": "text/plain"}, b"x")
        assert (answer.status, answer.code) == (404, "not_found")


# --- DNS rebinding ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example:{port}", "evil.example", "localhost.evil.example"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", "/pool"), ("POST", COMPLETIONS), ("POST", DRAIN)],
)
async def test_a_rebound_host_is_refused_even_if_it_is_the_page_s_own_origin(
    decode: FakeNode, host: str, method: str, path: str
) -> None:
    async with pools.running(decode) as client:
        name = host.format(port=client.router.port)
        headers = {"Host": name, "Origin": f"http://{name}", "Content-Type": JSON_TYPE}
        body = BODIES.get(path)
        answer = await send(client, method, path, headers, body)
        assert (answer.status, answer.code) == (403, "foreign_host")
        assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert untouched(decode)


async def test_a_rebound_host_is_refused_even_with_an_api_key(
    decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme key-of-acme\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        for key in ({}, {"Authorization": "Bearer key-of-acme"}):
            answer = await send(client, "GET", "/v1/models", {"Host": "evil.example", **key})
            assert (answer.status, answer.code) == (403, "foreign_host")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000"]
)
async def test_local_host_names_are_accepted(decode: FakeNode, host: str) -> None:
    async with pools.running(decode) as client:
        assert (await send(client, "GET", "/v1/models", {"Host": host})).status == 200


async def test_a_client_without_a_host_header_is_served(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        answer = await exchange(client.router.port, b"GET /health HTTP/1.0\r\n\r\n")
        assert answer.status == 200


async def test_allowed_hosts_are_accepted_in_addition_to_local_names(decode: FakeNode) -> None:
    async with pools.running(decode, allowed_hosts=("llm.example", "other.example:8443")) as client:
        for host, status in {
            "llm.example": 200,
            "llm.example:9": 200,
            "other.example:8443": 200,
            "other.example": 403,
            "localhost": 200,
            "evil.example": 403,
        }.items():
            assert (await send(client, "GET", "/health", {"Host": host})).status == status, host


@pytest.mark.parametrize(
    ("listens", "allowed", "host", "accepted"),
    [
        ("0.0.0.0", (), "pool.models.svc:8000", True),
        ("", (), "pool.models.svc:8000", True),
        ("10.0.0.7", (), "anything.example", True),
        ("0.0.0.0", ("pool",), "pool:8000", True),
        ("0.0.0.0", ("pool",), "evil.example", False),
        # Probes, scrapes and the operator use a pod's address as the host.
        ("0.0.0.0", ("pool",), "10.1.2.3:8000", True),
        ("::", ("pool",), "[fd00::7]:8000", True),
        ("127.0.0.1", (), "10.1.2.3:8000", False),
        ("127.0.0.1", (), "0.0.0.0:8000", False),
        ("127.0.0.1", ("*",), "evil.example", True),
        ("127.0.0.5", (), "127.0.0.5:8000", True),
        ("::1", (), "[::1]:8000", True),
        ("localhost", (), "localhost.:8000", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "localhost:8000:8000", False),
        ("127.0.0.1", (), "user@localhost", False),
        ("127.0.0.1", (), "[::1].evil.example", False),
    ],
)
def test_which_hosts_a_server_accepts(
    listens: str, allowed: tuple[str, ...], host: str, accepted: bool
) -> None:
    assert Hosts(listens, allowed).allows(host) is accepted


# --- allowed origins ----------------------------------------------------------------------------


async def test_an_allowed_page_s_preflight_gets_the_allowed_methods_and_headers(
    decode: FakeNode,
) -> None:
    preflight = {
        "Origin": CHAT_PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": CLIENT_HEADERS,
    }
    async with pools.running(decode, cors_origins=("https://CHAT.example:443/",)) as client:
        answer = await send(client, "OPTIONS", CHAT, preflight)
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == CHAT_PAGE
        assert answer.headers["access-control-allow-methods"] == "POST"
        assert answer.headers["access-control-allow-headers"] == CLIENT_HEADERS
        assert int(answer.headers["access-control-max-age"]) > 0
        assert "Origin" in answer.headers["vary"].split(", ")
        assert "access-control-allow-credentials" not in answer.headers
        assert answer.headers["x-request-id"]
        assert "access-control-allow-private-network" not in answer.headers
        private_network = {"Access-Control-Request-Private-Network": "true"}
        answer = await send(client, "OPTIONS", CHAT, {**preflight, **private_network})
        assert answer.headers["access-control-allow-private-network"] == "true"
        page = await client.text("/metrics")
    assert "baton_router_requests_total{" not in page  # no generation was requested
    assert untouched(decode)


async def test_a_preflight_s_invalid_names_are_not_echoed(decode: FakeNode) -> None:
    preflight = {
        "Origin": CHAT_PAGE,
        "Access-Control-Request-Method": "POST /",
        "Access-Control-Request-Headers": "caf\u00e9, a:b",
    }
    async with pools.running(decode, cors_origins=(CHAT_PAGE,)) as client:
        answer = await send(client, "OPTIONS", CHAT, preflight)
    assert answer.status == 204
    assert "access-control-allow-methods" not in answer.headers
    assert "access-control-allow-headers" not in answer.headers


async def test_preflights_need_no_key_and_an_allowed_page_can_read_errors(
    decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme key-of-acme\n")
    page = {"Origin": CHAT_PAGE, "Content-Type": JSON_TYPE}
    key = {"Authorization": "Bearer key-of-acme"}
    settings = {"api_keys": str(keys), "cors_origins": (CHAT_PAGE,), "max_body_bytes": 1000}
    async with pools.running(decode, **settings) as client:
        preflight = {"Origin": CHAT_PAGE, "Access-Control-Request-Method": "POST"}
        assert (await send(client, "OPTIONS", CHAT, preflight)).status == 204
        for status, method, path, headers, body in (
            (401, "POST", CHAT, page, MESSAGES),
            (400, "POST", CHAT, page | key, b"{"),
            (400, "POST", CHAT, page | key | {"Content-Type": "text/plain"}, b"x"),
            (413, "POST", CHAT, page | key, b"x" * 2000),
            (404, "GET", "/v1/nothing", page | key, None),
            (405, "GET", CHAT, page | key, None),
        ):
            answer = await send(client, method, path, headers, body)
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == CHAT_PAGE
            assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize("stream", [False, True])
async def test_only_an_allowed_page_can_read_answers_and_streams(
    decode: FakeNode, stream: bool
) -> None:
    body = {**BODY, "stream": stream}
    page = {"Origin": CHAT_PAGE, "Content-Type": JSON_TYPE}
    async with pools.running(decode, cors_origins=(CHAT_PAGE, "http://localhost:3000")) as client:
        answer = await send(client, "POST", COMPLETIONS, page, body)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == CHAT_PAGE
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        shown = {"x-request-id", "x-baton-placement", "x-baton-exact", "retry-after"}
        assert shown <= set(exposed)
        others = {"retry-after", "request-id", "x-baton-resume"}  # not in every answer
        assert set(exposed) - others <= answer.headers.keys()
        for other in (EVIL, "null", "https://chat.example.evil", "http://chat.example"):
            answer = await send(client, "POST", COMPLETIONS, {**page, "Origin": other}, body)
            assert (answer.status, answer.code) == (403, "foreign_origin")
            assert "access-control-allow-origin" not in answer.headers
        answer = await send(client, "GET", "/v1/models", {"Origin": EVIL})
        assert "access-control-allow-origin" not in answer.headers
        # A cache must not give one page the answer for another.
        assert (await send(client, "GET", "/v1/models", {})).headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", [EVIL, "null"])
async def test_every_page_is_served_if_every_origin_is_allowed(
    decode: FakeNode, origin: str
) -> None:
    async with pools.running(decode, cors_origins=("*",)) as client:
        page = {"Origin": origin, "Content-Type": JSON_TYPE}
        answer = await send(client, "POST", COMPLETIONS, page, BODY)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert "access-control-allow-credentials" not in answer.headers
        answer = await send(
            client, "POST", COMPLETIONS, page | {"Content-Type": "text/plain"}, BODY
        )
        assert answer.code == "unsupported_content_type"
        # Allowed origins do not extend the allowed hosts.
        answer = await send(client, "POST", COMPLETIONS, {**page, "Host": "evil.example"}, BODY)
        assert answer.code == "foreign_host"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cors_origins", "chat.example"),
        ("cors_origins", "https://chat.example/page"),
        ("cors_origins", "null"),
        ("cors_origins", "https://*.example"),
        ("cors_origins", ""),
        ("allowed_hosts", "http://llm.example"),
        ("allowed_hosts", "llm.example/x"),
        ("allowed_hosts", "*.example"),
        ("allowed_hosts", "llm.example:port"),
        ("allowed_hosts", ""),
    ],
)
def test_settings_with_an_invalid_host_or_origin_are_refused(setting: str, value: str) -> None:
    settings = RouterSettings(nodes=("http://n",), **{setting: (value,)})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        settings.check()
    assert caught.value.param == setting
    assert repr(value) in str(caught.value)


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
def test_an_origin_is_own_if_it_names_the_requested_host_and_port(
    origin: str, host: str, own: bool
) -> None:
    assert is_own(origin, host) is own
