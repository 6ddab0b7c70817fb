"""Clients of a router, and of a node's link: one request at a time each, no pause between two.

In: prompts, connections. Out: milliseconds to the first and to the last token of each request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import aiohttp

from baton_protocol.ids import RequestId
from baton_protocol.link import Deltas, RunJob, to_node_codec, to_router_codec
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams

ANSWER_S = 60.0
HOST = "127.0.0.1"
LIMIT_BYTES = 1 << 22


class Question(NamedTuple):
    """The same prompt in both forms."""

    text: str
    ids: tuple[int, ...]


class Timing(NamedTuple):
    first_ms: float
    last_ms: float


Ask = Callable[[Question], Awaitable[Timing]]


class HttpClient:
    """One keep-alive connection; as little of a client as can be."""

    def __init__(self, model: str, tokens: int, *, as_ids: bool = False) -> None:
        self._fields = {"model": model, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self._as_ids = as_ids

    async def connect(self, port: int) -> HttpClient:
        opened = await asyncio.open_connection(HOST, port, limit=LIMIT_BYTES)
        self._reader, self._writer = opened
        return self

    def close(self) -> None:
        self._writer.close()

    async def ask(self, question: Question) -> Timing:
        prompt = question.ids if self._as_ids else question.text
        body = json.dumps({**self._fields, "prompt": prompt}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + body)
        async with asyncio.timeout(ANSWER_S):
            status = await self._reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"answered {status!r} {await self._reader.read(600)!r}")
            await self._reader.readuntil(b"data: {")
            first = time.perf_counter()
            await self._reader.readuntil(b"data: [DONE]")
            last = time.perf_counter()
            await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return Timing(1e3 * (first - started), 1e3 * (last - started))


class DirectLink:
    """The link to one node, shared by all clients."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse, tokens: int) -> None:
        self._ws = ws
        self._tokens = tokens
        self._encoder, self._decoder = to_node_codec(), to_router_codec()
        self._firsts: dict[RequestId, float] = {}
        self._ends: dict[RequestId, asyncio.Future[float]] = {}
        self._numbers = count()

    async def read(self) -> None:
        async for message in self._ws:
            frame = self._decoder.decode(message.data)
            now = time.perf_counter()
            if isinstance(frame, Deltas):
                for delta in frame.items:
                    self._firsts.setdefault(delta.request, now)
                    if delta.finish is not None and delta.request in self._ends:
                        self._ends.pop(delta.request).set_result(now)

    async def ask(self, question: Question) -> Timing:
        rid = RequestId(f"direct-{next(self._numbers)}")
        end = self._ends[rid] = asyncio.get_running_loop().create_future()
        params = SamplingParams(max_tokens=self._tokens, seed=1, ignore_eos=True)
        request = Request(id=rid, attempt=1, prompt_ids=question.ids, params=params, outputs=((),))
        started = time.perf_counter()
        await self._ws.send_bytes(self._encoder.encode(RunJob(request)))
        async with asyncio.timeout(ANSWER_S):
            last = await end
        return Timing(1e3 * (self._firsts.pop(rid) - started), 1e3 * (last - started))


async def closed_loop(asks: Sequence[Ask], questions: Iterator[Question]) -> list[Timing]:
    """Each client takes the next question as soon as its last request is over."""
    found: list[Timing] = []

    async def client(ask: Ask) -> None:
        for question in questions:
            found.append(await ask(question))

    await asyncio.gather(*(client(ask) for ask in asks))
    return found
