"""A node closes connections that send only a part of a request, or nothing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import web

from baton_node.server.app import NodeServer
from baton_node.settings import NodeSettings
from baton_protocol.ids import Epoch
from baton_text.artifacts import byte_artifacts

pytestmark = pytest.mark.integration

WAIT_S = 120.0
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_connections_without_a_complete_request_are_closed() -> None:
    server = NodeServer(NodeSettings(node="n", role="decode"), Epoch("e"), byte_artifacts())
    runner = server.runner(idle_s=0.3)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    responses = []
    try:
        for sent in (b"", WHOLE[:20], WHOLE[:-2], WHOLE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(WAIT_S):
                responses.append((await reader.read())[:15])
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    finally:
        await runner.cleanup()
    assert responses == [b"", b"", b"", b"HTTP/1.1 200 OK"]
