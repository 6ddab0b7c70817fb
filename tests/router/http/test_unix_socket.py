"""A router that listens on a unix socket instead of a port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton_router.errors import ListenError
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.integration

CODE = """
import sys
from baton_protocol.event_loop import run
from baton_router import RouterSettings, serve
settings = RouterSettings(uds=sys.argv[1], nodes=(sys.argv[2],))
run(serve(settings, lambda host, port: print("listens", flush=True)))
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A relative path, because that of a temporary folder may be too long for a socket."""
    monkeypatch.chdir(tmp_path)
    return "router.sock"


@asynccontextmanager
async def process(path: str, node: FakeNode) -> AsyncIterator[Any]:
    """A router's process that listens."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, path, node.address, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(WAIT_S):
            assert child.stdout is not None
            assert await child.stdout.readline() == b"listens\n"
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def get(path: str, route: str = "/health", host: str = "baton") -> int:
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
        return (await client.get(route)).status_code


async def test_openais_client_streams_over_the_socket(decode: FakeNode, path: str) -> None:
    async with pools.running(decode, uds=path) as client:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        http: Any = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path))
        async with openai.AsyncOpenAI(
            base_url="http://baton/v1", api_key="-", http_client=http
        ) as api:
            assert [model.id async for model in api.models.list()] == ["fake-model"]
            stream = await api.completions.create(model="fake-model", prompt="x", stream=True)
            text = "".join([event.choices[0].text async for event in stream])
            assert text == pools.REPLY
            # All clients of a socket are on this machine, as a drain demands of a router without
            # keys.
            drain = await http.post("http://baton/nodes/decode-0/drain")
            assert drain.status_code == 200, drain.text
        assert client.router.port == 0  # no port is open
    assert not os.path.lexists(path)


async def test_a_foreign_host_is_refused_only_if_hosts_are_given(
    decode: FakeNode, path: str
) -> None:
    async with pools.running(decode, uds=path):
        assert await get(path, host="llm.example") == 200
    async with pools.running(decode, uds=path, allowed_hosts=("llm.example",)):
        assert await get(path, host="llm.example") == 200
        assert await get(path, host="evil.example") == 403


async def test_the_socket_of_a_killed_router_is_replaced_and_removed_by_a_signal(
    decode: FakeNode, path: str
) -> None:
    async with process(path, decode) as child:
        child.kill()
        await child.wait()
    assert os.path.lexists(path)
    async with process(path, decode) as child:
        assert await get(path) == 200
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
    assert not os.path.lexists(path)


async def test_a_socket_on_which_somebody_listens_is_refused_and_kept(
    decode: FakeNode, path: str
) -> None:
    async with pools.running(decode, uds=path):
        with pytest.raises(ListenError, match=r"unix:router\.sock: another process listens on it"):
            async with pools.running(decode, uds=path):
                pass
        assert await get(path) == 200


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a-file", "the file exists and is no socket"),
        ("a-link", "the file exists and is no socket"),
        ("no/such/folder", "No such file or directory"),
        ("x" * 200, "path too long"),
    ],
)
async def test_what_is_no_place_for_a_socket_is_refused_and_kept(
    decode: FakeNode, path: str, name: str, problem: str
) -> None:
    Path("a-file").write_text("mine")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("left")
        Path("a-link").symlink_to("left")
    with pytest.raises(ListenError, match=problem):
        async with pools.running(decode, uds=name):
            pass
    assert Path("a-file").read_text() == "mine"
    assert Path("a-link").is_symlink()


async def test_a_router_does_not_remove_the_socket_of_its_successor(
    decode: FakeNode, path: str
) -> None:
    async with pools.running(decode, uds=path):
        os.unlink(path)
        async with pools.running(decode, uds=path):
            pass
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(path)
    assert os.path.lexists(path)
