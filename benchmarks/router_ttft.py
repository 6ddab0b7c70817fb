"""What the router adds to the time to the first token, against asking the node's link directly.

Closed loop: so many clients, each with one request at a time, no pause. Prompts of one kind go in
alternating rounds straight down the nodes' links (RunJob) and through the router's HTTP API; both
are timed from sending to the first token. The nodes are real processes on the simulated engine,
20 ms of prefill and 5 ms a token; the store is a real Redis, so that the router's lookups count.

There are as many nodes as clients: a client has one to itself, directly, and the router spreads
requests over them. With fewer, requests wait for each other's 20 ms steps, and whether two of them
catch the same step is worth more than all that the router does.

    python -m benchmarks.router_ttft [--clients 8] [--requests 800] [--limit-ms 3] [--quick]

Prints medians and tails of both and the difference of the medians; exit 1 if it is over the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec

from baton_kvstore.embedded import EmbeddedStore
from baton_node.settings import NodeSettings, SimOptions
from baton_protocol.ids import RequestId
from baton_protocol.link import Deltas, RunJob, to_node_codec, to_router_codec
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from baton_router import RouterSettings

START_S = 60.0
ANSWER_S = 30.0
PROMPT_CHARS = 256
ANSWER_TOKENS = (4, 32)
ROUNDS = 5
NODE_MAIN = """
import asyncio, sys
from baton_node.settings import NodeSettings
from baton_decode_node import serve
asyncio.run(serve(NodeSettings.from_json(sys.stdin.buffer.read())))
"""
ROUTER_MAIN = """
import asyncio, sys, msgspec
from baton_router import RouterSettings, serve
asyncio.run(serve(msgspec.json.decode(sys.stdin.buffer.read(), type=RouterSettings)))
"""


@dataclass(frozen=True)
class Question:
    prompt: str
    tokens: int


Ask = Callable[[Question], Awaitable[float]]


@dataclass
class Samples:
    """Milliseconds to the first token."""

    direct: list[float] = field(default_factory=list)
    router: list[float] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def child(code: str, settings: bytes) -> Iterator[None]:
    """A Python process that reads its settings from stdin; ends with the block."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(settings)
        process.stdin.close()
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def answers(url: str) -> None:
    """Wait until GET `url` is a 200."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


class DirectLink:
    """The link to one node."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._encoder, self._decoder = to_node_codec(), to_router_codec()
        self._firsts: dict[RequestId, asyncio.Future[float]] = {}
        self._ends: dict[RequestId, asyncio.Future[None]] = {}
        self._count = 0

    async def read(self) -> None:
        async for message in self._socket:
            frame = self._decoder.decode(message.data)
            now = time.perf_counter()
            if isinstance(frame, Deltas):
                for delta in frame.items:
                    self._saw(delta.request, now, ended=delta.finish is not None)

    def _saw(self, request: RequestId, now: float, *, ended: bool) -> None:
        first = self._firsts.get(request)
        if first is not None and not first.done():
            first.set_result(now)
        if ended and request in self._ends:
            self._ends.pop(request).set_result(None)

    async def ask(self, question: Question) -> float:
        """Milliseconds to the first token; returns when the request is over."""
        self._count += 1
        rid = RequestId(f"direct-{self._count}")
        loop = asyncio.get_running_loop()
        first = self._firsts[rid] = loop.create_future()
        end = self._ends[rid] = loop.create_future()
        request = Request(
            id=rid,
            attempt=1,
            prompt_ids=tuple(question.prompt.encode()),
            params=SamplingParams(max_tokens=question.tokens, temperature=0.0, seed=1),
            outputs=((),),
        )
        started = time.perf_counter()
        await self._socket.send_bytes(self._encoder.encode(RunJob(request)))
        async with asyncio.timeout(ANSWER_S):
            await end
        del self._firsts[rid]
        seen: float = first.result()
        return 1000 * (seen - started)


class HttpClient:
    """One keep-alive connection to the router; as little of a client as can be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, question: Question) -> float:
        body = json.dumps(
            {
                "prompt": question.prompt,
                "max_tokens": question.tokens,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + body)
        async with asyncio.timeout(ANSWER_S):
            status = await self._reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the router answered {status!r}")
            await self._reader.readuntil(b"data: ")
            first = time.perf_counter()
            await self._reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        return 1000 * (first - started)


async def closed_loop(asks: list[Ask], questions: list[Question]) -> list[float]:
    """Each client takes the next question as soon as its last request is over."""
    todo = iter(questions)
    found: list[float] = []

    async def client(ask: Ask) -> None:
        for question in todo:
            found.append(await ask(question))

    await asyncio.gather(*(client(ask) for ask in asks))
    return found


async def measure(urls: Sequence[str], router_port: int, options: argparse.Namespace) -> Samples:
    rng = random.Random(0)
    samples = Samples()

    def questions(count: int) -> list[Question]:
        return [
            Question(
                "".join(rng.choices(string.ascii_letters, k=PROMPT_CHARS)),
                rng.randint(*ANSWER_TOKENS),
            )
            for _ in range(count)
        ]

    async with aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        direct: list[Ask] = []
        for url in urls:
            ws = await stack.enter_async_context(
                session.ws_connect(url + "/link", max_msg_size=0, compress=0)
            )
            link = DirectLink(ws)
            stack.callback(asyncio.create_task(link.read()).cancel)
            direct.append(link.ask)
        http = [HttpClient(*await asyncio.open_connection("127.0.0.1", router_port)) for _ in urls]
        routed: list[Ask] = [client.ask for client in http]
        for asks in (direct, routed):
            await closed_loop(asks, questions(options.clients * 4))
        for _ in range(ROUNDS):
            samples.direct += await closed_loop(direct, questions(options.requests // ROUNDS))
            samples.router += await closed_loop(routed, questions(options.requests // ROUNDS))
    return samples


def node(name: str, store: EmbeddedStore, port: int) -> NodeSettings:
    return NodeSettings(
        node=name,
        role="decode",
        port=port,
        engine="sim",
        kv_blocks=4_000,
        chunk_blocks=1,
        index_url=store.index_url,
        data_urls=store.data_urls,
        sim=SimOptions(prefill_base_ms=20.0, decode_ms=5.0),
    )


async def run(options: argparse.Namespace) -> Samples:
    """Redis, the nodes and a router as processes, and the clients in this one."""
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedStore())
        urls = []
        for index in range(options.clients):
            port = free_port()
            settings = node(f"decode-{index}", store, port)
            stack.enter_context(child(NODE_MAIN, settings.to_json()))
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            await answers(url + "/ready")
        port = free_port()
        router = RouterSettings(port=port, nodes=tuple(urls), index_url=store.index_url)
        stack.enter_context(child(ROUTER_MAIN, msgspec.json.encode(router)))
        await answers(f"http://127.0.0.1:{port}/ready")
        return await measure(urls, port, options)


def line(name: str, found: list[float]) -> str:
    cuts = statistics.quantiles(found, n=100)
    return (
        f"{name:<8} n={len(found):<5} median {statistics.median(found):7.2f} ms"
        f"   mean {statistics.fmean(found):7.2f}"
        f"   p90 {cuts[89]:7.2f}   p99 {cuts[98]:7.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=800, help="per way, in all rounds")
    parser.add_argument("--limit-ms", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    options = parser.parse_args()
    if options.quick:
        options.requests //= 4
    samples = asyncio.run(run(options))
    added = statistics.median(samples.router) - statistics.median(samples.direct)
    print(line("direct", samples.direct))
    print(line("router", samples.router))
    print(f"the router adds {added:.2f} ms at the median (limit {options.limit_ms:g} ms)")
    return 0 if added <= options.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
