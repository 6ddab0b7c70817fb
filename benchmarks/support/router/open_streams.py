"""Streams that stay open, and what they cost the router that serves them.

In: the port of a router, and how many streams. Out: streams that have begun and get a token each
second; requests beside them, and without them; the router's memory.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from baton_router import RouterSettings
from benchmarks.support import role_processes
from benchmarks.support.figures import percentile
from benchmarks.support.role_processes import answer_of, model_of
from benchmarks.support.router.load_generator import Question, closed_loop, http_clients
from benchmarks.support.router.mock_backend import SLOW_S, SLOW_USER
from benchmarks.support.router.routers import Side, rivals, sim_node
from benchmarks.support.servers import HOST, free_port

FAST_CLIENTS, FAST_MS = 32, 10.0
SLOW_TOKENS = 600  # more than a measurement takes, at one a second
AT_ONCE = 50  # connections that are opened together; servers accept a limited number
FILES = 16_384
BEGIN_S = 120.0
DRAIN_S = 3600.0
STREAMING_RIVALS = ("vllm-router", "sglang-router", "envoy")  # those whose server can be slow


class Fast(NamedTuple):
    """The fast clients' requests: ms to the first token, and requests per second."""

    p50: float
    p99: float
    rate: float


class StreamFigures(NamedTuple):
    """`stream_kb`: resident memory of the router per open stream; `node_kb`: that of the node's
    server, None for a rival."""

    side: str
    streams: int
    stream_kb: float
    node_kb: float | None
    alone: Fast
    beside: Fast


class OpenStream(asyncio.Protocol):
    """A client that reads everything and keeps nothing."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.begun.done() and b"data: {" in data:
            self.begun.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.begun.done():
            self.begun.set_exception(ConnectionError(f"a stream ended before it began: {exc}"))


def allow_many_files() -> None:
    """Each stream is an open file of this process, and of the router, which inherits the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@asynccontextmanager
async def open_streams(port: int, model: str, count: int) -> AsyncIterator[None]:
    """Streams that have begun; they end with the block."""
    fields = {"model": model, "stream": True, "ignore_eos": True, "max_tokens": SLOW_TOKENS}
    loop, streams = asyncio.get_running_loop(), list[OpenStream]()
    transports = list[asyncio.Transport]()
    try:
        for first in range(0, count, AT_ONCE):
            for number in range(first, min(count, first + AT_ONCE)):
                body = json.dumps({**fields, "prompt": f"Story {number}", "user": SLOW_USER})
                head = (
                    f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                stream = OpenStream((head + body).encode())
                transport, _ = await loop.create_connection(lambda one=stream: one, HOST, port)  # type: ignore[misc]
                streams.append(stream)
                transports.append(transport)
        async with asyncio.timeout(BEGIN_S):
            await asyncio.gather(*(stream.begun for stream in streams))
        yield
    finally:
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)  # they close in the next pass of the loop


async def fast(side: Side, questions: Sequence[Question]) -> Fast:
    async with http_clients(side.port, side.model, FAST_CLIENTS) as senders:
        await closed_loop(senders, questions[:FAST_CLIENTS])  # warm
        began = time.perf_counter()
        timings = await closed_loop(senders, questions)
        took = time.perf_counter() - began
    firsts = [timing.first_ms for timing in timings]
    return Fast(statistics.median(firsts), percentile(firsts, 0.99), len(timings) / took)


async def measure_baton(folder: Path, count: int, questions: Sequence[Question]) -> StreamFigures:
    """The slow streams run on a node that is slow, and then drains, so that it gets no others; the
    fast requests run on a node that came later."""
    with ExitStack() as stack:
        slow, slow_server = sim_node(stack, "slow", 1e3 * SLOW_S, folder, sequences=count + 64)
        port, fast_port = free_port(), free_port()
        urls = (slow, f"http://{HOST}:{fast_port}")
        router = stack.enter_context(
            role_processes.router(RouterSettings(port=port, nodes=urls, keepalive_s=60.0))
        )
        answer_of(f"http://{HOST}:{port}/ready")
        side = Side("baton", port, model_of(port), (router,))
        async with AsyncExitStack() as streams:
            before = router.memory_info().rss, slow_server.memory_info().rss
            await streams.enter_async_context(open_streams(port, side.model, count))
            after = router.memory_info().rss, slow_server.memory_info().rss
            await asyncio.to_thread(drain, port, "slow")
            sim_node(stack, "fast", FAST_MS, folder, port=fast_port)
            await asyncio.to_thread(answer_of, f"http://{HOST}:{port}/ready")
            beside = await fast(side, questions)
        alone = await fast(side, questions)
    stream_kb, node_kb = (
        (end - begin) / count / 1e3 for begin, end in zip(before, after, strict=True)
    )
    return StreamFigures("baton", count, stream_kb, node_kb, alone, beside)


def drain(port: int, node: str) -> None:
    body = json.dumps({"deadline_s": DRAIN_S}).encode()
    url = f"http://{HOST}:{port}/nodes/{node}/drain"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=30):
        pass


async def measure_rivals(
    names: Sequence[str], folder: Path, count: int, questions: Sequence[Question]
) -> list[StreamFigures]:
    found = []
    with ExitStack() as stack:
        streaming = [name for name in names if name in STREAMING_RIVALS]
        for side in rivals(stack, streaming, FAST_MS, folder)[1:]:  # the first is the server alone
            async with AsyncExitStack() as streams:
                before = resident(side)
                await streams.enter_async_context(open_streams(side.port, side.model, count))
                kb = (resident(side) - before) / count / 1e3
                beside = await fast(side, questions)
            alone = await fast(side, questions)
            found.append(StreamFigures(side.name, count, kb, None, alone, beside))
    return found


def resident(side: Side) -> int:
    return sum(process.memory_info().rss for process in side.counted)
