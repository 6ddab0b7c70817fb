"""Request bodies that are large, slow or incomplete: timeouts, memory bounds and size limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.errors import BodiesFull, BodyTimeout, TooLarge
from baton_protocol.link import RunJob
from baton_router.http.body_limits import SMALL, BodyLimits
from baton_router.settings import RouterSettings
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.nodes.fake_node import FakeNode

COMPLETIONS = "/v1/completions"
KEYS = "acme key-of-acme\nglobex key-of-globex\n"
ACME, GLOBEX = ({"Authorization": f"Bearer key-of-{name}"} for name in ("acme", "globex"))
END_S = 120.0
LARGE = 3 * SMALL


def head(length: int, headers: Mapping[str, str] | None = None) -> bytes:
    default = {"Host": "localhost", "Content-Type": JSON_TYPE, "Content-Length": str(length)}
    return raw_request("POST", COMPLETIONS, {**default, **(headers or {})}, length=False)


class Connection:
    """A client connection for arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """The next answer on the connection."""
        async with asyncio.timeout(END_S):
            headers = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(headers.split("content-length: ")[1].split("\r\n")[0])
            return int(headers.split(" ")[1]), json.loads(await self._reader.readexactly(length))

    async def ended(self) -> bytes:
        """All bytes received until the router closed the connection."""
        async with asyncio.timeout(END_S):
            return await self._reader.read()


Connect = Callable[[Any, bytes], Awaitable[Connection]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`await connect(client, data)`: a connection to the router on which `data` was written. The
    fixture closes all of its connections."""
    opened: list[Connection] = []

    async def to(client: Any, data: bytes) -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", client.router.port))
        opened.append(connection)
        connection.writer.write(data)
        await connection.writer.drain()
        return connection

    yield to
    for connection in opened:
        connection.writer.close()
        with contextlib.suppress(ConnectionError):
            await connection.writer.wait_closed()


# --- time -------------------------------------------------------------------------------------


@pytest.mark.integration
async def test_connections_with_half_a_request_are_closed(
    running: Any, decode: FakeNode, connect: Connect
) -> None:
    half = head(50)[:-2]
    async with running(decode, header_timeout_s=0.3) as client:
        waiting = [await connect(client, half) for _ in range(50)]
        waiting.append(await connect(client, b""))
        assert [await connection.ended() for connection in waiting] == [b""] * 51
        assert (await client.get("/health"))[0] == 200


@pytest.mark.integration
async def test_half_a_body_is_answered_408_and_its_connection_is_closed(
    running: Any, decode: FakeNode, connect: Connect
) -> None:
    async with running(decode, body_timeout_s=0.3) as client:
        waiting = [await connect(client, head(50) + b'{"prompt":') for _ in range(50)]
        for connection in waiting:
            status, reply = await connection.answer()
            assert (status, reply["error"]["code"]) == (408, "body_timeout")
            assert reply["error"]["type"] == "invalid_request_error"
            assert "10 bytes of 50" in reply["error"]["message"]
            assert await connection.ended() == b""
        assert decode.got_of(RunJob) == []


@pytest.mark.integration
async def test_a_slow_body_is_read_and_one_below_the_minimum_rate_times_out(
    running: Any, decode: FakeNode, connect: Connect
) -> None:
    """Both bodies take longer than `body_timeout_s`. Only the first is faster than
    `body_bytes_per_s`."""
    body = json.dumps({"prompt": "x" * 40, "max_tokens": 1}).encode()
    async with running(decode, body_timeout_s=2.0, body_bytes_per_s=10) as client:
        slow = await connect(client, head(len(body)))
        for at in range(0, len(body), 8):
            await asyncio.sleep(0.3)
            slow.writer.write(body[at : at + 8])
        assert (await slow.answer())[0] == 200
        trickle = await connect(client, head(1000))

        async def send() -> None:
            while True:
                await asyncio.sleep(0.4)
                trickle.writer.write(b" ")

        sending = asyncio.create_task(send())
        status, reply = await trickle.answer()
        sending.cancel()
        assert (status, reply["error"]["code"]) == (408, "body_timeout")


@pytest.mark.integration
async def test_an_idle_connection_has_its_own_timeout(
    running: Any, decode: FakeNode, connect: Connect
) -> None:
    request = head(2) + b"{}"
    async with running(decode, header_timeout_s=0.2, idle_timeout_s=600.0) as client:
        kept = await connect(client, request)
        assert (await kept.answer())[0] == 400
        await asyncio.sleep(1.0)
        kept.writer.write(request)
        assert (await kept.answer())[0] == 400
        kept.writer.write(request[:30])
        assert await kept.ended() == b""
    async with running(decode, idle_timeout_s=0.2) as client:
        kept = await connect(client, request)
        assert (await kept.answer())[0] == 400
        assert await kept.ended() == b""


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.integration
async def test_one_tenant_s_large_bodies_delay_neither_its_small_ones_nor_another_tenant_s(
    running: Any, decode: FakeNode, connect: Connect, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * LARGE}).encode()
    settings = {
        "api_keys": str(keys),
        "max_body_bytes": 2 * LARGE,
        "max_bodies_bytes": 4 * LARGE,
        "queue_timeout_s": 0.5,
    }
    async with running(decode, **settings) as client:
        half = [await connect(client, head(len(body), ACME) + body[:9]) for _ in range(9)]
        refusals = [await connection.answer() for connection in half[1:]]
        codes = {(status, reply["error"]["code"]) for status, reply in refusals}
        assert codes == {(429, "bodies_full")}
        status, reply, headers = await client.post(COMPLETIONS, body, ACME)
        assert (status, reply["error"]["code"]) == (429, "bodies_full")
        assert int(headers["retry-after"]) >= 1
        small = {"prompt": "x", "max_tokens": 1}
        assert (await client.post(COMPLETIONS, small, ACME))[0] == 200
        assert (await client.post(COMPLETIONS, body, GLOBEX))[0] == 200
        half[0].writer.write(body[9:])
        assert (await half[0].answer())[0] == 200
        assert (await client.post(COMPLETIONS, body, ACME))[0] == 200


class FakeRequest:
    """The part of aiohttp's request that BodyLimits reads."""

    def __init__(self, length: int | None, headers: Mapping[str, str] | None = None) -> None:
        self.content_length = length
        self.headers = dict(headers or {})
        self.content = self
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def readany(self) -> bytes:
        return await self.pieces.get()


def fake_request(length: int | None, *pieces: bytes, **headers: str) -> Any:
    request = FakeRequest(length, headers)
    for piece in pieces:
        request.pieces.put_nowait(piece)
    return request


async def hold(bodies: BodyLimits, tenant: str, size: int) -> asyncio.Task[None]:
    """A body that holds its memory until the task is cancelled."""

    async def read() -> None:
        async with bodies.of(fake_request(size), tenant):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def drop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_memory_goes_to_tenants_in_turns_and_is_all_released() -> None:
    bodies = BodyLimits(RouterSettings(max_bodies_bytes=4 * LARGE, queue_timeout_s=600.0))
    started: list[str] = []

    async def read(tenant: str) -> None:
        async with bodies.of(fake_request(LARGE, b"x" * LARGE, b""), tenant):
            started.append(tenant)
            await asyncio.sleep(0)

    holding = [await hold(bodies, tenant, 2 * LARGE) for tenant in ("acme", "globex")]
    reading = [asyncio.create_task(read(tenant)) for tenant in ("a", "a", "a", "b", "b", "c")]
    leaving = await hold(bodies, "c", LARGE)
    await drop(leaving)
    assert started == []
    await drop(holding[0])
    await asyncio.gather(*reading)
    assert started[:3] == ["a", "b", "c"]
    assert sorted(started) == ["a", "a", "a", "b", "b", "c"]
    await drop(holding[1])
    all_memory = [await hold(bodies, tenant, 2 * LARGE) for tenant in ("d", "e")]
    waiting = await hold(bodies, "f", LARGE)
    without_wait = BodyLimits(RouterSettings(max_bodies_bytes=LARGE, queue_timeout_s=0.01))
    await drop(waiting, *all_memory)
    first = await hold(without_wait, "g", LARGE)
    with pytest.raises(BodiesFull):
        await without_wait.read(fake_request(LARGE))
    await drop(first)
    async with without_wait.of(fake_request(LARGE, b"x", b""), "h"):
        pass


async def test_a_body_of_unknown_length_reserves_memory_for_the_largest_one() -> None:
    bodies = BodyLimits(
        RouterSettings(max_body_bytes=LARGE, max_bodies_bytes=2 * LARGE, queue_timeout_s=0.01)
    )
    holding = await hold(bodies, "", SMALL + 1)
    assert await bodies.read(fake_request(None, b"x" * SMALL, b"")) == b"x" * SMALL
    for request in (
        fake_request(None, b"x" * SMALL, b"x", b""),
        fake_request(SMALL, b"x" * SMALL, b"x", b"", **{"Content-Encoding": "gzip"}),
    ):
        with pytest.raises(BodiesFull):
            await bodies.read(request)
    await drop(holding)
    assert len(await bodies.read(fake_request(None, b"x" * SMALL, b"x", b""))) == SMALL + 1
    with pytest.raises(TooLarge):
        await bodies.read(fake_request(None, b"x" * LARGE, b"x", b""))
    with pytest.raises(TooLarge):
        await bodies.read(fake_request(LARGE + 1))


async def test_waiting_for_memory_does_not_count_towards_the_body_timeout() -> None:
    bodies = BodyLimits(RouterSettings(max_bodies_bytes=LARGE, body_timeout_s=0.2))
    holding = await hold(bodies, "acme", LARGE)
    request = fake_request(None, b"x" * (SMALL + 1))
    reading = asyncio.create_task(bodies.read(request))
    waiting = asyncio.create_task(bodies.read(fake_request(LARGE, b"x" * LARGE, b"")))
    with pytest.raises(BodyTimeout):
        await holding
    request.pieces.put_nowait(b"")
    assert len(await reading) == SMALL + 1
    assert len(await waiting) == LARGE


# --- length -----------------------------------------------------------------------------------


@pytest.mark.integration
async def test_a_prompt_that_cannot_fit_the_context_is_refused_before_it_is_tokenized(
    running: Any,
) -> None:
    node = FakeNode("decode-0", "decode", max_model_len=20_000)
    await node.start()
    longest = len("<|bos|>")  # the byte tokenizer's longest token
    async with running(node) as client:
        tokenizer = client.router.fleet.offers.choose(None).model.tokenizer
        assert tokenizer.longest_token == longest
        for prompt, message in (
            ("x" * (20_000 * longest), f"has {20_000 * longest} characters"),
            ("x " * 60_000, "has more than 19999"),
            ([1] * 20_000, "has 20000"),
            (["x", [1]], "must be a string"),
        ):
            status, body, _ = await client.post(COMPLETIONS, {"prompt": prompt})
            assert status == 400
            assert message in body["error"]["message"], message
        chat = {"messages": [{"role": "user", "content": "x" * 19_999}]}
        status, body, _ = await client.post("/v1/chat/completions", chat)
        assert (status, body["error"]["param"]) == (400, "messages")
        fits = {"prompt": "<|bos|>" * 19_999, "max_tokens": 1}
        status, body, _ = await client.post(COMPLETIONS, fits)
        assert (status, body["usage"]["prompt_tokens"]) == (200, 19_999)
    await node.stop()


@pytest.mark.integration
async def test_a_conversation_that_cannot_fit_the_context_is_refused_before_it_is_rendered(
    running: Any,
) -> None:
    node = FakeNode("decode-0", "decode", max_model_len=1000)
    await node.start()
    async with running(node) as client:
        message = {"role": "user", "content": "x" * (8 * 1000 * len("<|bos|>"))}
        status, body, _ = await client.post("/v1/chat/completions", {"messages": [message]})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert body["error"]["param"] == "messages"
        assert "is made of 56030 characters" in body["error"]["message"]
    await node.stop()


@pytest.mark.integration
async def test_the_total_size_of_a_call_s_prompts_is_bounded(
    running: Any, connect: Connect
) -> None:
    node = FakeNode("decode-0", "decode", max_model_len=60_000)
    await node.start()
    async with running(node) as client:
        prompts = ("x" * 59_000, [1] * 59_000)
        texts, ids = (json.dumps({"prompt": [prompt] * 20}) for prompt in prompts)
        status, reply = await (await connect(client, head(len(texts)) + texts.encode())).answer()
        assert (status, reply["error"]["param"]) == (400, "prompt")
        assert "the first 18 already have 1062000" in reply["error"]["message"]
        status, reply = await (await connect(client, head(len(ids)) + ids.encode())).answer()
        assert (status, reply["error"]["code"]) == (413, "request_too_large")
    await node.stop()


@pytest.mark.integration
async def test_an_abandoned_body_releases_its_memory(
    running: Any, decode: FakeNode, connect: Connect
) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * LARGE}).encode()
    async with running(decode, max_body_bytes=2 * LARGE, max_bodies_bytes=LARGE) as client:
        connection = await connect(client, head(len(body)) + body[:9])
        connection.writer.transport.abort()
        assert (await client.post(COMPLETIONS, body))[0] == 200
