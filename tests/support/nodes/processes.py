"""Real nodes for tests: a server process with its engine process, and a router's end of a link.

In: NodeSettings. Out: `NodeProcess` (started, awaited, stopped) and `LinkClient` (frames both ways,
sorted by request).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from baton_node.settings import NodeSettings
from baton_protocol.ids import RequestId
from baton_protocol.link import (
    CacheEvents,
    Delta,
    Deltas,
    Hello,
    JobFailed,
    Load,
    PrefillDone,
    ToNode,
    ToRouter,
    to_node_codec,
    to_router_codec,
)
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_request(name: str, prompt: bytes, attempt: int = 1, **params: Any) -> Request:
    """A greedy request over the byte tokenizer; `params` go to SamplingParams."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
    return Request(
        id=RequestId(name),
        attempt=attempt,
        prompt_ids=tuple(prompt),
        params=sampling,
        outputs=((),) * sampling.n,
    )


class NodeProcess:
    """One node's server process; its engine is its child."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.url = f"http://127.0.0.1:{settings.port}"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.nodes.serve_node",
            msgspec.json.encode(self.settings).decode(),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )

    async def ready(self) -> None:
        """Wait until /ready answers 200; fail with stderr if the process ends before that."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
            while True:
                assert self.process.returncode is None, (await self.errors())[-2000:]
                try:
                    async with session.get(f"{self.url}/ready") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)

    async def errors(self) -> str:
        """All of stderr, once the process has ended."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()

    async def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.ended()


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not count as alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")


async def until_gone(pid: int) -> None:
    """Wait until a killed process is gone."""
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(pid):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(*settings: NodeSettings) -> AsyncIterator[list[NodeProcess]]:
    """Yield ready nodes; kill those that still run at the end."""
    nodes = [NodeProcess(each) for each in settings]
    try:
        for node in nodes:
            await node.start()
        for node in nodes:
            await node.ready()
        yield nodes
    finally:
        for node in nodes:
            await node.kill()


class SharedNodes:
    """Nodes that several tests share, by name. A node that a test has ended is restarted."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeProcess] = {}

    async def node(self, name: str, settings: Callable[[], NodeSettings]) -> NodeProcess:
        """Return the named node when it is ready."""
        node = self._nodes.get(name)
        if node is None or node.process.returncode is not None:
            node = self._nodes[name] = NodeProcess(settings())
            await node.start()
        await node.ready()
        return node

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.kill()


class LinkClient:
    """A router's end of a link. `frames` holds all received frames in order."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._out, self._in = to_node_codec(), to_router_codec()
        self._changed = asyncio.Condition()
        self.frames: list[ToRouter] = []
        self.closed = False

    async def send(self, frame: ToNode) -> None:
        await self.send_bytes(self._out.encode(frame))

    async def send_bytes(self, data: bytes) -> None:
        """Send bytes that may not be a valid frame."""
        await self._socket.send_bytes(data)

    async def read(self) -> None:
        """Collect frames until the link ends; run as a task."""
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                async with self._changed:
                    self.frames.append(self._in.decode(message.data))
                    self._changed.notify_all()
        async with self._changed:
            self.closed = True
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self.closed or condition())
        assert condition(), "the link ended before the condition held"

    @property
    def hello(self) -> Hello:
        first = self.frames[0]
        assert isinstance(first, Hello)
        return first

    def of(self, name: str) -> list[Delta]:
        """All deltas of a request."""
        frames = [frame for frame in self.frames if isinstance(frame, Deltas)]
        return [item for frame in frames for item in frame.items if item.request == name]

    def last_load(self) -> Load:
        return [frame for frame in self.frames if isinstance(frame, Load)][-1]

    async def load(self) -> Load:
        """Wait for a load report, and return the latest."""
        await self.until(lambda: any(isinstance(frame, Load) for frame in self.frames))
        return self.last_load()

    def cached(self) -> set[bytes]:
        """The chunk hashes in the node's own cache, from its cache events."""
        cached: set[bytes] = set()
        for frame in self.frames:
            if isinstance(frame, CacheEvents):
                cached = set() if frame.reset else cached
                cached |= set(frame.stored)
                cached -= set(frame.evicted)
        return cached

    async def prefilled(self, name: str) -> PrefillDone | JobFailed:
        def answers() -> list[PrefillDone | JobFailed]:
            return [
                frame
                for frame in self.frames
                if isinstance(frame, PrefillDone | JobFailed) and frame.request == name
            ]

        await self.until(lambda: bool(answers()))
        return answers()[0]

    async def finished(self, name: str, choices: int = 1) -> list[Delta]:
        """Wait until all choices of a request have ended, and return its deltas."""
        await self.until(
            lambda: sum(delta.finish is not None for delta in self.of(name)) == choices
        )
        return self.of(name)

    async def failure(self, name: str) -> JobFailed:
        frame = await self.prefilled(name)
        assert isinstance(frame, JobFailed)
        return frame


@asynccontextmanager
async def linked(node: NodeProcess) -> AsyncIterator[LinkClient]:
    """Yield a link that has received the node's hello, or was closed."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{node.url}/link", max_msg_size=0) as socket,
    ):
        client = LinkClient(socket)
        reading = asyncio.create_task(client.read())
        try:
            await client.until(lambda: bool(client.frames) or client.closed)
            yield client
        finally:
            await socket.close()
            await reading
