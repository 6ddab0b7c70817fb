"""Clients of a router, and of a node's link: one request at a time each, no pause between two.

In: questions, forms of requests, ports and links. Out: milliseconds to the first and to the last
token of each.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import NamedTuple

import aiohttp

from baton_protocol.ids import RequestId
from baton_protocol.link import Deltas, RunJob, to_node_codec, to_router_codec
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from benchmarks.support.servers import HOST

ANSWER_S = 60.0
LIMIT_BYTES = 1 << 22


class Question(NamedTuple):
    """The same prompt in both forms, and how many tokens the answer has."""

    text: str
    ids: tuple[int, ...]
    tokens: int


class Timing(NamedTuple):
    first_ms: float
    last_ms: float


Send = Callable[[Question], Awaitable[Timing]]


class Form(NamedTuple):
    """How a client asks for a stream: the route, the body's own fields, and the last event's
    beginning. `headers` are lines of the request."""

    route: str
    fields: Callable[[Question], dict[str, object]]
    last: bytes
    headers: str = ""


def _text(question: Question) -> dict[str, object]:
    return {"prompt": question.text, "max_tokens": question.tokens, "ignore_eos": True}


def _ids(question: Question) -> dict[str, object]:
    ids = {"prompt": question.ids, "return_token_ids": True, "detokenize": False}
    return _text(question) | ids


def _messages(question: Question) -> dict[str, object]:
    message = {"role": "user", "content": question.text}
    return {"messages": [message], "max_tokens": question.tokens, "ignore_eos": True}


def _input(question: Question) -> dict[str, object]:
    return {"input": question.text, "max_output_tokens": question.tokens}


DONE = b"data: [DONE]"
TEXT = Form("/v1/completions", _text, DONE)
IDS = Form("/v1/completions", _ids, DONE)
CHAT = Form("/v1/chat/completions", _messages, DONE)
KEPT_CHAT = Form("/v1/chat/completions", _messages, DONE, "x-baton-resume: 60\r\n")
RESPONSES = Form("/v1/responses", _input, b"event: response.incomplete")  # cut off by the limit
MESSAGES = Form("/v1/messages", _messages, b"event: message_stop")


class HttpClient:
    """One keep-alive connection; as little of a client as can be."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, form: Form
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._model = model
        self._form = form

    async def send(self, question: Question) -> Timing:
        form = self._form
        fields = {"model": self._model, "stream": True, **form.fields(question)}
        body = json.dumps(fields).encode()
        head = (
            f"POST {form.route} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"{form.headers}Content-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + body)
        async with asyncio.timeout(ANSWER_S):
            status = await self._reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"answered {status!r} {await self._reader.read(600)!r}")
            await self._reader.readuntil(b"data: {")
            first = time.perf_counter()
            await self._reader.readuntil(form.last)
            last = time.perf_counter()
            await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return Timing(1e3 * (first - started), 1e3 * (last - started))


class DirectLink:
    """The link to one node, shared by all clients."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws
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

    async def send(self, question: Question) -> Timing:
        rid = RequestId(f"direct-{next(self._numbers)}")
        end = self._ends[rid] = asyncio.get_running_loop().create_future()
        params = SamplingParams(max_tokens=question.tokens, seed=1, ignore_eos=True)
        request = Request(id=rid, attempt=1, prompt_ids=question.ids, params=params, outputs=((),))
        started = time.perf_counter()
        await self._ws.send_bytes(self._encoder.encode(RunJob(request)))
        async with asyncio.timeout(ANSWER_S):
            last = await end
        return Timing(1e3 * (self._firsts.pop(rid) - started), 1e3 * (last - started))


@asynccontextmanager
async def http_clients(
    port: int, model: str, clients: int, form: Form = TEXT
) -> AsyncIterator[list[Send]]:
    """Open a connection per client."""
    opened = [await asyncio.open_connection(HOST, port, limit=LIMIT_BYTES) for _ in range(clients)]
    try:
        yield [HttpClient(*ends, model, form).send for ends in opened]
    finally:
        for _, writer in opened:
            writer.close()


@asynccontextmanager
async def direct_link(url: str) -> AsyncIterator[Send]:
    """The link of the node at `url`, for as many clients as like."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url + "/link", max_msg_size=0, compress=0) as ws,
    ):
        link = DirectLink(ws)
        reading = asyncio.create_task(link.read())
        try:
            yield link.send
        finally:
            reading.cancel()


async def closed_loop(
    senders: Sequence[Send], questions: Iterable[Question], apart_s: float = 0.0
) -> list[Timing]:
    """Each client takes the next question as soon as its last request is over.

    Clients begin so far apart.
    """
    todo = iter(questions)
    found: list[Timing] = []

    async def client(send: Send, begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        for question in todo:
            found.append(await send(question))

    await asyncio.gather(*(client(send, number * apart_s) for number, send in enumerate(senders)))
    return found
