"""DNS rebinding: a node on a loopback address refuses requests for foreign host names."""

from __future__ import annotations

import pytest
from aiohttp import web

from baton_node.server.app import NodeServer
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch
from baton_text.artifacts import byte_artifacts, digest
from tests.support.clients.raw_http import exchange, raw_request

pytestmark = pytest.mark.integration

ARTIFACTS = byte_artifacts()
PATHS = (
    "/health",
    "/ready",
    "/metrics",
    "/link",
    f"/artifacts/{digest(next(iter(ARTIFACTS.values())))}",
)


async def status_of(settings: NodeSettings, path: str, host: str) -> int:
    """Return the response's status. The server listens on 127.0.0.1, whatever the settings say."""
    runner = NodeServer(settings, Epoch("e"), ARTIFACTS).runner()
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        return (await exchange(port, raw_request("GET", path, {"Host": host}))).status
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["evil.example:9000", "evil.example", "0.0.0.0:9000"])
async def test_a_node_on_a_loopback_address_refuses_foreign_host_names(
    path: str, host: str
) -> None:
    assert await status_of(NodeSettings(node="n", role="decode"), path, host) == 403


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "[::1]", "tunnel:9000"])
async def test_a_node_on_a_loopback_address_accepts_local_names_and_its_own_address(
    host: str,
) -> None:
    settings = NodeSettings(node="n", role="decode", address="http://tunnel:7000")
    assert await status_of(settings, "/health", host) == 200


async def test_a_node_on_any_other_address_accepts_every_host_name() -> None:
    settings = NodeSettings(node="n", role="decode", host="0.0.0.0")
    assert await status_of(settings, "/health", "pod.models.svc:9000") == 200
