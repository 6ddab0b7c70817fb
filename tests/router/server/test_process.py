"""serve() in a separate process: signals, the shutdown deadline, the exit code."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from baton_protocol.link import Abort, RunJob
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode

pytestmark = pytest.mark.integration

WAIT_S = 180.0
CODE = """
import sys
from baton_protocol.event_loop import run
from baton_router import RouterSettings, serve
settings = RouterSettings(port=0, nodes=(sys.argv[1],), drain_timeout_s=float(sys.argv[2]))
run(serve(settings, lambda host, port: print(port, flush=True)))
"""


@asynccontextmanager
async def process(node: FakeNode, deadline_s: float) -> AsyncIterator[tuple[Any, str]]:
    """A ready router process, and its URL."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, node.address, str(deadline_s), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WAIT_S):
            assert child.stdout is not None
            url = f"http://127.0.0.1:{int(await child.stdout.readline())}"
            async with aiohttp.ClientSession() as session:
                while (await session.get(url + "/ready")).status != 200:
                    await asyncio.sleep(0.02)
            yield child, url
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def stream(url: str) -> str:
    body = {"prompt": "x", "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        return await response.text()


async def running_stream(node: FakeNode, url: str) -> asyncio.Task[str]:
    task = asyncio.create_task(stream(url))
    async with asyncio.timeout(WAIT_S):
        while not node.got_of(RunJob):
            await asyncio.sleep(0.01)
    return task


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        return (await session.get(url + "/ready")).status == 200
    except aiohttp.ClientConnectionError:  # the router no longer listens
        return False


async def test_an_idle_router_ends_at_the_first_signal(decode: FakeNode) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        async with process(decode, 60.0) as (child, _):
            child.send_signal(signal_number)
            async with asyncio.timeout(WAIT_S):
                assert await child.wait() == 0


async def test_the_first_signal_waits_for_a_running_stream(decode: FakeNode) -> None:
    decode.script.token_s = 0.05
    async with process(decode, 60.0) as (child, url):
        task = await running_stream(decode, url)
        child.send_signal(signal.SIGTERM)
        assert (await task).endswith("data: [DONE]\n\n")
        async with asyncio.timeout(WAIT_S):
            assert await child.wait() == 0


async def test_the_second_signal_ends_the_stream_with_an_error_and_aborts_the_job(
    decode: FakeNode,
) -> None:
    decode.script.run = "half"
    async with process(decode, 3600.0) as (child, url):
        task = await running_stream(decode, url)
        child.send_signal(signal.SIGINT)
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as session:
            while await is_ready(session, url):
                await asyncio.sleep(0.02)
        assert child.returncode is None
        child.send_signal(signal.SIGINT)
        async with asyncio.timeout(WAIT_S):
            assert await child.wait() == 0
            assert '"code":"unavailable"' in await task
            while not decode.got_of(Abort):
                await asyncio.sleep(0.01)


async def test_a_connection_that_arrives_with_the_shutdown_gets_an_answer(decode: FakeNode) -> None:
    """asyncio takes the connection in one pass of its loop and reads from it in the next. The
    shutdown begins between the two."""
    gc.disable()  # the router collects so rarely that it leaves a lost connection open
    try:
        async with pools.running(decode) as client:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(0.1)
            with socket.create_connection(("127.0.0.1", client.router.port)) as link:
                link.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
                link.setblocking(False)
                ended = asyncio.Event()
                drains: list[asyncio.Task[None]] = []
                loop.call_soon(lambda: drains.append(loop.create_task(client.router.drain(ended))))
                async with asyncio.timeout(WAIT_S):
                    answer = await loop.sock_recv(link, 4096)
                assert answer.startswith(b"HTTP/1.1 503 ")
                ended.set()
                await drains[0]
    finally:
        gc.enable()
