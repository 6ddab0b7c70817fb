"""How a stream's events are written: events that exist at the same time are one write, and the
stream's content does not depend on the cuts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton_protocol.errors import Unavailable
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.sampling import FinishReason
from baton_router.errors import RequestFailed
from baton_router.requests.output_queue import Batch, OutputQueue
from tests.support.clients.raw_http import JSON_TYPE, raw_request
from tests.support.nodes.fake_node import FakeNode


async def chunks(port: int, **fields: Any) -> list[bytes]:
    """The chunks of the answer's HTTP body, one per write of the router."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "x", "stream": True, **fields}).encode()
    headers = {"Host": "localhost", "Content-Type": JSON_TYPE}
    writer.write(raw_request("POST", "/v1/completions", headers, body))
    await reader.readuntil(b"\r\n\r\n")
    received = []
    while size := int(await reader.readline(), 16):
        received.append(await reader.readexactly(size))
        await reader.readline()
    writer.close()
    return received


@pytest.mark.integration
async def test_the_last_token_the_usage_and_done_are_one_write(
    running: Any, decode: FakeNode
) -> None:
    async with running(decode) as client:
        received = await chunks(client.router.port, stream_options={"include_usage": True})
    *_, token, usage, done, rest = received[-1].split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] > 0
    assert json.loads(token.removeprefix(b"data: "))["choices"][0]["finish_reason"] is not None


def delta(text: str, finish: FinishReason | None = None, stop: str | None = None) -> Delta:
    return Delta(RequestId("r"), 1, 0, 0, ids=(7,), text=text, finish=finish, stop=stop)


async def test_an_output_queue_is_over_when_all_requests_ended_and_all_deltas_are_taken() -> None:
    output = OutputQueue(2)
    output.put_delta(0, delta("a"))
    output.end_request()
    await output.next_batch()
    assert not output.over  # the second request continues
    output.put_delta(1, delta("b"))
    output.end_request()
    assert not output.over  # its delta was not taken
    await output.next_batch()
    assert output.over
    assert await output.next_batch() == []


async def test_a_failed_output_queue_is_not_over_but_raises() -> None:
    output = OutputQueue(1)
    output.put_error(Unavailable("gone").record())
    output.end_request()
    assert not output.over
    with pytest.raises(RequestFailed):
        await output.next_batch()


class PourTarget:
    """A `pour` callback that accepts batches if `accepts`."""

    def __init__(self, output: OutputQueue) -> None:
        self.got: list[str] = []
        self.accepts = True
        output.pour = self

    def __call__(self, batch: Batch) -> bool:
        if self.accepts:
            self.got += [delta.text for _, delta in batch]
        return self.accepts


async def read(output: OutputQueue, patience_s: float | None = None) -> list[str]:
    return [delta.text for _, delta in await output.next_batch(patience_s)]


async def test_deltas_are_poured_while_the_reader_waits_and_the_end_wakes_it() -> None:
    output = OutputQueue(1)
    pour = PourTarget(output)
    reader = asyncio.create_task(read(output))
    await asyncio.sleep(0)
    for text in "abc":
        output.put_delta(0, delta(text))
        await asyncio.sleep(0)
    assert (pour.got, reader.done()) == (["a", "b", "c"], False)
    output.put_delta(0, delta("d"))
    output.end_request()
    assert await reader == ["d"]  # the last token and the end are one write
    assert output.over
    assert pour.got == ["a", "b", "c"]


async def test_the_reader_gets_a_batch_that_pour_does_not_take() -> None:
    output = OutputQueue(1)
    pour = PourTarget(output)
    pour.accepts = False
    reader = asyncio.create_task(read(output))
    await asyncio.sleep(0)
    output.put_delta(0, delta("a"))
    assert await reader == ["a"]
    output.put_delta(0, delta("b"))  # the reader does not wait and takes the batch itself
    await asyncio.sleep(0)
    pour.accepts = True
    assert await read(output) == ["b"]
    assert pour.got == []


async def test_an_exception_in_pour_is_raised_in_the_reader() -> None:
    output = OutputQueue(1)

    def fail(batch: Batch) -> bool:
        raise ZeroDivisionError

    output.pour = fail
    reader = asyncio.create_task(read(output))
    await asyncio.sleep(0)
    output.put_delta(0, delta("a"))
    with pytest.raises(ZeroDivisionError):
        await reader


async def test_the_reader_gets_earlier_deltas_before_an_error() -> None:
    output = OutputQueue(1)
    pour = PourTarget(output)
    reader = asyncio.create_task(read(output))
    await asyncio.sleep(0)
    output.put_delta(0, delta("a"))
    output.put_error(Unavailable("gone").record())
    assert await reader == ["a"]
    with pytest.raises(RequestFailed):
        await output.next_batch()
    assert pour.got == []


async def test_a_poured_batch_restarts_the_reader_s_timeout() -> None:
    loop, output = asyncio.get_running_loop(), OutputQueue(1)
    pour = PourTarget(output)
    reader = asyncio.create_task(read(output, 0.2))
    await asyncio.sleep(0.15)
    output.put_delta(0, delta("a"))
    poured_at = loop.time()
    with pytest.raises(TimeoutError):
        await reader
    assert loop.time() - poured_at >= 0.2
    assert pour.got == ["a"]
    output.put_delta(0, delta("b"))
    assert await read(output, 0.2) == ["b"]
    output.cancel_timers()


@pytest.mark.integration
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_has_the_same_content_with_and_without_chunked_encoding(
    running: Any, decode: FakeNode, version: str
) -> None:
    async with running(decode) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.router.port)
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 9}).encode()
        head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(
            f"{head}Content-Type: {JSON_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        received = await reader.read()
        writer.close()
    _, _, answer = received.partition(b"\r\n\r\n")
    if version == "1.1":
        parts = []
        while size := int(answer[: answer.index(b"\r\n")], 16):
            _, _, answer = answer.partition(b"\r\n")
            parts.append(answer[:size])
            answer = answer[size + 2 :]
        answer = b"".join(parts)
    *events, done, rest = answer.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == decode.script.reply[:9].decode()
    assert choices[-1]["finish_reason"] == "length"
