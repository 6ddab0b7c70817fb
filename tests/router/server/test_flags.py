"""`baton router` with the flags that vLLM's users know, as a process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.integration


async def test_names_a_root_path_a_socket_and_forced_usage_work_together(
    decode: FakeNode, tmp_path: Path
) -> None:
    command = (
        *(sys.executable, "-m", "baton_cli", "router", "--nodes", decode.address),
        *("--served-model-name", "a", "org/b", "--root-path", "/llm", "--uds", "router.sock"),
        "--enable-force-include-usage",
    )
    router = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "router.sock"))
    try:
        async with (
            asyncio.timeout(WAIT_S),
            httpx.AsyncClient(transport=transport, base_url="http://any/llm") as client,
        ):
            while not await _is_ready(client):
                await asyncio.sleep(0.05)
            models = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["a", "org/b"]
            assert (await client.get("/openapi.json")).json()["servers"] == [{"url": "/llm"}]
            body = pools.ask(model="org/b", stream=True)
            answer = await client.post("/v1/completions", json=body)
            assert '"model":"a"' in answer.text
            assert f'"completion_tokens":{len(pools.REPLY)}' in answer.text
            router.terminate()
            assert await router.wait() == 0
    finally:
        if router.returncode is None:
            router.kill()
        await router.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ping")).status_code == 200
    except httpx.ConnectError:  # it does not listen yet
        return False
